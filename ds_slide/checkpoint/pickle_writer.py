"""What torch.save puts in a file, as a list of records: the pickle, and the bytes of every storage that it names.

torch.save needs every tensor in memory. Here a tensor may also be `Planned`: it is pickled like a tensor, and its bytes
are made piece by piece when its record is written. torch.load sees no difference.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.serialization import location_tag

from ds_slide import __version__

PIECE = 1 << 21
"""Elements of a planned tensor that are made at a time: 8 MiB of fp32, of which a few are in flight."""
MARK = "written_by_ds_slide"
"""Name of a record that tells this file from torch.save's, whose reader ignores it. It holds the version."""
_PROTOCOL = 2  # torch.save's
_STORAGE_KINDS = {
    torch.float32: torch.FloatStorage,
    torch.bfloat16: torch.BFloat16Storage,
    torch.float16: torch.HalfStorage,
}


@dataclass(frozen=True, eq=False)
class Planned:
    """A flat tensor [numel] that is not in memory. `read(start, stop)` makes some of its elements, in any memory."""

    numel: int
    dtype: torch.dtype
    read: Callable[[int, int], torch.Tensor]

    def pieces(self) -> Iterator[torch.Tensor]:
        """The elements in order, at most PIECE at a time."""
        for start in range(0, self.numel, PIECE):
            yield self.read(start, min(start + PIECE, self.numel))

    def tensor(self) -> torch.Tensor:
        """The whole of it, in host memory."""
        whole = torch.empty(self.numel, dtype=self.dtype)
        for start in range(0, self.numel, PIECE):
            stop = min(start + PIECE, self.numel)
            whole[start:stop] = self.read(start, stop)
        return whole


@dataclass(frozen=True)
class Record:
    """One file of the archive: `pieces` gives its `nbytes` bytes in order."""

    name: str
    nbytes: int
    pieces: Callable[[], Iterator[memoryview]]


def records_of(value: Any, *, copied: bool = False) -> list[Record]:
    """The records of `value`. The planned tensors in it are read when the pieces are taken, the others are kept, or
    `copied` at once."""
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
    """`value` with tensors in the place of planned ones, in dictionaries and lists."""
    if isinstance(value, Planned):
        return value.tensor()
    if isinstance(value, dict):
        return {key: materialized(item) for key, item in value.items()}
    return [materialized(item) for item in value] if isinstance(value, list) else value


@dataclass(frozen=True, eq=False)
class _PlannedStorage:
    tensor: Planned


class _Pickler(pickle.Pickler):
    """Storages leave through `persistent_id`, in torch's words for them."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=_PROTOCOL)
        self.storages: dict[str, Any] = {}
        self._keys: dict[int, str] = {}

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, Planned):
            return NotImplemented
        # As torch.Tensor.__reduce_ex__: storage, offset, size, stride, requires_grad, backward hooks.
        arguments: tuple[Any, ...] = (_PlannedStorage(value), 0, (value.numel,), (1,), False, OrderedDict())
        return torch._utils._rebuild_tensor_v2, arguments

    def persistent_id(self, value: Any) -> Any:
        untyped: Any
        if isinstance(value, _PlannedStorage):
            planned = value.tensor
            return ("storage", _STORAGE_KINDS[planned.dtype], self._key(id(planned), planned), "cpu", planned.numel)
        if isinstance(value, torch.storage.TypedStorage):
            kind, untyped, numel = getattr(torch, value._pickle_storage_type()), value._untyped_storage, value._size()
        elif torch.is_storage(value):
            kind, untyped, numel = torch.storage.UntypedStorage, value, value.nbytes()
        else:
            return None
        return ("storage", kind, self._key(untyped._cdata, untyped), location_tag(untyped), numel)

    def _key(self, identity: int, storage: Any) -> str:
        # The storage is kept, so that its identity is not given to another one before the pickle is done.
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
    """The bytes of a tensor: of its own memory when that is contiguous host memory, else of a copy."""
    array: Any = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return memoryview(array)
