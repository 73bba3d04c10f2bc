"""What a call of the C++ library costs from Python: python benchmarks/native_calls.py

Prints the fastest of many rounds, in microseconds a call. The calls have nothing or next to nothing to compute. On a
busy machine compare two trees by running them in turns, and take the smaller figure of each.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ds_slide import _native
from ds_slide.optim.adamw import AdamWHyper
from ds_slide.optim.cpu import CpuUpdater
from ds_slide.optim.rule import Elements
from ds_slide.runtime.core.futures import Failures
from ds_slide.runtime.core.pool import BufferPool

CALLS, ROUNDS = 200, 60
PAGE = 4096


def main() -> None:
    for name, call in (*updates(), *leases(), *others()):
        print(f"{name:42s} {cost(call):7.2f}")
    with tempfile.TemporaryDirectory() as folder:
        for count in (1, 4):
            print(f"{f'submit of {count} pieces':42s} {submit_cost(Path(folder) / str(count), count):7.2f}")


def cost(call: Callable[[], Any]) -> float:
    """Return microseconds of a call."""
    best = float("inf")
    for _ in range(ROUNDS):
        began = time.perf_counter()
        for _ in range(CALLS):
            call()
        best = min(best, (time.perf_counter() - began) / CALLS)
    return best * 1e6


def updates() -> list[tuple[str, Callable[[], Any]]]:
    workers, values = _native.Workers(1, []), torch.zeros(64)
    p = values.data_ptr()  # of memory that is not touched: there are no elements
    step = _native.UpdateCall("adamw", "bf16_split", p, p, [p, p], p, "bf16", 0, (1.0,) * 10)
    logged = step._replace(new_weight_ptr=p, old_ptrs=[p, p, p, p])
    elements = Elements(
        values.bfloat16(), values.short(), (values.clone(), values.clone()), values.bfloat16(), None, 0, 0
    )
    updater, hyper = CpuUpdater(1), AdamWHyper(lr=1e-3)
    return [
        ("update of no elements", lambda: _native.update(workers, step)),
        ("the same with an undo log", lambda: _native.update(workers, logged)),
        ("CpuUpdater.update_ of 64 elements", lambda: updater.update_(elements, hyper)),
        ("accumulate of no elements", lambda: _native.accumulate(workers, p, "fp32", p, "fp32", 0)),
        ("sum_of_squares of no elements", lambda: _native.sum_of_squares(workers, p, "fp32", 0)),
    ]


def leases() -> list[tuple[str, Callable[[], Any]]]:
    pool = _native.Pool(2 * PAGE, 2, False, False)
    tensors = BufferPool(pool, Failures(), "buffers")
    return [
        ("Pool.try_lease and release", lambda: pool.try_lease().release()),  # type: ignore[union-attr]
        ("BufferPool.lease and release (a tensor)", lambda: tensors.lease().release()),
        ("Pool.stats", pool.stats),
    ]


def others() -> list[tuple[str, Callable[[], Any]]]:
    counters = _native.Generations(_native.Slab(PAGE, False, False), 4)
    workers, page, sums = (
        _native.Workers(1, []),
        torch.zeros(PAGE, dtype=torch.uint8),
        torch.zeros(1, dtype=torch.int32),
    )
    return [
        ("Generations.value", lambda: counters.value(1)),
        ("Generations.wait that has been reached", lambda: counters.wait(1, 0)),
        ("page_sums of a page", lambda: _native.page_sums(workers, page.data_ptr(), PAGE, sums.data_ptr())),
    ]


def submit_cost(path: Path, count: int) -> float:
    """Return microseconds of `IoEngine.submit`, without the transfer."""
    slab, engine = _native.Slab(count * PAGE, False, False), _native.IoEngine("threads", 8, PAGE)
    file = engine.open(str(path), count * PAGE)
    pieces = [(file, PAGE * number, slab.ptr + PAGE * number, PAGE) for number in range(count)]
    best = float("inf")
    for token in range(CALLS * 5):
        began = time.perf_counter()
        engine.submit(token, False, pieces, False)
        best = min(best, time.perf_counter() - began)
        while engine.next(1.0) is None:
            pass
    engine.close()
    return best * 1e6


if __name__ == "__main__":
    main()
