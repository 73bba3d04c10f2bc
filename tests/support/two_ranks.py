"""Ranks of one test module over gloo: forks of a worker script, and their side of it."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import warm
from torch import nn

RANKS = 2


def run(worker: str | Path, folder: Path, *arguments: str, timeout_s: float = warm.PATIENCE_S) -> Path:
    """Runs `python WORKER FOLDER ARGUMENTS`, which is to call `fork_ranks`; fails with the end of the logs. Returns
    `folder`."""
    code = warm.start(worker, folder, *arguments, folder=folder).end(timeout_s)
    assert code == 0, "\n".join(log.read_text(errors="replace")[-4000:] for log in _logs(folder))
    return folder


def _logs(folder: Path) -> list[Path]:
    """That of the worker, and those of its ranks, the oldest first."""
    return [folder / "log", *sorted(folder.rglob("rank*.log"), key=lambda log: log.stat().st_mtime)]


def asked_for(request: pytest.FixtureRequest, test: str | None = None) -> list[dict[str, Any]]:
    """The parameters of each run of `test`, or of all tests, of the same module that this session has: a worker runs no
    other cases."""
    items = [item for item in request.session.items if isinstance(item, pytest.Function)]
    own = [item for item in items if item.module is request.module and test in (None, item.originalname)]
    return [item.callspec.params for item in own if hasattr(item, "callspec")]


def names_asked_for(request: pytest.FixtureRequest, references: Mapping[str, str]) -> list[str]:
    """The parameters `name` of this session's tests, and the `references` that these are compared with."""
    names = [row["name"] for row in asked_for(request) if "name" in row]
    return [*names, *(references[name] for name in names if name in references)]


def seen_by(folder: Path, ranks: int = RANKS) -> list[Any]:
    """What each rank has left."""
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(ranks)]


def fork_ranks(main: Callable[[int, Path], None]) -> None:
    """The worker's script: `main(rank, folder)` on each rank."""
    fork_world(RANKS, main, Path(sys.argv[1]))


def fork_world(ranks: int, main: Callable[[int, Path], None], folder: Path) -> None:
    """Run `main(rank, folder)` in a fork for each rank, and wait for them. Their output is in `folder`."""
    for rank in range(ranks):
        if os.fork():
            continue
        log = os.open(folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT, 0o600)
        for stream in (1, 2):
            os.dup2(log, stream)
        main(rank, folder)
        sys.exit()
    for _ in range(ranks):
        if os.wait()[1]:
            sys.exit("a rank has failed")  # the other one may wait for it for ever


def plain_steps(
    model: nn.Module, optimizer: torch.optim.Optimizer, data: Iterable[torch.Tensor], clip: float
) -> Iterator[None]:
    """Plain torch with the batches of all ranks ([ranks, ...]), a step at a time."""
    for of_ranks in data:
        optimizer.zero_grad()
        model(of_ranks.flatten(0, 1)).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        yield


@contextlib.contextmanager
def as_rank(rank: int, folder: Path, ranks: int = RANKS, port: int = 0) -> Iterator[dict[str, Any]]:
    """The worker's side: a process group, and a dictionary that is saved for `seen_by` at the end. `port`: for a
    library that reads what a launcher sets."""
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_SIZE=str(ranks))
    if port:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    import ds_slide  # noqa: F401 - switches the "ds_slide" key on where the package is not installed

    torch.set_num_threads(1)
    store = torch.distributed.FileStore(str(folder / "store"), ranks)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    deepspeed.init_distributed("gloo")
    seen: dict[str, Any] = {}
    yield seen
    torch.save(seen, folder / f"rank{rank}.pt")
    torch.distributed.destroy_process_group()
