"""Two ranks of one test module over gloo: a pair of processes that runs a worker script once, and its side of it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import deepspeed
import torch

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
RANKS = 2
TIMEOUT_S = 240


def run(worker: str, folder: Path) -> Path:
    """Runs `python WORKER RANK FOLDER` on both ranks; fails with the end of their logs. Returns `folder`."""
    environment = {
        **{name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")},
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")]),
    }
    logs = [folder / f"rank{rank}.log" for rank in range(RANKS)]
    processes = []
    for rank, log in enumerate(logs):
        with log.open("w") as output:
            command = [sys.executable, str(HERE / worker), str(rank), str(folder)]
            processes.append(subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT))
    try:
        codes = [process.wait(timeout=TIMEOUT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert codes == [0] * RANKS, "\n".join(log.read_text(errors="replace")[-4000:] for log in logs)
    return folder


def seen_by(folder: Path) -> list[Any]:
    """What each rank has left."""
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(RANKS)]


@contextmanager
def as_rank(rank: int, folder: Path) -> Iterator[dict[str, Any]]:
    """The worker's side: a process group, and a dictionary that is saved for `seen_by` at the end."""
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_SIZE=str(RANKS))
    import ds_slide  # noqa: F401 - switches the "ds_slide" key on where the package is not installed

    torch.set_num_threads(1)
    store = torch.distributed.FileStore(str(folder / "store"), RANKS)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    deepspeed.init_distributed("gloo")
    seen: dict[str, Any] = {}
    yield seen
    torch.save(seen, folder / f"rank{rank}.pt")
    torch.distributed.destroy_process_group()
