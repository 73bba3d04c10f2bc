"""CRC-32 of files that are written and read in pieces, by several threads.

CRC-32 because the standard library has it (2 GB/s a thread, without the interpreter lock), because zip records carry
it anyway, and because the sums of the pieces give the sum of the whole: the records of an archive are summed while they
are written, and nothing is read back.
"""

from __future__ import annotations

import functools
import os
import zlib
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from ds_slide.checkpoint.opening import regular_file

THREADS = 4
SEGMENT = 8 << 20
"""Bytes that a thread reads at a time."""
_POLYNOMIAL = 0xEDB88320


@dataclass(frozen=True)
class Sum:
    """Size in bytes and CRC-32 of some bytes; `a + b` is the sum of those of `a` followed by those of `b`."""

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
    """Read a file once, THREADS segments at a time. Raises OSError, and SlideError for what is no regular file."""
    with regular_file(path) as file:
        descriptor = file.fileno()
        size = os.fstat(descriptor).st_size
        found = Sum()
        pending: deque[Future[Sum]] = deque()
        with ThreadPoolExecutor(THREADS) as pool:
            for start in range(0, size, SEGMENT):
                if len(pending) > THREADS:
                    found += pending.popleft().result()
                pending.append(pool.submit(_sum_of_segment, descriptor, start, min(SEGMENT, size - start)))
            for future in pending:
                found += future.result()
        return found


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
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return product


@functools.lru_cache(maxsize=256)
def _power(nbytes: int) -> int:
    """x to the power 8 * nbytes."""
    result, square, exponent = 1 << 31, 1 << 30, 8 * nbytes
    while exponent:
        if exponent & 1:
            result = _multiply(square, result)
        square = _multiply(square, square)
        exponent >>= 1
    return result
