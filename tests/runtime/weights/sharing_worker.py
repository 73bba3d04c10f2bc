"""Three ranks (gloo, no DeepSpeed) that share host memory, in several ways; `test_sharing` reads what they saw.

    python sharing_worker.py FOLDER

Rank 2 is killed in the last one.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ds_slide.errors import SlideError
from ds_slide.runtime.core.device import Device
from ds_slide.runtime.core.futures import Failures
from ds_slide.runtime.core.ranks import sharing
from ds_slide.runtime.core.ranks.collectives import Ranks
from ds_slide.runtime.core.ranks.shared_weights import SharedWeights
from ds_slide.store.host_memory import HostMemory
from ds_slide.store.in_memory import InMemory, WeightsInMemory

RANKS = 3
NUMEL = 5000  # more than a page
UNITS = 2


def error_of(call: Callable[[], object]) -> str | None:
    try:
        call()
    except SlideError as error:
        return str(error)
    return None


def refused(ranks: Ranks, change: Callable[[pytest.MonkeyPatch], None]) -> dict[str, Any]:
    """What becomes of sharing when rank 1 is changed."""
    seen: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        if ranks.rank == 1:
            change(patch)
        seen["auto"] = sharing.open_sharing(ranks, "auto") is not None
        seen["true"] = error_of(lambda: sharing.open_sharing(ranks, True))
    return seen


def no_memory_file(patch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise OSError(38, "Function not implemented")

    patch.setattr(sharing, "MemoryFile", fail)


def elsewhere(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sharing, "_BOOT", Path("/proc/version"))


def shared(ranks: Ranks, failures: Failures) -> tuple[SharedWeights, list[Any]]:
    """Units whose every element is the rank that holds it."""
    found = sharing.open_sharing(ranks, True)
    assert found is not None
    weights = SharedWeights(ranks, found, HostMemory(page_lock=False, huge_pages=False), UNITS, failures)
    units: list[Any] = []
    for order in range(UNITS):
        weight = weights.memory.tensor(NUMEL, torch.bfloat16, transfers=True)
        weight.fill_(float(ranks.rank))
        units.append(
            SimpleNamespace(
                order=order,
                name=f"unit {order}",
                version=0,
                state=SimpleNamespace(written=WeightsInMemory(InMemory(weight))),
            )
        )
    weights.map_others(units)
    return weights, units


def parts(weights: SharedWeights, order: int) -> list[float]:
    return [float(part[-1]) for part in weights.parts[order]]


def generations(ranks: Ranks, units: list[Any], weights: SharedWeights) -> bool:
    """Each rank in turn writes its part; the others read it as soon as it is there."""
    right = True
    for version in range(1, 200):
        unit = units[version % UNITS]
        if version % RANKS == ranks.rank:
            unit.state.written.buffer.tensor.fill_(float(version))
        weights.publish(unit, version)
        weights.await_others(unit, version)
        right &= parts(weights, unit.order)[version % RANKS] == version
        dist.barrier()
    return right


def interrupted(units: list[Any], failures: Failures) -> str | None:
    """A lane fails while another waits for something that does not come."""
    seen: list[str | None] = []
    lane = threading.Thread(
        target=lambda: seen.append(error_of(lambda: units[0].shared.await_others(units[0], 10_000)))
    )
    lane.start()
    failures.record("test", RuntimeError("the lane has failed"))
    lane.join(60)
    return seen[0] if seen else "it still waits"


def main(rank: int, folder: Path) -> None:
    store = dist.FileStore(str(folder / "store"), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    ranks = Ranks.over(None, Device(torch.device("cpu")))
    seen: dict[str, Any] = {
        "off": sharing.open_sharing(ranks, False) is not None,
        "no memory file": refused(ranks, no_memory_file),
        "elsewhere": refused(ranks, elsewhere),
        "differ": error_of(lambda: ranks.require_equal({"same": 1, "number": rank // 2}, "what a test says")),
        "least": ranks.least([rank, 10 - rank]),
    }
    failures = Failures()
    weights, units = shared(ranks, failures)
    seen["parts"] = parts(weights, 1)
    seen["right"] = generations(ranks, units, weights)
    weights.close()
    seen["after close"] = parts(weights, 0)[rank] >= 0

    failures = Failures()
    weights, units = shared(ranks, failures)
    seen["interrupted"] = interrupted(units, failures)
    dist.barrier()
    weights.close()

    failures = Failures()
    weights, units = shared(ranks, failures)
    if rank == 1:
        weights.close()  # before the others have what they wait for
    elif rank == 0:
        seen["closed"] = error_of(lambda: units[0].shared.await_others(units[0], 5))
    dist.barrier()
    weights.close()

    failures = Failures()
    weights, units = shared(ranks, failures)
    numbers = ranks.exchange(os.getpid(), "telling process numbers")
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    with suppress(ProcessLookupError):  # it has ended, and its parent has seen it
        select.select([os.pidfd_open(numbers[2])], [], [])
    seen["killed"] = parts(weights, 0)
    weights.close()
    (folder / f"rank{rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    torch.set_num_threads(1)
    for number in range(RANKS):
        if not os.fork():
            main(number, Path(sys.argv[1]))
            os._exit(0)
    ends = [os.wait()[1] for _ in range(RANKS)]
    sys.exit(sorted(ends) != [0, 0, signal.SIGKILL])
