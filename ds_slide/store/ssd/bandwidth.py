"""How fast a disk reads and writes, measured on a file of its own."""

from __future__ import annotations

import errno
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ds_slide import _native
from ds_slide.store.directories.run_files import RunFiles
from ds_slide.store.ssd.extents import REQUEST_BYTES


@dataclass(frozen=True)
class Bandwidths:
    """Bytes per second of reads alone, of writes alone, and of both in turn. `direct`: without the page cache."""

    read: float
    write: float
    mixed: float
    direct: bool
    backend: str


def mixed_bandwidth(files: RunFiles, backend: str) -> float:
    """Measure bytes per second of reads and writes in turn. Raises OSError.

    Makes a file with `files` for the time of the measurement.
    """
    with mixed_load(files, backend) as rate:
        return rate()


@contextmanager
def mixed_load(files: RunFiles, backend: str) -> Iterator[Callable[[], float]]:
    """Yield a function that measures like `mixed_bandwidth`, on a file that is there already."""
    with _full_file(files, backend) as file:
        yield lambda: _rate(file, "mixed")


def bandwidths(files: RunFiles) -> Bandwidths:
    """Measure like `mixed_bandwidth`, and reads and writes alone as well."""
    with _full_file(files, "auto") as file:
        read, write, mixed = (_rate(file, pattern) for pattern in ("read", "write", "mixed"))
        return Bandwidths(read, write, mixed, file.engine.is_direct(file.number), file.engine.backend)


@contextmanager
def _full_file(files: RunFiles, backend: str) -> Iterator[OpenFile]:
    """Yield a completely written file. It is larger than a disk's own cache could hide in a third of a second. Space
    that was never written would be read without the disk."""
    made, nbytes, depth = files.make("bandwidth"), 128 << 20, 16
    slab = _native.Slab(depth * REQUEST_BYTES, False, False)
    engine = _native.IoEngine(backend, depth, REQUEST_BYTES)  # type: ignore[arg-type]
    try:
        number = engine.open(made.label, nbytes, made.descriptor)
        file = OpenFile(engine, number, nbytes, slab.ptr, depth)
        put_load(file, Load("write", REQUEST_BYTES, depth), requests=nbytes // REQUEST_BYTES)
        yield file
    finally:
        engine.close()
        os.close(made.descriptor)


def _rate(file: OpenFile, pattern: str) -> float:
    sample = put_load(file, Load(pattern, REQUEST_BYTES, file.buffers), seconds=0.3)
    return (sample.read_bytes + sample.written_bytes) / sample.seconds


# ----------------------------------------------------------------------------------------------------------------------
# A load on one file through the I/O engine, and its result. Disks are measured so in benchmarks and at the start of a
# run with several disks.


@dataclass(frozen=True)
class OpenFile:
    """A file in an I/O engine, and memory for its transfers, with any content. `number`: its number in `engine`.
    `address`, `buffers`: address and number of buffers, each as large as a request."""

    engine: _native.IoEngine
    number: int
    nbytes: int
    address: int
    buffers: int


@dataclass
class Sample:
    """One timed load."""

    read_bytes: int = 0
    written_bytes: int = 0
    seconds: float = 0.0

    @property
    def gb_s(self) -> float:
        return (self.read_bytes + self.written_bytes) / self.seconds / 1e9


@dataclass(frozen=True)
class Load:
    """Requests of `request_bytes` in sequence through the file, with `ahead` of them submitted at once.

    `pattern`: "read", "write", or "mixed". In "mixed" every second request is a write, and reads and writes have half
    of the file each, because a request must not wait for another one on the same bytes. `begin_bytes`: where the
    pattern begins in the file or in each half.
    """

    pattern: str
    request_bytes: int
    ahead: int
    begin_bytes: int = 0

    def place(self, number: int, file_bytes: int) -> tuple[bool, int]:
        """Whether request `number` is a write, and its offset."""
        nbytes = self.request_bytes
        if self.pattern == "mixed":
            half = file_bytes // 2 // nbytes * nbytes
            write, turn, room, first = number % 2 == 1, number // 2, half, half if number % 2 else 0
        else:
            write, turn, room, first = self.pattern == "write", number, file_bytes, 0
        return write, first + (self.begin_bytes // nbytes + turn) * nbytes % (room // nbytes * nbytes)


def put_load(file: OpenFile, load: Load, *, seconds: float = float("inf"), requests: int | None = None) -> Sample:
    """Run `load` for about `seconds`, or for `requests` requests. Raises OSError when the disk fails.

    Every submitted request is waited for and counts.
    """
    engine = file.engine
    # With enough buffers each request has its own. Requests that end out of order would share buffers of a plain
    # cycle, and a read would overwrite the bytes of a write.
    count = max(file.buffers, load.ahead)
    free = deque(file.address + index % file.buffers * load.request_bytes for index in range(count))
    sample = Sample()
    most = 1 << 60 if requests is None else requests
    address_of = [0] * load.ahead
    number = 0

    def submit(place: int) -> None:
        nonlocal number
        write, offset = load.place(number, file.nbytes)
        address_of[place] = free.popleft()
        piece = (file.number, offset, address_of[place], load.request_bytes)
        engine.submit(2 * place + write, write, [piece], False)
        number += 1

    begin = time.perf_counter()
    for place in range(min(load.ahead, most)):
        submit(place)
    waiting = number
    while waiting:
        place, write = divmod(_next_done(engine), 2)
        free.append(address_of[place])
        sample.written_bytes += load.request_bytes if write else 0
        sample.read_bytes += 0 if write else load.request_bytes
        if time.perf_counter() - begin < seconds and number < most:
            submit(place)
        else:
            waiting -= 1
    sample.seconds = time.perf_counter() - begin
    return sample


def _next_done(engine: _native.IoEngine) -> int:
    """Return the token of the next finished transfer. Raises OSError when the disk fails or does not answer."""
    longest_s = 60  # after this long without an answer the disk is broken, or the engine lost a request
    done = engine.next(longest_s)
    if done is None:
        raise OSError(errno.ETIMEDOUT, f"no request finished within {longest_s} s")
    token, message, error = done
    if message is not None:
        raise OSError(error, message)
    return int(token)
