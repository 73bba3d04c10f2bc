"""How fast a disk reads and writes at the same time, measured on a file of its own."""

from __future__ import annotations

from ds_slide import _native
from ds_slide.store.directories.run_files import RunFiles
from ds_slide.store.ssd.disk_load import Load, put_load

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
        memory = (slab.ptr, DEPTH)
        filled = Load("write", REQUEST_BYTES, DEPTH)
        put_load(engine, file, FILE_BYTES, memory, filled, requests=FILE_BYTES // REQUEST_BYTES)
        sample = put_load(engine, file, FILE_BYTES, memory, Load("mixed", REQUEST_BYTES, DEPTH), seconds=seconds)
        return (sample.read_bytes + sample.written_bytes) / sample.seconds
    finally:
        engine.close()
        files.discard(trial)
