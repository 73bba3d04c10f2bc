"""torch's operations in one thread where they are called from one thread, whatever they take elsewhere.

`torch.set_num_threads` is meant for the whole program: threads that begin later take it over, and the order of sums
with it. OpenMP's own setting belongs to the calling thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import re
from pathlib import Path

import torch

_OPENMP = re.compile(r"lib(gomp|iomp5|omp)[.-]")


def take_one_thread() -> None:
    """Run torch's operations that the calling thread calls in it alone, from now on: a team of threads that waits for
    the next operation keeps cores busy, which others compute on."""
    torch.get_num_threads()  # now, not at the first operation, the thread takes over the program's number
    for library in _openmp_libraries():
        with contextlib.suppress(OSError, AttributeError):  # its file may have been replaced since it was loaded
            ctypes.CDLL(library).omp_set_num_threads(1)


def _openmp_libraries() -> set[str]:
    """Paths of the OpenMP libraries that are loaded."""
    paths = (line.split(maxsplit=5)[5:] for line in Path("/proc/self/maps").read_text().splitlines())
    return {path[0] for path in paths if path and _OPENMP.match(Path(path[0]).name)}
