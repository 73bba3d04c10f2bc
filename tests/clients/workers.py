"""Processes in which clients run, and what their results are compared by."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

HERE = Path(__file__).resolve().parent
# The workers are forked when they have imported everything: no library may have started threads by then.
ENVIRONMENT = {
    "DS_ACCELERATOR": "cpu",
    "HF_HUB_OFFLINE": "1",
    "AXOLOTL_DO_NOT_TRACK": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
}
ANSWER = "exit status "
"""How a line of a worker begins that answers; clients write others while they are imported."""


@dataclass
class Worker:
    """A process that has a client's packages imported and forks for every run (see trl_worker.py)."""

    process: subprocess.Popen[str]
    folder: Path

    def run(self, case: str, engine: str, ranks: int = 1) -> dict[str, Any]:
        """What `case` has left when it ran on `engine`, "stock" or "slide"."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{case} {engine} {ranks}\n")
        self.process.stdin.flush()
        line = next((line for line in self.process.stdout if line.startswith(ANSWER)), "")
        answer = line.removeprefix(ANSWER).strip()
        log = self.folder / f"{case}.{engine}.log"
        assert answer == "0", f"{engine}, exit status {answer or 'unknown'}:\n{_end_of(log)}"
        result: dict[str, Any] = torch.load(self.folder / f"{case}.{engine}.pt")
        return result


def distance(left: list[torch.Tensor], right: list[torch.Tensor]) -> float:
    """Euclidean, over all elements."""
    return sum(float((a.double() - b.double()).square().sum()) for a, b in zip(left, right, strict=True)) ** 0.5


def assert_stocks(
    slide: dict[str, Any], stock: dict[str, Any], *, steps: int, loss: float, weights: float, norms: float | None = None
) -> None:
    """Both have trained alike: losses within `loss`, weights within `weights` of the way they have come, and norms of
    gradients, where they are compared, within the part `norms` of them."""
    assert stock["optimizer"] == "DeepSpeedZeroOptimizer_Stage3"
    assert slide["optimizer"] == "SlideZeroOptimizer"
    assert len(slide["log"]) == len(stock["log"]) == steps
    for ours, theirs in zip(slide["log"], stock["log"], strict=True):
        assert ours.keys() == theirs.keys()
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=loss)
        assert ours["learning_rate"] == theirs["learning_rate"]
        if norms is not None:
            assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=norms)
    names = sorted(stock["before"])
    assert names == sorted(stock["weights"]) == sorted(slide["weights"])
    ours, theirs, start = (
        [tensors[name] for name in names] for tensors in (slide["weights"], stock["weights"], stock["before"])
    )
    assert distance(ours, theirs) < weights * distance(theirs, start)


def _end_of(log: Path) -> str:
    return log.read_text()[-6000:] if log.exists() else "the worker has ended"


def start_worker(script: str, folder: Path) -> Iterator[Worker]:
    variables = {name: value for name, value in os.environ.items() if not name.startswith("ACCELERATE_")}
    # Without the repository, whose `kernels` would hide Hugging Face's; the installation finds ds_slide.
    tests, own = HERE.parent, variables.get("PYTHONPATH")
    search = [str(tests), str(tests / "support"), *([own] if own else [])]
    variables |= {**ENVIRONMENT, "PYTHONPATH": os.pathsep.join(search)}
    command = [sys.executable, str(HERE / script), str(folder)]
    with subprocess.Popen(
        command, env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    ) as process:
        try:
            yield Worker(process, folder)
        finally:
            process.stdin.close()  # type: ignore[union-attr]
            process.terminate()
