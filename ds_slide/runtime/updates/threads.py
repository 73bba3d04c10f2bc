"""The cores of the CPU update, and of the threads of an engine."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal


def update_cores(
    threads: int | Literal["auto"], cores: Sequence[int] | Literal["auto", "none"], share: Sequence[int]
) -> tuple[int, list[int]]:
    """Return the number of update threads of this rank and the cores to pin them to ([]: not pinned).

    `share`: this rank's part of the cores of its host (`ds_slide.plan.cores`). The first ones are left to the threads
    that launch work. Small shares are not pinned: there the operating system has to move the update threads out of the
    way of the launching threads.
    """
    small = len(share) < 8
    # Two cores are left to the Python thread, autograd's thread and the two copy lanes, one core on small machines.
    count = max(1, len(share) - (1 if small else 2)) if threads == "auto" else threads
    if cores == "none" or (cores == "auto" and small):
        return count, []
    return count, list(share[-count:]) if cores == "auto" else list(cores)


@contextmanager
def running_on(cores: frozenset[int]) -> Iterator[None]:
    """Let the calling thread run on `cores` only, inside the context. Threads that it starts there stay on them.

    The kernel takes a page from the memory node of the core that first touches it. So memory that is page-locked or
    written inside comes from the nodes of `cores`. A memory policy (mbind) would say the same, and containers often
    forbid it.
    """
    before = os.sched_getaffinity(0)
    if before == cores:
        yield
        return
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def first_unusable_core(cores: Sequence[int]) -> int | None:
    """Return the first of `cores` that a thread of this process cannot be pinned to; None where there is none.

    A thread tries each core: the affinity of this process says where it runs now, not where it may.
    """
    unusable: list[int] = []

    def look() -> None:
        for core in cores:
            try:
                os.sched_setaffinity(0, {core})  # of this thread alone, which ends here
            except OSError:
                unusable.append(core)
                return

    thread = threading.Thread(target=look, name="ds_slide-cores", daemon=True)
    thread.start()
    thread.join()
    return unusable[0] if unusable else None
