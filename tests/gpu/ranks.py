"""Starts one process for each of several ranks, and waits for all of them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from conftest import ON_CPU
from ports import free_port


def run_ranks(command: Sequence[str], folder: Path, ranks: int = 2) -> list[tuple[int, str, float]]:
    """Run `python COMMAND` as each rank. -> exit code, log and seconds of each."""
    rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    shared = {**os.environ, **rendezvous, "WORLD_SIZE": str(ranks)}
    if ON_CPU:
        shared["DS_ACCELERATOR"] = "cpu"
    logs = [folder / f"rank{rank}" for rank in range(ranks)]
    started = time.monotonic()
    processes = []
    for rank, log in enumerate(logs):
        environment = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        with log.open("w") as file:
            processes.append(
                subprocess.Popen([sys.executable, *command], stdout=file, stderr=subprocess.STDOUT, env=environment)
            )
    with ThreadPoolExecutor() as waiting:
        ends = list(waiting.map(lambda process: end_of(process, started), processes))
    return [(code, log.read_text(errors="replace"), seconds) for (code, seconds), log in zip(ends, logs, strict=True)]


def end_of(process: subprocess.Popen[bytes], started: float) -> tuple[int, float]:
    """Exit code, and seconds since `started`; a process that hangs is killed."""
    try:
        code = process.wait(200)
    finally:
        process.kill()
    return code, time.monotonic() - started
