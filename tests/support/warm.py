"""Scripts as forks of one process that has imported torch, DeepSpeed and transformers, which takes longer than most do.

There is one such process for each of pytest's, and one more for runs that make I/O fail, which preloads
tests/store/fault_shim.c. Tests of the launcher and of the order of imports start Python themselves.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from forking import ONE_THREAD
from hangups import heeds_signals

HERE = Path(__file__).resolve().parent
TESTS = HERE.parent
PATIENCE_S = 240.0
ON_CPU = {"DS_ACCELERATOR": "cpu", **ONE_THREAD}
OF_A_RANK = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Run:
    """A script that runs, in a session of its own. Its output and, if it leaves any, its result are in `folder`."""

    def __init__(self, parent: subprocess.Popen[str], pid: int, folder: Path) -> None:
        self.pid = pid
        self.folder = folder
        self._parent = parent
        self._process = os.pidfd_open(pid)
        self._code: int | None = None

    def has_ended(self, timeout_s: float) -> bool:
        return self._code is not None or bool(select.select([self._process], [], [], timeout_s)[0])

    def end(self, timeout_s: float = PATIENCE_S) -> int:
        """The exit code, or minus the signal, of a script that ends by itself."""
        try:
            assert self.has_ended(timeout_s), f"the script hangs\n{self.log[-4000:]}"
        finally:
            self.reap()
        assert self._code is not None
        return self._code

    def reap(self) -> None:
        """Kill what there is of it still, unless it has ended well."""
        if self._code is not None:
            return
        if not self.has_ended(0.0):
            self._kill_session()
        self._code = int(_ask(self._parent, {"reap": self.pid}))
        os.close(self._process)
        if self._code != 0:
            self._kill_session()

    def _kill_session(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def kill(self, number: int = signal.SIGKILL) -> None:
        os.kill(self.pid, number)

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    @property
    def result(self) -> dict[str, Any]:
        path = self.folder / "result.json"
        found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        return found


def start(script: str | Path, *arguments: str | Path, folder: Path, faults: bool = False, **environment: str) -> Run:
    """`python SCRIPT ARGUMENTS`, of no rank unless the environment says so. `script`: a path, or a file beside this
    one. `faults`: with the shim if there is one."""
    request = {
        "script": str(HERE / script),
        "arguments": [str(argument) for argument in arguments],
        "environment": environment,
        "log": str(folder / "log"),
    }
    parent = _process(shim() if faults else None)
    return Run(parent, int(_ask(parent, request)), folder)


@functools.cache
def shim() -> Path | None:
    """The compiled fault_shim.c; None without a compiler."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return None
    path = Path(tempfile.mkdtemp(prefix="fault_shim")) / "fault_shim.so"
    source = TESTS / "store" / "fault_shim.c"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", str(source), "-o", str(path), "-ldl"], check=True)
    return path


@functools.cache
def _process(preloaded: Path | None) -> subprocess.Popen[str]:
    """It ends when this process does, whose end of the pipe closes then."""
    folders = [str(TESTS.parent), str(TESTS), str(HERE), os.environ.get("PYTHONPATH", "")]
    environment = {name: value for name, value in os.environ.items() if name not in OF_A_RANK}
    environment |= {"PYTHONPATH": os.pathsep.join(filter(None, folders)), **ON_CPU}
    if preloaded is not None:
        environment["LD_PRELOAD"] = str(preloaded)
    return subprocess.Popen(
        [sys.executable, str(HERE / "warm_process.py")],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
        preexec_fn=heeds_signals,
    )


def _ask(process: subprocess.Popen[str], request: dict[str, Any]) -> str:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(json.dumps(request) + "\n")
    answer = process.stdout.readline().strip()
    assert answer, "the process that starts the scripts has ended"
    return answer
