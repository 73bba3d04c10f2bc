"""How DS-Slide reads a file of torch.save: tensors, plain containers, and a list of other allowed names.

A pickle can call anything that Python can import. A manifest is no protection, because a user who writes the pickle can
write the manifest too. So every file goes through torch's restricted unpickler (`weights_only`), with the list below.
`ds_slide.integration` adds the names in DeepSpeed's files. Users allow their own classes with
`torch.serialization.add_safe_globals`. DS-Slide calls torch.load in this file only.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import io
import os
import pickle
import pickletools
import re
import threading
import zipfile
from collections.abc import Iterator
from enum import Enum
from typing import Any, BinaryIO

import torch
from torch._weights_only_unpickler import Unpickler
from torch.serialization import add_safe_globals, get_safe_globals, get_unsafe_globals_in_checkpoint, safe_globals

from ds_slide.checkpoint.numpy_values import STAND_INS, in_numpys_own
from ds_slide.checkpoint.sums import regular_file
from ds_slide.errors import SlideError


def _empty_bytes() -> bytes:
    """Return b"". Pickle's protocol 2 writes a call of `builtins.bytes` for b"", in an empty array too."""
    return b""


def _enum_member(*arguments: Any) -> Any:
    """Return a member of an allowed Enum by its name. Python 3.11.0 to 3.11.3 pickle members as calls of
    `builtins.getattr`, for which this function stands. It gives no other attribute of any object."""
    match arguments:
        case (type() as kind, str(name)) if issubclass(kind, Enum) and kind in _classes() and name in kind.__members__:
            return kind.__members__[name]
    raise pickle.UnpicklingError("builtins.getattr of another thing than a member of an allowed Enum")


_listed: list[Any] = [
    (_empty_bytes, "builtins.bytes"),
    (_enum_member, "builtins.getattr"),
    argparse.Namespace,  # the arguments of a script, saved by Megatron's clients of DeepSpeed
]
_IN_TORCHS_WORDS = (
    r"GLOBAL (\S+) was not an allowed",
    r"unsupported GLOBAL (\S+) whose",
    r"but got <\w+ '([^']+)'>",
    r"unrecognized function <[\w-]+ (?:\w+ )?'?([\w.]+)",
    r"(numpy[ .].*)",
    r"(builtins\.getattr) of",
)
_REFUSED_FOR_CONTENT = (b"cnumpy", b"c__builtin__\ngetattr\n")
"""Beginnings of what an allowed name may refuse when it is called."""
_lock = threading.Lock()


def also_allow(*classes: type) -> None:
    """Allow files to hold objects of these classes, too, from now on."""
    with _lock:
        _listed.extend(entry for entry in classes if entry not in _listed)


def load(path: str, map_location: Any = None, *, mapped: bool = False) -> Any:
    """Load a file. `mapped`: its tensors are maps of the file where its format allows that. Raises FileNotFoundError,
    and SlideError where it cannot be loaded or holds a name that is not allowed, before that code runs."""
    with regular_checkpoint_file(path) as file:
        return load_open(file, path, map_location, mapped=mapped and is_zip(file))


@contextlib.contextmanager
def regular_checkpoint_file(path: str) -> Iterator[BinaryIO]:
    """Open a file of a checkpoint. Raises FileNotFoundError, SlideError."""
    try:
        with regular_file(path) as file:
            yield file
    except FileNotFoundError:
        raise
    except OSError as error:
        raise _unreadable(path, f"{error.strerror}") from error


def is_zip(file: BinaryIO) -> bool:
    """Whether the file has torch's present format, which can be mapped."""
    found = zipfile.is_zipfile(file)
    file.seek(0)
    return found


def load_open(file: BinaryIO, path: str, map_location: Any, *, mapped: bool) -> Any:
    """Load `file`, opened at `path`. `mapped`: its tensors are maps of the file. Raises SlideError."""
    with _lock:  # the process has one list: another thread must not remove names that this one still needs
        try:
            return _read_allowed(file, map_location, mapped=mapped)
        except pickle.UnpicklingError as error:
            with _allowed(users_numpy=True):
                names = _refused_names(file, str(error))
            if not names:
                raise _unreadable(path, _reason(error)) from error
            # torch's own message is left out, because it advises to load the file unrestricted.
            raise SlideError(
                f"the checkpoint file {path} holds {names}, but only tensors and plain containers are loaded, so that "
                "loading runs no code out of a file; load another tag or, if you trust the file and need that, allow "
                "it with torch.serialization.add_safe_globals([...]) before load_checkpoint"
            ) from None
        except Exception as error:
            raise _unreadable(path, f"{type(error).__name__}: {_reason(error)}") from error


def refused_names(pickled: bytes) -> list[str]:
    """Return the names in a pickle of torch.save that are refused when it is read back. A user's `add_safe_globals`
    counts."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/version", b"3\n")
    buffer.seek(0)
    with _lock:
        try:
            with _allowed(users_numpy=True):
                names = sorted(get_unsafe_globals_in_checkpoint(buffer))
            if names or not any(begin in pickled for begin in _REFUSED_FOR_CONTENT):
                return names
            _read_allowed(pickled)
        except pickle.UnpicklingError as error:
            return _operation(str(error)) or _named_in(str(error)) or [_reason(error)]
        except Exception:  # a class of the user that cannot be made without its tensors' values
            pass
    return []


def _without_storages(pickled: bytes) -> Any:
    """Load a pickle with tensors that have no memory."""

    def storage(saved: Any) -> Any:
        _, kind, _, _, numel = saved
        dtype = torch.uint8 if kind is torch.UntypedStorage else kind.dtype
        empty = torch.UntypedStorage(numel * dtype.itemsize, device="meta")
        return torch.storage.TypedStorage(wrap_storage=empty, dtype=dtype, _internal=True)

    reader: Any = Unpickler(io.BytesIO(pickled), encoding="utf-8")
    reader.persistent_load = storage
    return reader.load()


def _read_allowed(source: BinaryIO | bytes, map_location: Any = None, *, mapped: bool = False) -> Any:
    """Return the content of a file, or of a pickle without its storages. Where the stand-ins refuse it, names of numpy
    that the user has allowed are used in a second attempt: in the first a part of them would only replace stand-ins.
    Called under `_lock`."""
    try:
        with _allowed(users_numpy=False):
            return in_numpys_own(_read(source, map_location, mapped=mapped), _classes())
    except pickle.UnpicklingError:
        if not _users_numpy():
            raise
    with _allowed(users_numpy=True):
        return in_numpys_own(_read(source, map_location, mapped=mapped), _classes())


def _read(source: BinaryIO | bytes, map_location: Any, *, mapped: bool) -> Any:
    if isinstance(source, bytes):
        return _without_storages(source)
    source.seek(0)
    # torch opens a mapped file by name. This name leads to the open file, whatever is at its path now.
    where: Any = f"/proc/self/fd/{source.fileno()}" if mapped else source
    return torch.load(where, map_location=map_location, weights_only=True, mmap=mapped)


def _classes() -> tuple[type, ...]:
    """Return the classes whose objects may have attributes from a file."""
    entries = [entry[0] if isinstance(entry, tuple) else entry for entry in get_safe_globals()]
    return (torch.Tensor, *(entry for entry in entries if isinstance(entry, type)))


def _users_numpy() -> list[Any]:
    names = {name for _, name in STAND_INS}
    return [entry for entry in get_safe_globals() if _name_of(entry) in names]


@contextlib.contextmanager
def _allowed(*, users_numpy: bool) -> Iterator[None]:
    """Give torch's unpickler our list while this context is open. `users_numpy`: keep names of numpy that the user has
    allowed, otherwise only our stand-ins. The user's names are the same before and after. Called under `_lock`."""
    hidden = [] if users_numpy else _users_numpy()
    with safe_globals(hidden):
        pass  # the end of the context removes them from the list
    try:
        taken = {_name_of(entry) for entry in get_safe_globals()}
        with safe_globals([entry for entry in (*_listed, *STAND_INS) if _name_of(entry) not in taken]):
            yield
    finally:
        add_safe_globals(hidden)


def _name_of(entry: Any) -> str:
    return entry[1] if isinstance(entry, tuple) else f"{entry.__module__}.{entry.__qualname__}"


def _refused_names(file: BinaryIO, message: str) -> str:
    """Return the refused names for a message, empty where torch's message is about something else."""
    names: list[str] = []
    with contextlib.suppress(Exception):  # a file in the old format, or a broken one
        file.seek(0)
        names = sorted(get_unsafe_globals_in_checkpoint(f"/proc/self/fd/{file.fileno()}"))
    if not names:
        names = _named_in(message)
    return listed(names or _operation(message))


def _named_in(message: str) -> list[str]:
    names = [match[1] for pattern in _IN_TORCHS_WORDS if (match := re.search(pattern, message))][:1]
    return [name if "." in name else f"builtins.{name}" for name in names]


def _operation(message: str) -> list[str]:
    match = re.search(r"Unsupported operand (\d+)", message)
    return [f"the pickle operation {op.name}" for op in pickletools.opcodes if match and op.code == chr(int(match[1]))]


def listed(names: list[str]) -> str:
    """Return names from a pickle in a form fit for a message, five at most."""
    shown, more = ", ".join(ascii(name[:200])[1:-1] for name in names[:5]), len(names) - 5
    return f"{shown} and {more} others" if more > 0 else shown


def _reason(error: Exception) -> str:
    """Return the line of an error's message that tells the cause, fit for a terminal."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if line.startswith("WeightsUnpickler error:")] or lines or [""]
    return ascii(telling[0].removeprefix("WeightsUnpickler error:").strip()[:300])[1:-1]


def _unreadable(path: str | os.PathLike[str], how: str) -> SlideError:
    return SlideError(
        f"the checkpoint file {os.fspath(path)} cannot be loaded ({how}); load another tag or a copy of this one"
    )


# ----------------------------------------------------------------------------------------------------------------------
# Files of torch.save are read through a memory map, and the pages are given back right after use.
#
# A page that has been read counts as memory of the process until the kernel takes it back. A checkpoint is larger than
# the memory that is free beside the model.

_MADV_WILLNEED, _MADV_DONTNEED = 3, 4
_PAGE = os.sysconf("SC_PAGE_SIZE")
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class MappedFiles:
    """Loads files, and knows which addresses are maps of them. Giving back other pages would lose data."""

    def __init__(self) -> None:
        self._ranges: set[tuple[int, int]] = set()

    def load(self, path: str, map_location: Any) -> Any:
        """Load a file with the restricted unpickler, with tensors that are maps of the file. A file in torch's old
        format cannot be mapped and is read into memory. Raises FileNotFoundError, SlideError."""
        with regular_checkpoint_file(path) as file:
            if not is_zip(file):
                return load_open(file, path, map_location, mapped=False)
            before = _maps_of(file)
            value = load_open(file, path, map_location, mapped=True)
            self._ranges |= _maps_of(file) - before
            return value

    @contextlib.contextmanager
    def using(self, tensor: torch.Tensor) -> Iterator[torch.Tensor]:
        """Use a contiguous tensor once. Its pages are read from disk at the beginning and given back at the end."""
        self._advise(tensor, _MADV_WILLNEED)
        yield tensor
        self._advise(tensor, _MADV_DONTNEED)

    def _advise(self, tensor: torch.Tensor, advice: int) -> None:
        start, stop = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        for first, last in self._ranges:
            if first <= start < stop <= last:
                start -= start % _PAGE
                _libc.madvise(start, stop - start, advice)  # only advice: its result does not matter


def _maps_of(file: BinaryIO) -> set[tuple[int, int]]:
    """Return the address ranges where this process has mapped a file."""
    inode = str(os.fstat(file.fileno()).st_ino)
    name = os.path.basename(os.readlink(f"/proc/self/fd/{file.fileno()}"))  # in a directory of links, another one
    ranges = set()
    with open("/proc/self/maps") as maps:
        for line in maps:
            fields = line.split(maxsplit=5)
            if fields[4] == inode and len(fields) == 6 and os.path.basename(fields[5].strip()) == name:
                first, last = fields[0].split("-")
                ranges.add((int(first, 16), int(last, 16)))
    return ranges
