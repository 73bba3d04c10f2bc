"""Files of torch.save that would run something when they are unpickled: they make the file `marker`."""

from __future__ import annotations

import functools
import io
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch


class Calling:
    """Pickled, it is a call of `function` with `arguments`."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


def touching(marker: Path) -> Calling:
    return Calling(os.system, f"touch {marker}")


def nested(marker: Path) -> Calling:
    inner = marker.with_name("inner.pt")
    torch.save(touching(marker), inner)
    return Calling(functools.partial(torch.load, weights_only=False), str(inner))


def in_an_array(marker: Path) -> Any:
    array = np.empty(1, dtype=object)
    array[0] = touching(marker)
    return array


VALUES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "system": (touching, r"posix\.system"),
    "eval": (lambda marker: Calling(eval, f"open({str(marker)!r}, 'w')"), r"builtins\.eval"),
    "nested": (nested, r"functools\.partial, torch\.serialization\.load"),
    "array": (in_an_array, r"posix\.system"),
}
"""By name: what is put into a file, and what the refusal names."""


def put(path: Path, value: Any, **options: Any) -> None:
    """Add `value` to the dictionary in the file."""
    content = torch.load(path, weights_only=False)
    torch.save({**content, "client": value}, path, **options)


def put_into_storage(path: Path, marker: Path) -> None:
    """A file whose only tensor names a call as the kind of its storage."""

    class Pickler(pickle.Pickler):
        def persistent_id(self, value: Any) -> Any:
            return ("storage", touching(marker), "0", "cpu", 1) if isinstance(value, torch.UntypedStorage) else None

    _write(path, Pickler)


def put_in_protocol_4(path: Path, marker: Path) -> None:
    """A file whose pickle names functions by STACK_GLOBAL, which other readers of it may not look at."""
    _write(path, pickle.Pickler, {"client": touching(marker)}, protocol=4)


def _write(path: Path, pickler: type[pickle.Pickler], value: Any = None, protocol: int = 2) -> None:
    buffer = io.BytesIO()
    pickler(buffer, protocol=protocol).dump(value or {"client": torch.UntypedStorage(4)})
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", buffer.getvalue())
        archive.writestr("archive/byteorder", b"little")
        archive.writestr("archive/version", b"3\n")
        archive.writestr("archive/data/0", bytes(4))
