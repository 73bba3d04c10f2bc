"""The cores of the CPU update."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import Literal


def update_cores(
    threads: int | Literal["auto"], cores: Sequence[int] | Literal["auto", "none"], local_rank: int, local_ranks: int
) -> tuple[int, list[int]]:
    """Return the number of update threads of this rank and the cores to pin them to ([]: not pinned).

    The cores this process may use are shared evenly between the ranks of the machine; within a rank's share the
    first ones are left to the threads that launch work. Small machines are not pinned: there the operating system
    has to move the update threads out of the way of the launching threads.
    """
    available = sorted(os.sched_getaffinity(0))
    share = available
    if local_ranks > 1 and len(available) >= local_ranks:
        size = len(available) // local_ranks
        share = available[local_rank * size : (local_rank + 1) * size]
    small = len(share) < 8
    # Two cores are left to the Python thread, autograd's thread and the two copy lanes, one core on small machines.
    count = max(1, len(share) - (1 if small else 2)) if threads == "auto" else threads
    if cores == "none" or (cores == "auto" and small):
        return count, []
    return count, share[-count:] if cores == "auto" else list(cores)


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
