"""A thread that writes a checkpoint while training goes on, and the result of that save.

The thread is no daemon, so the interpreter waits for it at its end. By then the pools of `concurrent.futures` take no
more work, so the thread uses none.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import logging
import os
import re
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ds_slide.checkpoint.state_buffers import pieces
from ds_slide.errors import SlideError
from ds_slide.plan.host_room import HostRoom, host_room, local_ranks
from ds_slide.plan.placement import USABLE_SHARE
from ds_slide.report.log import size
from ds_slide.runtime.core import running
from ds_slide.runtime.core.unit import Unit
from ds_slide.store.host_memory import HostMemory
from ds_slide.store.in_memory import InMemory, NotHeld, StatesInMemory, WeightsInMemory
from ds_slide.store.state import UnitState

logger = logging.getLogger(__name__)


class BackgroundSave:
    """One asynchronous save of this rank, in a thread from now on. A subclass says what the thread does."""

    def __init__(self, target: Path, nbytes: int, *, alone: bool) -> None:
        self.alone = alone
        self._target = target
        self._nbytes = nbytes
        self._owner = os.getpid()
        self._written = 0
        self._awaited = False
        self._told = -1
        self._failure: str | None = None
        self._thread = threading.Thread(target=self._run, name="ds_slide-checkpoint")
        self._thread.start()
        atexit.register(self._at_exit)

    def write(self) -> None:
        """Write the files, in the thread."""
        raise NotImplementedError

    def complete(self) -> None:
        """Publish a save that all ranks have written and no rank has published."""
        raise NotImplementedError

    def release(self) -> None:
        """Remove the rest when all ranks have ended."""
        raise NotImplementedError

    def is_under_way(self) -> bool:
        return self._thread.is_alive()

    def wait(self) -> None:
        """Wait until the thread has ended, and log its progress."""
        if self.is_under_way():
            self._awaited = True
            self._tell()
            self._thread.join()

    def require(self) -> None:
        """Wait, and raise SlideError where the save has failed."""
        self.wait()
        if self._failure is not None:
            raise SlideError(self._failure)

    def close(self, *, all_have_ended: bool) -> None:
        """End the save, once. Where other ranks may still write, a failed save stays locked until this process ends,
        and the next save removes it. A forked child does nothing, because its parent's save goes on."""
        if os.getpid() != self._owner:
            return
        self.wait()
        atexit.unregister(self._at_exit)
        if all_have_ended:
            self.release()

    def _run(self) -> None:
        try:
            take_one_thread()
            self.write()
        except BaseException as error:  # kept as text: its traceback would keep the copy of the states
            cause = f"{error}" if isinstance(error, SlideError) else f"{type(error).__name__}: {error}"
            self._failure = f"the asynchronous save of {self._target} has failed: {cause}"
            # Logged at once, because no later call may raise it. DeepSpeed ends a dropped engine and hides its errors.
            logger.error(self._failure)

    def wrote(self, nbytes: int) -> None:
        """Count the bytes of a piece that is written, and log the progress of a save that is awaited."""
        self._written += nbytes
        # The main thread is not alive any more when it waits for this one at the interpreter's end.
        if self._awaited or not threading.main_thread().is_alive():
            self._tell()

    def _tell(self) -> None:
        tenth = 10 * self._written // max(1, self._nbytes)
        if tenth > self._told:
            self._told = tenth
            logger.warning(
                "waiting for the checkpoint %s: %s of %s are written",
                self._target,
                size(self._written),
                size(self._nbytes),
            )

    def _at_exit(self) -> None:
        """End a save that is still open when the program ends."""
        self.close(all_have_ended=self.alone)


# ----------------------------------------------------------------------------------------------------------------------
# A copy of all states in host memory. A checkpoint is written from it while training goes on.
#
# Several threads copy the state buffers as they are stored (12 bytes a parameter, less with short moments). Training
# waits only as long as memory needs for the copy. Making the file's fp32 values would take several times longer.


@dataclass
class Snapshot:
    """Copies of `units`' states from `take` on. `frozen`: copy parameters without optimizer states, too."""

    units: Sequence[Unit]
    frozen: bool
    _copies: dict[int, UnitState] = field(default_factory=dict)

    def of(self, unit: Unit) -> UnitState:
        """Return the copy of a unit's states, to be read in their place."""
        return self._copies[unit.order]

    def nbytes(self) -> int:
        """Bytes of the copy."""
        return sum(items * dtype.itemsize for unit in self.units for _, dtype, items in self._state_buffers(unit))

    def fits(self) -> bool:
        """Whether the copy fits in this rank's share of the free memory."""
        return self.nbytes() <= self.room().nbytes * USABLE_SHARE

    def room(self) -> HostRoom:
        """Return this rank's share of the free memory and its source."""
        return host_room(local_ranks(), running.untouched_host_bytes())

    def take(self) -> None:
        """Copy the units, which have settled and do not change meanwhile. Raises SlideError where memory runs out."""
        memory = HostMemory(page_lock=False, huge_pages=True)
        # 8 to 16 cores reach the memory bandwidth of a socket.
        threads = max(1, min(16, len(os.sched_getaffinity(0)) // local_ranks()))
        with ThreadPoolExecutor(threads, initializer=take_one_thread) as pool:
            pending: list[Future[Any]] = []
            for unit in self.units:
                state_buffers = {}
                for name, dtype, items in self._state_buffers(unit):
                    copy, source = memory.tensor(items, dtype, transfers=False), unit.state.buffers[name]
                    state_buffers[name] = InMemory(copy)
                    for span in pieces(items, 1 << 24):
                        if source.tier == "host":
                            pending.append(pool.submit(copy[span].copy_, source.read(span)))
                        else:  # the disk has its own threads, and a copy from the GPU belongs to this thread's stream
                            copy[span].copy_(source.read(span))
                weights = WeightsInMemory(state_buffers.pop("weight"))
                specs = unit.state.specs
                self._copies[unit.order] = UnitState(specs, weights, StatesInMemory(specs, state_buffers), NotHeld())
            for future in pending:
                future.result()

    def _state_buffers(self, unit: Unit) -> list[tuple[str, torch.dtype, int]]:
        layout = unit.layout
        numel = layout.local_numel if self.frozen else layout.trainable_numel
        state_buffers = [("weight", unit.state.dtype_of("weight"), numel)]
        return state_buffers + [(spec.name, spec.dtype, spec.items(unit.codec.numel)) for spec in unit.state.specs]


# ----------------------------------------------------------------------------------------------------------------------
# Torch's operations of one calling thread run in that thread alone. Other threads keep their number.
#
# `torch.set_num_threads` acts on the whole program: threads that begin later take its number over, and with it another
# order of sums. OpenMP's own setting belongs to the calling thread.

_OPENMP = re.compile(r"lib(gomp|iomp5|omp)[.-]")


def take_one_thread() -> None:
    """Run the calling thread's torch operations in this thread alone, from now on. A team of threads that waits for the
    next operation would keep cores busy that other threads compute on."""
    torch.get_num_threads()  # makes the thread take over the program's number now, not at the first operation
    for library in _openmp_libraries():
        with contextlib.suppress(OSError, AttributeError):  # its file may have been replaced since it was loaded
            ctypes.CDLL(library).omp_set_num_threads(1)


def _openmp_libraries() -> set[str]:
    """Return the paths of the loaded OpenMP libraries."""
    paths = (line.split(maxsplit=5)[5:] for line in Path("/proc/self/maps").read_text().splitlines())
    return {path[0] for path in paths if path and _OPENMP.match(Path(path[0]).name)}
