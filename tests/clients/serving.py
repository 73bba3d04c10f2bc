"""The worker's side of `conftest.Worker`: a fork for every run, in a process that has imported everything.

A fork, because accelerate keeps one configuration for a process, and the imports take longer than a run.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from forking import ask_cpu_once, require_one_thread


def serve(run: Callable[[Path, str, str], dict[str, Any]]) -> None:
    """`python WORKER FOLDER`: reads "CASE RUN" from lines of stdin and answers each with the exit status of its fork,
    which leaves FOLDER/CASE.RUN.pt, what `run(FOLDER, CASE, RUN)` returns, and FOLDER/CASE.RUN.log."""
    folder = Path(sys.argv[1])
    ask_cpu_once()
    require_one_thread()
    launcher = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    os.environ.update(launcher)
    for line in sys.stdin:
        case, which = line.split()
        if child := os.fork():
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
            continue
        log = os.open(folder / f"{case}.{which}.log", os.O_WRONLY | os.O_CREAT, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        torch.save(run(folder, case, which), folder / f"{case}.{which}.pt")
        return
