"""How DS-Slide reads a file of torch.save: tensors, plain containers, and by name what DeepSpeed's files hold besides.

A pickle can call whatever Python can import, and a manifest is no protection: whoever writes the one can write the
other. So every file goes through torch's restricted unpickler (`weights_only`), with the list below. A user allows
classes of their own with `torch.serialization.add_safe_globals`. Here alone DS-Slide calls torch.load.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import pickle
import pickletools
import re
import threading
import zipfile
from collections.abc import Iterator
from typing import Any, BinaryIO

import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from torch.serialization import get_safe_globals, get_unsafe_globals_in_checkpoint, safe_globals

from ds_slide.errors import SlideError
from ds_slide.integration.checkpoint_numpy import STAND_INS
from ds_slide.integration.checkpoint_open import regular_file

_CLASSES = (
    LossScaler,  # in the optimizer's file, also without loss scaling
    DynamicLossScaler,
    ZeroStageEnum,  # likewise, in stock's
    argparse.Namespace,  # a script's arguments, which Megatron's clients of DeepSpeed save
)
_SHOWN = 5
"""Names in a message, at most."""
_IN_TORCHS_WORDS = (
    r"GLOBAL (\S+) was not an allowed",
    r"unsupported GLOBAL (\S+) whose",
    r"but got <\w+ '([^']+)'>",
    r"unrecognized function <[\w-]+ (?:\w+ )?'?([\w.]+)",
    r"(numpy[ .].*)",
)
_lock = threading.Lock()


def load(path: str, map_location: Any = None, *, mapped: bool = False) -> Any:
    """The content of a file. `mapped`: its tensors are maps of the file where its format allows that. Raises
    FileNotFoundError, and SlideError where it cannot be loaded or holds what is not allowed, which has not been run."""
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
    """The content of `file`, opened at `path`. `mapped`: its tensors are maps of the file. Raises SlideError."""
    # Mapped, torch opens the file by name. This name is that of the file which is open, whatever is at `path` now.
    source: Any = f"/proc/self/fd/{file.fileno()}" if mapped else file
    with _allowed():
        try:
            return torch.load(source, map_location=map_location, weights_only=True, mmap=mapped)
        except pickle.UnpicklingError as error:
            names = _refused_names(file, str(error))
            if not names:
                raise _unreadable(path, _reason(error)) from error
            # Without torch's own words, which advise to load the file unrestricted.
            raise SlideError(
                f"the checkpoint file {path} holds {names}, but only tensors and plain containers are loaded, so that "
                "loading runs no code out of a file; load another tag or, if you trust the file and need that, allow "
                "it with torch.serialization.add_safe_globals([...]) before load_checkpoint"
            ) from None
        except Exception as error:
            raise _unreadable(path, f"{type(error).__name__}: {_reason(error)}") from error


def refused_names(pickled: bytes) -> list[str]:
    """What in a pickle that torch.save would write is refused when it is read back. A user's `add_safe_globals`
    counts."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/version", b"3\n")
    buffer.seek(0)
    with _allowed():
        try:
            return sorted(get_unsafe_globals_in_checkpoint(buffer))
        except pickle.UnpicklingError as error:
            return _operation(str(error))


@contextlib.contextmanager
def _allowed() -> Iterator[None]:
    """Meanwhile torch's unpickler knows the list. What the user has allowed stays as it is, before and after."""
    with _lock:  # the list is the process's: another thread must not take away what this one still needs
        taken = {_name_of(entry) for entry in get_safe_globals()}
        entries: list[Any] = [entry for entry in _CLASSES if _name_of(entry) not in taken]
        if not any(name.startswith("numpy.") for name in taken):
            entries += STAND_INS
        with safe_globals(entries):
            yield


def _name_of(entry: Any) -> str:
    return entry[1] if isinstance(entry, tuple) else f"{entry.__module__}.{entry.__qualname__}"


def _refused_names(file: BinaryIO, message: str) -> str:
    """What was refused, as a list in words; empty where torch's message is about something else."""
    names: list[str] = []
    with contextlib.suppress(Exception):  # a file in the old format, or a broken one
        file.seek(0)
        names = sorted(get_unsafe_globals_in_checkpoint(f"/proc/self/fd/{file.fileno()}"))
    if not names:
        names = [match[1] for pattern in _IN_TORCHS_WORDS if (match := re.search(pattern, message))][:1]
        names = [name if "." in name else f"builtins.{name}" for name in names]
    return listed(names or _operation(message))


def _operation(message: str) -> list[str]:
    match = re.search(r"Unsupported operand (\d+)", message)
    return [f"the pickle operation {op.name}" for op in pickletools.opcodes if match and op.code == chr(int(match[1]))]


def listed(names: list[str]) -> str:
    """Names out of a pickle, fit for a message."""
    shown = ", ".join(ascii(name[:200])[1:-1] for name in names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} others"


def _reason(error: Exception) -> str:
    """The line of an error's message that says what is wrong, fit for a terminal."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if line.startswith("WeightsUnpickler error:")] or lines or [""]
    return ascii(telling[0].removeprefix("WeightsUnpickler error:").strip()[:300])[1:-1]


def _unreadable(path: str | os.PathLike[str], how: str) -> SlideError:
    return SlideError(
        f"the checkpoint file {os.fspath(path)} cannot be loaded ({how}); load another tag or a copy of this one"
    )
