"""Zip archives in torch.save's format, written in pieces by several threads.

Records are stored, not compressed, so every offset is known before the first byte is written: the pieces of a record
can be summed and written by whichever thread is free, and the CRCs are filled in at the end. A file ends with fsync.
"""

from __future__ import annotations

import os
import struct
import zipfile
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ds_slide.checkpoint.opening import regular_file
from ds_slide.checkpoint.pickle_writer import MARK, Record, records_of
from ds_slide.checkpoint.sums import THREADS, Sum, sum_of, total
from ds_slide.errors import SlideError
from ds_slide.report.log import size

Wrote = Callable[[int], None]
_ROOT = "archive"
_LIMIT = 0xFFFFFFFF  # of 32-bit fields; from here on zip64
_VERSION, _UTF8, _STORED = 45, 1 << 11, 0
_PADDING_ID = 0x4246  # torch's id of the extra field that aligns the data
# 64 as in torch; large records start on pages, where mapping and reading them wastes nothing.
_ALIGNMENT, _LARGE, _PAGE = 64, 1 << 16, 4096


@dataclass
class Archive:
    """The file that will hold `value`. `nbytes`: its exact size. The pickle is made at once, the rest in `write`;
    `copied`: the tensors in it that are no planned ones may change before that."""

    value: Any
    copied: bool = False
    _records: list[Record] = field(init=False)
    _offsets: list[int] = field(init=False)
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        self._records = records_of(self.value, copied=self.copied)
        self._offsets = []
        end = 0
        for record in self._records:
            self._offsets.append(end)
            end += len(self._local_header(record, end, 0)) + record.nbytes
        self.nbytes = end + len(self._directory([0] * len(self._records), end))

    @property
    def pickled(self) -> bytes:
        """The pickle, which names whatever is no storage."""
        return b"".join(self._records[0].pieces())

    def write(self, path: str | os.PathLike[str], wrote: Wrote | None = None) -> Sum:
        """Write and fsync the file, which must not exist. Raises SlideError when the file cannot be written.

        `wrote`: is told the bytes of every piece; the calling thread then does all of it by itself.
        """
        written = 0
        try:
            with open(path, "xb", buffering=0) as file:
                sums = []
                for record, offset in zip(self._records, self._offsets, strict=True):
                    data_offset = offset + len(self._local_header(record, offset, 0))
                    if wrote is None:
                        sums.append(_write_record(file.fileno(), record, data_offset))
                    else:
                        sums.append(_write_record_alone(file.fileno(), record, data_offset, wrote))
                    written = data_offset + record.nbytes
                result = self._write_headers(file.fileno(), sums)
                os.fsync(file.fileno())
                return result
        except OSError as error:
            raise SlideError(
                f"writing {Path(path)} failed after {size(written)} of {size(self.nbytes)} ({error.strerror}); this "
                "checkpoint is not saved and earlier ones are as they were; free space or choose another directory"
            ) from error

    def _write_headers(self, descriptor: int, sums: Sequence[Sum]) -> Sum:
        parts = []
        for record, offset, found in zip(self._records, self._offsets, sums, strict=True):
            header = self._local_header(record, offset, found.crc)
            _write_all(descriptor, memoryview(header), offset)
            parts += [sum_of(header), found]
        end = total(parts)
        directory = self._directory([found.crc for found in sums], end.nbytes)
        _write_all(descriptor, memoryview(directory), end.nbytes)
        return end + sum_of(directory)

    def _local_header(self, record: Record, offset: int, crc: int) -> bytes:
        name = f"{_ROOT}/{record.name}".encode()
        large = record.nbytes >= _LIMIT
        size = _LIMIT if large else record.nbytes
        extra = struct.pack("<HHQQ", 1, 16, record.nbytes, record.nbytes) if large else b""
        alignment = _PAGE if record.nbytes >= _LARGE else _ALIGNMENT
        padding = -(offset + 30 + len(name) + len(extra) + 4) % alignment
        extra += struct.pack("<HH", _PADDING_ID, padding) + bytes(padding)
        fields = (b"PK\3\4", _VERSION, _UTF8, _STORED, 0, 0, crc, size, size, len(name), len(extra))
        return struct.pack("<4s5H3I2H", *fields) + name + extra

    def _directory(self, crcs: Sequence[int], start: int) -> bytes:
        entries = b"".join(map(_central_header, self._records, self._offsets, crcs))
        count, size = len(self._records), len(entries)
        end = b""
        if count >= 0xFFFF or start >= _LIMIT or size >= _LIMIT:
            end = struct.pack("<4sQ2H2I4Q", b"PK\6\6", 44, _VERSION, _VERSION, 0, 0, count, count, size, start)
            end += struct.pack("<4sIQI", b"PK\6\7", 0, start + size, 1)
        short = (min(count, 0xFFFF), min(count, 0xFFFF), min(size, _LIMIT), min(start, _LIMIT))
        return entries + end + struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, *short, 0)


def is_ours(path: str | os.PathLike[str]) -> bool:
    """Whether the file at `path` was written by an Archive. Raises SlideError where it is no regular file."""
    try:
        with regular_file(path) as file, zipfile.ZipFile(file) as archive:
            return f"{_ROOT}/{MARK}" in archive.namelist()
    except (OSError, ValueError, NotImplementedError, zipfile.BadZipFile):
        return False


def _central_header(record: Record, offset: int, crc: int) -> bytes:
    name = f"{_ROOT}/{record.name}".encode()
    large = [record.nbytes, record.nbytes] if record.nbytes >= _LIMIT else []
    large += [offset] if offset >= _LIMIT else []
    extra = struct.pack(f"<HH{len(large)}Q", 1, 8 * len(large), *large) if large else b""
    size = min(record.nbytes, _LIMIT)
    fields = (b"PK\1\2", _VERSION, _VERSION, _UTF8, _STORED, 0, 0, crc, size, size, len(name), len(extra))
    return struct.pack("<4s6H3I5H2I", *fields, 0, 0, 0, 0, min(offset, _LIMIT)) + name + extra


def _write_record(descriptor: int, record: Record, offset: int) -> Sum:
    """Sum and write the pieces in THREADS threads, while the caller's thread makes the next ones."""
    found = Sum()
    pending: deque[Future[Sum]] = deque()
    with ThreadPoolExecutor(THREADS) as pool:
        for piece, place in _placed(record, offset):
            while len(pending) >= THREADS or (pending and pending[0].done()):
                found += pending.popleft().result()
            pending.append(pool.submit(_sum_and_write, descriptor, piece, place))
        for future in pending:
            found += future.result()
    assert found.nbytes == record.nbytes, f"{record.name}: {found.nbytes} of {record.nbytes} bytes"
    return found


def _write_record_alone(descriptor: int, record: Record, offset: int, wrote: Wrote) -> Sum:
    found = Sum()
    for piece, place in _placed(record, offset):
        found += _sum_and_write(descriptor, piece, place)
        wrote(len(piece))
    assert found.nbytes == record.nbytes, f"{record.name}: {found.nbytes} of {record.nbytes} bytes"
    return found


def _placed(record: Record, offset: int) -> Iterator[tuple[memoryview, int]]:
    for piece in record.pieces():
        yield piece, offset
        offset += len(piece)


def _sum_and_write(descriptor: int, data: memoryview, offset: int) -> Sum:
    _write_all(descriptor, data, offset)
    return sum_of(data)


def _write_all(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        count = os.pwrite(descriptor, data, offset)
        data, offset = data[count:], offset + count
