"""The shared library of csrc/: where it is, its functions, and how their failures become exceptions.

It has a plain C interface (csrc/bindings) and is called through ctypes, so one file serves every version of Python.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

PATH = Path(__file__).with_name("libds_slide.so")

_TYPES: dict[str, Any] = {"p": ctypes.c_void_p, "q": ctypes.c_int64, "d": ctypes.c_double}


def _load() -> tuple[ctypes.CDLL, ctypes.PyDLL, dict[str, str]]:
    """Return the library to call without the GIL and to call with it, and the types of each function.

    Raises ImportError where the file is missing or is not for this machine.
    """
    if not PATH.exists():
        raise ImportError(f"{PATH} is not there")
    try:
        released, held = ctypes.CDLL(os.fspath(PATH)), ctypes.PyDLL(os.fspath(PATH))
    except OSError as error:
        raise ImportError(str(error)) from error
    released.slide_functions.restype = ctypes.c_char_p
    lines = released.slide_functions().decode().splitlines()
    return released, held, dict(line.split() for line in lines)


_RELEASED, _HELD, _SIGNATURES = _load()


def function(name: str, types: str, *, keeps_gil: bool = False) -> Callable[..., Any]:
    """Return a function of the library. `types`: a letter for its result and one for each argument, p for a pointer, q
    for an integer of 64 bits, d for a double, as in "q:pq".

    The GIL is released around the call unless `keeps_gil`. That is for calls that take less time than the release:
    after one the thread may wait 5 ms for another thread that computes. Raises ImportError when the library was built
    from other sources and has no such function.
    """
    wanted = types.replace(":", "")
    if _SIGNATURES.get(name) != wanted:
        raise ImportError(
            f"{PATH} was built from other sources: its function {name!r} has the types {_SIGNATURES.get(name)!r}, not "
            f"{wanted!r}"
        )
    found = (_HELD if keeps_gil else _RELEASED)[f"slide_{name}"]
    found.restype = _TYPES[types[0]]
    found.argtypes = [_TYPES[each] for each in types[2:]]
    return found


_error = function("error", "p:pp", keeps_gil=True)

_VALUE, _INDEX, _MEMORY, _FILE = 1, 2, 3, 5


def last_sentence() -> str:
    """Return the sentence that the last call of this thread has left."""
    return _last_error()[0]


def _last_error() -> tuple[str, int, str]:
    number, path = ctypes.c_int64(), ctypes.c_char_p()
    sentence = ctypes.string_at(_error(ctypes.byref(number), ctypes.byref(path)))
    return sentence.decode(errors="replace"), number.value, os.fsdecode(path.value or b"")


def checked(result: int) -> int:
    """Return the result of a call, or raise the exception that it stands for."""
    if result < 0:
        raise _exception(-result)
    return result


def _exception(kind: int) -> Exception:
    sentence, number, path = _last_error()
    if kind == _FILE:
        return OSError(number, sentence, path)
    return {_VALUE: ValueError, _INDEX: IndexError, _MEMORY: MemoryError}.get(kind, RuntimeError)(sentence)


def integer(value: int | None) -> Any:
    """Return the argument for an integer that may be missing."""
    return None if value is None else ctypes.byref(ctypes.c_int64(value))


_cell_new = function("cell_new", "p:", keeps_gil=True)
_capsule_new = ctypes.pythonapi.PyCapsule_New
_capsule_new.restype = ctypes.py_object
_capsule_new.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


def new_handle(kind: str) -> ctypes.c_void_p:
    """Return the place of a pointer to an object of C++. A constructor in C++ writes the pointer there.

    The object is deleted with the last reference to its place, by a capsule. A `__del__` would be too early: the
    garbage collector calls `__del__` of all objects of a cycle before it frees any, and an engine's `__del__` still
    uses its buffers. An interrupt between the call of C++ and an assignment loses nothing. `kind`: as in
    slide_`kind`_drop.
    """
    cell = _cell_new()
    if cell is None:
        raise MemoryError("there are no 8 bytes of memory")
    drop = ctypes.cast(_HELD[f"slide_{kind}_drop"], ctypes.c_void_p)
    owner = _capsule_new(cell, None, drop)
    place = ctypes.c_void_p.from_address(cell)
    place.owner = owner  # type: ignore[attr-defined]  # as on every object of Python
    return place
