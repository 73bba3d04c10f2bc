"""Starts the runs of ssd_fault_worker.py and of the workers that are made of it."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import warm
from warm import Run

Actions = list[list[Any]]


def needs_shim() -> None:
    if warm.shim() is None:
        pytest.skip("needs a C compiler for the shim")


class Launcher:
    """Starts runs of one worker, a script beside this file, that write to folders in `folder`."""

    def __init__(self, folder: Path, worker: str) -> None:
        self._folder = folder
        self._worker = worker
        self._numbers = itertools.count()
        self.runs: list[Run] = []

    def begin(self, *actions: list[Any], **rank: Any) -> Run:
        """`rank`: `rank`, `size` and `store` (a path that they share) of one of several."""
        folder = self._folder / f"run{next(self._numbers)}"
        folder.mkdir()
        request = json.dumps({"folder": str(folder), "actions": actions, **rank})
        self.runs.append(warm.start(self._worker, request, folder=folder, faults=True))
        return self.runs[-1]

    def begin_ranks(self, *actions: Actions) -> list[Run]:
        """One rank for each list of actions."""
        store = str(self._folder / f"store{next(self._numbers)}")
        return [self.begin(*own, rank=rank, size=len(actions), store=store) for rank, own in enumerate(actions)]

    def run(self, *actions: list[Any]) -> dict[str, Any]:
        """The result of a run that must succeed."""
        run = self.begin(*actions)
        code = run.end()
        assert code == 0, f"{code}\n{run.log[-3000:]}"
        return run.result


def launched(folder: Path, worker: str = "ssd_fault_worker.py") -> Iterator[Launcher]:
    """For a fixture."""
    launcher = Launcher(folder, worker)
    yield launcher
    for run in launcher.runs:
        run.reap()  # of tests that failed
