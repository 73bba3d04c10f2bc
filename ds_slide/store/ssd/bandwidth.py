"""How fast a disk reads and writes at the same time, measured on a file of its own."""

from __future__ import annotations

import time

from ds_slide import _native
from ds_slide.store.directories.run_files import RunFiles

SECONDS = 0.3
REQUEST_BYTES = 2 << 20
DEPTH = 16
# Larger than what a disk's own cache would hide in a third of a second, small enough to be written first in about as
# long: space that was never written is read without the disk.
FILE_BYTES = 128 << 20


def mixed_bandwidth(files: RunFiles, backend: str, seconds: float = SECONDS) -> float:
    """Bytes per second, reads and writes taking turns with DEPTH requests in flight. OSError from the filesystem.

    Makes FILE_BYTES in one of `files` for the time of the measurement.
    """
    trial = files.make("bandwidth")
    slab = _native.Slab(DEPTH * REQUEST_BYTES, False, False)
    engine = _native.IoEngine(backend, DEPTH, REQUEST_BYTES)  # type: ignore[arg-type]
    try:
        file = engine.open(trial.label, FILE_BYTES, trial.descriptor)
        places = FILE_BYTES // REQUEST_BYTES
        _keep_busy(engine, file, slab.ptr, requests=places, write_every=1, seconds=float("inf"))
        start = time.perf_counter()
        moved = _keep_busy(engine, file, slab.ptr, requests=1 << 60, write_every=2, seconds=seconds)
        return moved / (time.perf_counter() - start)
    finally:
        engine.close()
        files.discard(trial)


def _keep_busy(
    engine: _native.IoEngine, file: int, address: int, *, requests: int, write_every: int, seconds: float
) -> int:
    """Move up to `requests` requests within about `seconds`; every `write_every`th is a write. Returns the bytes."""
    deadline = time.perf_counter() + seconds
    places = FILE_BYTES // REQUEST_BYTES
    started = 0
    in_flight = 0

    def start(buffer: int) -> None:
        nonlocal started, in_flight
        # Reads and writes apart by half the file: only then do the two never meet in one place.
        writes = started % write_every == 0
        place = (started // write_every if writes else started // write_every + places // 2) % places
        piece = (file, place * REQUEST_BYTES, address + buffer * REQUEST_BYTES, REQUEST_BYTES)
        engine.submit(buffer, writes, [piece], False)
        started += 1
        in_flight += 1

    for buffer in range(min(DEPTH, requests)):
        start(buffer)
    while in_flight:
        finished = engine.next(60.0)
        if finished is None:
            raise OSError(110, "no request finished within a minute")
        buffer, message, error = finished
        in_flight -= 1
        if message is not None:
            raise OSError(error, message)
        if started < requests and time.perf_counter() < deadline:
            start(buffer)
    return started * REQUEST_BYTES
