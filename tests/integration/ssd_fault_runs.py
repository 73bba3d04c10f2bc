"""Starts the runs of ssd_fault_worker.py and waits for their ends."""

from __future__ import annotations

import itertools
import json
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from forking import ONE_THREAD
from hangups import heeds_signals

HERE = Path(__file__).resolve().parent
SHIM_SOURCE = HERE.parent / "store" / "fault_shim.c"
PATIENCE_S = 120.0  # for what takes two seconds on an idle machine
Actions = list[list[Any]]


class Run:
    """A training process. `folder`: of its log and result."""

    def __init__(self, launcher: Launcher, folder: Path, actions: Actions, **rank: Any) -> None:
        self.folder = folder
        self._launcher = launcher
        self.pid = int(launcher.ask({"folder": str(folder), "actions": actions, **rank}))
        self._process = os.pidfd_open(self.pid)

    def has_ended(self, timeout_s: float) -> bool:
        return bool(select.select([self._process], [], [], timeout_s)[0])

    def end(self) -> int:
        """The exit code, or minus the signal, of a run that ends by itself."""
        if not self.has_ended(PATIENCE_S):
            os.kill(self.pid, signal.SIGABRT)
            pytest.fail(f"the run hangs\n{self.log[-3000:]}")
        os.close(self._process)
        return self._launcher.reap(self.pid)

    def kill(self, number: int = signal.SIGKILL) -> None:
        os.kill(self.pid, number)

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    @property
    def result(self) -> dict[str, Any]:
        path = self.folder / "result.json"
        found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        return found


class Launcher:
    """The process whose forks the runs are. `shim`: preloaded, None where there is no compiler. `worker`: script."""

    def __init__(self, folder: Path, shim: Path | None, worker: str) -> None:
        self.shim = shim
        self._folder = folder
        self._numbers = itertools.count()
        self._alive: set[int] = set()
        environment = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "DS_ACCELERATOR": "cpu"}
        environment |= ONE_THREAD
        if shim is not None:
            environment["LD_PRELOAD"] = str(shim)
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / worker)],
            env=os.environ | environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            preexec_fn=heeds_signals,
        )
        assert self._answer() == "ready"

    def ask(self, request: dict[str, Any]) -> str:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        answer = self._process.stdout.readline().strip()
        assert answer, "the process that starts the runs has ended"
        return answer

    def begin(self, *actions: list[Any], **rank: Any) -> Run:
        """`rank`: `rank`, `size` and `store` (a path that they share) of one of several."""
        folder = self._folder / f"run{next(self._numbers)}"
        folder.mkdir()
        run = Run(self, folder, list(actions), **rank)
        self._alive.add(run.pid)
        return run

    def begin_ranks(self, *actions: Actions) -> list[Run]:
        """One rank for each list of actions."""
        store = str(self._folder / f"store{next(self._numbers)}")
        return [self.begin(*own, rank=rank, size=len(actions), store=store) for rank, own in enumerate(actions)]

    def reap(self, pid: int) -> int:
        """The exit code of a run that has ended, or minus its signal."""
        self._alive.remove(pid)
        return int(self.ask({"reap": pid}))

    def run(self, *actions: list[Any]) -> dict[str, Any]:
        """The result of a run that must succeed."""
        run = self.begin(*actions)
        code = run.end()
        assert code == 0, f"{code}\n{run.log[-3000:]}"
        return run.result

    def close(self) -> None:
        for pid in list(self._alive):  # of tests that failed
            os.kill(pid, signal.SIGKILL)
            self.reap(pid)
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(PATIENCE_S)


def launched(folder: Path, worker: str = "ssd_fault_worker.py") -> Iterator[Launcher]:
    """For a fixture: a launcher whose runs write to `folder`."""
    launcher = Launcher(folder, compile_shim(folder), worker)
    yield launcher
    launcher.close()


def compile_shim(folder: Path) -> Path | None:
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return None
    path = folder / "fault_shim.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", str(SHIM_SOURCE), "-o", str(path), "-ldl"], check=True)
    return path
