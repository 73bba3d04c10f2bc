"""Steps that all ranks take together: they go on when every one of them has succeeded, or stop with the same fault."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from deepspeed import comm as dist

from ds_slide.errors import SlideError

T = TypeVar("T")


@dataclass(frozen=True)
class Failure:
    """What went wrong on a rank, in words."""

    message: str


def together(step: Callable[[], T]) -> list[T]:
    """Run `step` on every rank and return what each of them returned, by rank. Collective.

    Where a rank fails, it raises its own exception and the others SlideError: nobody is left waiting.
    """
    own: Any
    fault: Exception | None = None
    try:
        own = step()
    except Exception as error:
        own, fault = Failure(f"{error}" if isinstance(error, SlideError) else f"{type(error).__name__}: {error}"), error
    results: list[Any] = [own]
    if dist.get_world_size() > 1:
        results = [None] * dist.get_world_size()
        dist.all_gather_object(results, own)
    if fault is not None:
        raise fault
    for rank, result in enumerate(results):
        if isinstance(result, Failure):
            raise SlideError(f"rank {rank}: {result.message}")
    return results
