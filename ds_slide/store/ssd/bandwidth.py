"""How fast a disk reads and writes, measured on a file of its own."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ds_slide import _native
from ds_slide.store.directories.run_files import RunFiles
from ds_slide.store.ssd.disk_load import Load, put_load

SECONDS = 0.3
REQUEST_BYTES = 2 << 20
DEPTH = 16
# Larger than what a disk's own cache would hide in a third of a second, small enough to be written first in about as
# long: space that was never written is read without the disk.
FILE_BYTES = 128 << 20


@dataclass(frozen=True)
class Bandwidths:
    """Bytes per second: of reads alone, of writes alone, and of both taking turns. `direct`: without the page cache."""

    read: float
    write: float
    mixed: float
    direct: bool
    backend: str


def mixed_bandwidth(files: RunFiles, backend: str, seconds: float = SECONDS) -> float:
    """Bytes per second, reads and writes taking turns with DEPTH requests in flight. OSError from the filesystem.

    Makes FILE_BYTES in one of `files` for the time of the measurement.
    """
    with _full_file(files, backend) as (_, _, rate):
        return rate("mixed", seconds)


def bandwidths(files: RunFiles, backend: str, seconds: float = SECONDS) -> Bandwidths:
    """As `mixed_bandwidth`, each way by itself, too."""
    with _full_file(files, backend) as (engine, file, rate):
        read, write, mixed = (rate(pattern, seconds) for pattern in ("read", "write", "mixed"))
        return Bandwidths(read, write, mixed, engine.is_direct(file), engine.backend)


@contextmanager
def _full_file(files: RunFiles, backend: str) -> Iterator[tuple[_native.IoEngine, int, Callable[[str, float], float]]]:
    """An engine, its file, all of which is written, and a function that measures a pattern for so many seconds."""
    trial = files.make("bandwidth")
    slab = _native.Slab(DEPTH * REQUEST_BYTES, False, False)
    engine = _native.IoEngine(backend, DEPTH, REQUEST_BYTES)  # type: ignore[arg-type]
    try:
        file = engine.open(trial.label, FILE_BYTES, trial.descriptor)
        memory = (slab.ptr, DEPTH)
        filled = Load("write", REQUEST_BYTES, DEPTH)
        put_load(engine, file, FILE_BYTES, memory, filled, requests=FILE_BYTES // REQUEST_BYTES)

        def rate(pattern: str, seconds: float) -> float:
            load = Load(pattern, REQUEST_BYTES, DEPTH)
            sample = put_load(engine, file, FILE_BYTES, memory, load, seconds=seconds)
            return (sample.read_bytes + sample.written_bytes) / sample.seconds

        yield engine, file, rate
    finally:
        engine.close()
        os.close(trial.descriptor)
