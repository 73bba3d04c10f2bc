"""The worker's side of `workers.Worker`: a fork for every run, in a process that has imported everything.

A fork, because accelerate keeps one configuration for a process, and the imports take longer than a run.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from forking import ask_cpu_once, require_one_thread
from ports import free_port
from workers import ANSWER


def serve(run: Callable[[Path, str, str], dict[str, Any]]) -> None:
    """`python WORKER FOLDER`: reads "CASE RUN RANKS" from lines of stdin and answers each with the exit status of its
    fork, which leaves FOLDER/CASE.RUN.pt, what `run(FOLDER, CASE, RUN)` returns, and FOLDER/CASE.RUN.log. Of several
    ranks, each a fork, the first leaves them, and the answer is the first status that is not 0."""
    folder = Path(sys.argv[1])
    ask_cpu_once()
    require_one_thread()
    for line in sys.stdin:
        case, which, ranks = line.split()
        port = "0" if ranks == "1" else str(free_port())
        children = {}
        for rank in range(int(ranks)):
            if child := os.fork():
                children[child] = rank
                continue
            os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": ranks})
            os.environ.update({"LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port})
            name = f"{case}.{which}" if rank == 0 else f"{case}.{which}.{rank}"
            log = os.open(folder / f"{name}.log", os.O_WRONLY | os.O_CREAT, 0o600)
            os.dup2(log, 1)
            os.dup2(log, 2)
            torch.save(run(folder, case, which), folder / f"{name}.pt")
            return
        print(f"{ANSWER}{_first_failure(children)}", flush=True)


def _first_failure(children: dict[int, int]) -> int:
    """Exit status of the first child that fails, after which the others, which may wait for it for ever, are ended; 0
    when none does."""
    failure = 0
    while children:
        child, status = os.wait()
        del children[child]
        if status and not failure:
            failure = os.waitstatus_to_exitcode(status)
            for other in children:
                os.kill(other, signal.SIGKILL)
    return failure
