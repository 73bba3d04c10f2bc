"""CRC-32 of files that are written and read in pieces, by several threads.

The standard library has CRC-32 (2 GB/s a thread, without the interpreter lock), and zip records contain it anyway. The
sums of the pieces also give the sum of the whole. So the records of an archive are summed while they are written, and
nothing is read back.
"""

from __future__ import annotations

import contextlib
import functools
import os
import stat
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from ds_slide.errors import SlideError


@dataclass(frozen=True)
class Sum:
    """Size in bytes and CRC-32 of some bytes. `a + b` is the sum of the bytes of `a` followed by the bytes of `b`."""

    nbytes: int = 0
    crc: int = 0

    def __add__(self, other: Sum) -> Sum:
        shifted = _multiply(_power(other.nbytes), self.crc)
        return Sum(self.nbytes + other.nbytes, shifted ^ other.crc)


def sum_of(data: bytes | memoryview) -> Sum:
    return Sum(len(data), zlib.crc32(data))


def total(sums: Iterable[Sum]) -> Sum:
    return functools.reduce(lambda left, right: left + right, sums, Sum())


def sum_of_file(path: str | os.PathLike[str]) -> Sum:
    """Read a file once, in several threads. Raises OSError, and SlideError where it is no regular file."""
    with regular_file(path) as file:
        descriptor, segment = file.fileno(), 8 << 20  # bytes that a thread reads at once
        size = os.fstat(descriptor).st_size
        starts = range(0, size, segment)
        return summed(_sum_of_segment, ((descriptor, start, min(segment, size - start)) for start in starts))


def summed(work: Callable[..., Sum], pieces: Iterable[tuple[Any, ...]]) -> Sum:
    """Call `work`, which returns the sum of a piece, with the arguments of each of `pieces`, in four threads. Return
    the sum of all in their order. At most four pieces are under way, because each is in memory."""
    found, pending = Sum(), deque[Future[Sum]]()
    with ThreadPoolExecutor(4) as pool:
        for piece in pieces:
            while len(pending) >= 4 or (pending and pending[0].done()):
                found += pending.popleft().result()
            pending.append(pool.submit(work, *piece))
        return total([found, *(future.result() for future in pending)])


def _sum_of_segment(descriptor: int, offset: int, nbytes: int) -> Sum:
    found = Sum()
    while found.nbytes < nbytes:
        data = os.pread(descriptor, nbytes - found.nbytes, offset + found.nbytes)
        if not data:  # truncated meanwhile
            break
        found += sum_of(data)
    return found


# Multiplication of polynomials over GF(2) modulo CRC-32's, lowest power in the highest bit, as zlib's crc32_combine.


def _multiply(a: int, b: int) -> int:
    product = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = b >> 1 ^ (0xEDB88320 if b & 1 else 0)  # the polynomial of CRC-32
    return product


@functools.lru_cache(maxsize=256)
def _power(nbytes: int) -> int:
    """Return x to the power 8 * nbytes."""
    result, square, exponent = 1 << 31, 1 << 30, 8 * nbytes
    while exponent:
        if exponent & 1:
            result = _multiply(square, result)
        square = _multiply(square, square)
        exponent >>= 1
    return result


# ----------------------------------------------------------------------------------------------------------------------
# Opening entries of a checkpoint directory, which any user may have put there.
#
# Opening a FIFO would block, opening a device may have effects, and a directory cannot be read. So only regular files
# are opened. A symbolic link to one is followed: the Hub's cache consists of links to files.

_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


@contextlib.contextmanager
def regular_file(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Open a regular file for reading. Raises OSError, and SlideError where `path` is anything else."""
    _require_regular(path, os.stat(path).st_mode)  # before it is opened, because opening a device may have effects
    # O_NONBLOCK, because a FIFO may have taken the file's place since then.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        _require_regular(path, os.fstat(descriptor).st_mode)
        yield file


def tag_in(path: Path) -> str:
    """Return the tag that a file such as `latest` names. Raises SlideError, which names the file."""
    most = 4096  # no path is longer
    try:
        with regular_file(path) as file:
            content = file.read(most + 1)
    except OSError as error:
        raise _no_tag(path, f"cannot be read ({error.strerror})") from error
    if len(content) > most:
        raise _no_tag(path, f"holds more than {most:,} bytes")
    try:
        tag = content.decode().strip()
    except UnicodeDecodeError as error:
        raise _no_tag(path, f"is not encoded in UTF-8 ({error.reason} at byte {error.start})") from error
    parts = tag.split("/")
    if not tag.isprintable() or any(part in ("", ".", "..") or len(os.fsencode(part)) > 255 for part in parts):
        shown = ascii(tag if len(tag) <= 100 else f"{tag[:100]}...")
        raise _no_tag(path, f"holds {shown}, which names no directory below {path.parent}")
    return tag


def _require_regular(path: str | os.PathLike[str], mode: int) -> None:
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "no file")
        raise SlideError(
            f"the checkpoint file {os.fspath(path)} is {kind} instead of a regular file, so this checkpoint is broken; "
            "load another tag or a copy of this one"
        )


def _no_tag(path: Path, how: str) -> SlideError:
    return SlideError(f"{path}, which names the checkpoint to load, {how}; write a tag into it, or pass one")
