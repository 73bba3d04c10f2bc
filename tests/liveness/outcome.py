"""How a run ended, and who waited for what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Wait:
    thread: str
    kind: str
    target: str
    stack: list[str]

    def __str__(self) -> str:
        return f"{self.thread}: {self.kind} {self.target}\n" + "\n".join(f"    {line}" for line in self.stack)


@dataclass
class Outcome:
    """How a run ended. kind: "done", "deadlock", "error" or "stopped" (by the one who chooses)."""

    kind: str
    choices: list[int] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    points: int = 0
    waits: list[Wait] = field(default_factory=list)
    message: str = ""
    result: Any = None

    def __str__(self) -> str:
        return "\n".join([f"{self.kind}: {self.message}", *map(str, self.waits)])


def describe(target: Any) -> str:
    return target.describe() if hasattr(target, "describe") else str(getattr(target, "name", type(target).__name__))


def stack_of(frames: Sequence[Any]) -> list[str]:
    """Where the engine stands, outermost first. `frames`: of a thread, innermost first."""
    lines = []
    for frame in reversed(frames):
        code = frame.f_code
        if "/ds_slide/" in code.co_filename or code.co_filename.endswith("training.py"):
            place = code.co_filename.split("/ds_slide/")[-1].rsplit("/liveness/", maxsplit=1)[-1]
            unit = frame.f_locals.get("unit")
            of = f" ({unit.name})" if hasattr(unit, "name") else ""
            lines.append(f"{place}:{frame.f_lineno} {code.co_qualname}{of}")
    return lines
