"""Zip archives in torch.save's format, written in pieces by several threads.

Records are stored, not compressed, so every offset is known before the first byte is written. Any free thread can sum
and write a piece of a record, and the CRCs are filled in at the end. The last step for a file is fsync.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import struct
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.serialization import location_tag

from ds_slide import __version__
from ds_slide.checkpoint.sums import Sum, regular_file, sum_of, summed, total
from ds_slide.errors import SlideError
from ds_slide.report.log import size

Wrote = Callable[[int], None]
_ROOT = "archive"
_LIMIT = 0xFFFFFFFF  # of 32-bit fields; from here on zip64
_VERSION, _UTF8, _STORED = 45, 1 << 11, 0
# 64 is torch's alignment. Large records start on pages, where mapping and reading them wastes nothing.
_ALIGNMENT, _LARGE, _PAGE = 64, 1 << 16, 4096


@dataclass
class Archive:
    """The file that will hold `value`. `nbytes`: its exact size. The pickle is made at once, the rest in `write`.
    `copied`: copy the tensors that are not planned, because they may change before `write`."""

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
        """The pickle, which holds everything but the storages."""
        return b"".join(self._records[0].pieces())

    def write(self, path: str | os.PathLike[str], wrote: Wrote | None = None) -> Sum:
        """Write and fsync the file, which must not exist. Raises SlideError when the file cannot be written.

        `wrote`: called with the bytes of every piece. The calling thread then does all the work by itself.
        """
        written = 0
        try:
            with open(path, "xb", buffering=0) as file:
                sums = []
                for record, offset in zip(self._records, self._offsets, strict=True):
                    data_offset = offset + len(self._local_header(record, offset, 0))
                    sums.append(_write_record(file.fileno(), record, data_offset, wrote))
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
        extra += b"FB" + struct.pack("<H", padding) + bytes(padding)  # torch's field that aligns the data
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


def _write_record(descriptor: int, record: Record, offset: int, wrote: Wrote | None) -> Sum:
    """Sum and write the pieces in several threads, while the caller's thread makes the next pieces. With `wrote` the
    caller's thread does all."""
    if wrote is None:
        found = summed(_sum_and_write, ((descriptor, piece, place) for piece, place in _placed(record, offset)))
    else:
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


# ----------------------------------------------------------------------------------------------------------------------
# The content of torch.save's file as a list of records: the pickle, and the bytes of every storage that it names.
#
# torch.save needs every tensor in memory. Here a tensor may also be `Planned`: it is pickled like a tensor, and its
# bytes are made in pieces when its record is written. torch.load sees no difference.

PIECE = 1 << 21
"""Elements in one piece of a planned tensor: 8 MiB of fp32. A few pieces are in flight."""
MARK = "written_by_ds_slide"
"""The record that marks our files and holds the version. torch.load ignores it."""
_STORAGE_KINDS = {
    torch.float32: torch.FloatStorage,
    torch.bfloat16: torch.BFloat16Storage,
    torch.float16: torch.HalfStorage,
    torch.float64: torch.DoubleStorage,
    torch.uint8: torch.ByteStorage,
    torch.int8: torch.CharStorage,
    torch.int16: torch.ShortStorage,
    torch.int32: torch.IntStorage,
    torch.int64: torch.LongStorage,
    torch.bool: torch.BoolStorage,
}
"""torch's classes of storages. Other data types (fp8) are in storages of bytes, and the tensor names its own."""


@dataclass(frozen=True, eq=False)
class Planned:
    """A tensor of `numel` elements that is not in memory. `read(start, stop)` makes the elements of a span, flat, in
    any memory. `shape`: None for a flat one."""

    numel: int
    dtype: torch.dtype
    read: Callable[[int, int], torch.Tensor]
    shape: tuple[int, ...] | None = None

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Planned:
        """Plan a contiguous tensor that is a small part of its storage: torch.save would write the whole storage."""
        flat = tensor.detach().reshape(-1)
        return cls(flat.numel(), flat.dtype, lambda start, stop: flat[start:stop], tuple(tensor.shape))

    @property
    def size(self) -> tuple[int, ...]:
        return (self.numel,) if self.shape is None else self.shape

    @property
    def stride(self) -> tuple[int, ...]:
        return tuple(math.prod(self.size[place + 1 :]) for place in range(len(self.size)))

    def pieces(self) -> Iterator[torch.Tensor]:
        """Yield the elements in order, at most PIECE at a time."""
        for start in range(0, self.numel, PIECE):
            yield self.read(start, min(start + PIECE, self.numel))

    def tensor(self) -> torch.Tensor:
        """Make the whole tensor in host memory."""
        whole = torch.empty(self.numel, dtype=self.dtype)
        for start in range(0, self.numel, PIECE):
            stop = min(start + PIECE, self.numel)
            whole[start:stop] = self.read(start, stop)
        return whole.view(self.size)


@dataclass(frozen=True)
class Record:
    """One file of the archive. `pieces` yields its `nbytes` bytes in order."""

    name: str
    nbytes: int
    pieces: Callable[[], Iterator[memoryview]]


def records_of(value: Any, *, copied: bool = False) -> list[Record]:
    """Return the records of `value`. Planned tensors are read when their pieces are taken. Other tensors are kept, or
    copied at once if `copied`."""
    buffer = io.BytesIO()
    pickler = _Pickler(buffer)
    pickler.dump(value)
    small = {
        "data.pkl": buffer.getvalue(),
        "byteorder": sys.byteorder.encode(),
        "version": b"3\n",
        MARK: __version__.encode(),
    }
    storages = pickler.storages
    if copied:
        storages = {key: kept if isinstance(kept, Planned) else kept.cpu().clone() for key, kept in storages.items()}
    data = [_storage_record(key, storage) for key, storage in storages.items()]
    return [*(_bytes_record(name, content) for name, content in small.items()), *data]


def materialized(value: Any) -> Any:
    """Return `value` with planned tensors replaced by tensors, in dictionaries and lists."""
    if isinstance(value, Planned):
        return value.tensor()
    if isinstance(value, dict):
        return {key: materialized(item) for key, item in value.items()}
    return [materialized(item) for item in value] if isinstance(value, list) else value


@dataclass(frozen=True, eq=False)
class _PlannedStorage:
    tensor: Planned


class _Pickler(pickle.Pickler):
    """Pickles storages through `persistent_id` in torch's format."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=2)  # torch.save's
        self.storages: dict[str, Any] = {}
        self._keys: dict[int, str] = {}

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, Planned):
            return NotImplemented
        # The arguments of torch.Tensor.__reduce_ex__: storage, offset, size, stride, requires_grad, backward hooks.
        arguments: tuple[Any, ...] = (_PlannedStorage(value), 0, value.size, value.stride, False, OrderedDict())
        if value.dtype in _STORAGE_KINDS:
            return torch._utils._rebuild_tensor_v2, arguments
        return torch._utils._rebuild_tensor_v3, (*arguments, value.dtype)

    def persistent_id(self, value: Any) -> Any:
        untyped: Any
        if isinstance(value, _PlannedStorage):
            planned, key = value.tensor, self._key(id(value.tensor), value.tensor)
            if (known := _STORAGE_KINDS.get(planned.dtype)) is not None:
                return ("storage", known, key, "cpu", planned.numel)
            return ("storage", torch.storage.UntypedStorage, key, "cpu", planned.numel * planned.dtype.itemsize)
        if isinstance(value, torch.storage.TypedStorage):
            kind, untyped, numel = getattr(torch, value._pickle_storage_type()), value._untyped_storage, value._size()
        elif torch.is_storage(value):
            kind, untyped, numel = torch.storage.UntypedStorage, value, value.nbytes()
        else:
            return None
        return ("storage", kind, self._key(untyped._cdata, untyped), location_tag(untyped), numel)

    def _key(self, identity: int, storage: Any) -> str:
        # The storage is kept, so that no other storage gets its identity before the pickle is done.
        key = self._keys.setdefault(identity, str(len(self._keys)))
        self.storages[key] = storage
        return key


def _bytes_record(name: str, content: bytes) -> Record:
    return Record(name, len(content), lambda: iter([memoryview(content)]))


def _storage_record(key: str, storage: Any) -> Record:
    if isinstance(storage, Planned):
        nbytes = storage.numel * storage.dtype.itemsize
        return Record(f"data/{key}", nbytes, lambda: map(bytes_of, storage.pieces()))

    def pieces() -> Iterator[memoryview]:
        if storage.nbytes():
            yield bytes_of(torch.empty(0, dtype=torch.uint8).set_(storage.cpu()))

    return Record(f"data/{key}", storage.nbytes(), pieces)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a tensor: its own memory where that is contiguous host memory, else a copy."""
    array: Any = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return memoryview(array)
