"""Arrays and scalars of numpy in a checkpoint: DeepSpeed saves the state of numpy's generator with a data sampler.

numpy's own functions make anything from a pickle, also arrays of objects and types of overlapping fields. The stand-ins
of this file replace them while a checkpoint is read, and make only numbers, texts and dates.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pickle import UnpicklingError
from typing import Any

import numpy as np

_FIXED_SIZE = re.compile(r"[biufc]\d{1,2}|[SU]\d{1,9}|[Mm]8")
_UNITS = ("Y", "M", "W", "D", "h", "m", "s", "ms", "us", "ns", "ps", "fs", "as")
_BYTE_ORDERS = ("<", ">", "|", "=")


class Number:
    """Stands for a `numpy.dtype` of numbers, texts or dates. A pickle or copy of it is a `numpy.dtype`."""

    def __init__(self, code: Any, *_align_and_copy: Any) -> None:
        if not (isinstance(code, str) and _FIXED_SIZE.fullmatch(code)):
            raise UnpicklingError(f"numpy.dtype of {str(code)[:100]!r}")
        self.dtype = np.dtype(code)

    def __setstate__(self, state: Any) -> None:
        _version, order, *fields = state
        if order not in _BYTE_ORDERS or fields[:3] != [None, None, None]:
            raise UnpicklingError("numpy.dtype with fields")
        if self.dtype.kind in "mM" and len(fields) > 6:
            self.dtype = np.dtype(self.dtype.kind + "8" + _unit(fields[6]))
        self.dtype = self.dtype.newbyteorder(order)

    def __deepcopy__(self, _memo: Any) -> Any:
        return self.dtype

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.dtype.__reduce_ex__(protocol)


class Array(np.ndarray):
    """Stands for a `numpy.ndarray` of such a type. A pickle or copy of it is a `numpy.ndarray`."""

    def __new__(cls, *_arguments: Any) -> Array:
        raise UnpicklingError("numpy.ndarray made in another way than by numpy")

    def __setstate__(self, state: Any) -> None:
        _version, shape, number, in_fortran_order, data = state
        kind = _type_of(number)
        if kind is None or not isinstance(data, bytes):
            raise UnpicklingError("numpy.ndarray of objects")
        count = math.prod(shape)
        if any(extent < 0 for extent in shape) or count * kind.itemsize != len(data) or (count and not data):
            raise UnpicklingError(f"numpy.ndarray of {shape} elements in {len(data):,} bytes")
        values: Any = (1, tuple(shape), kind, bool(in_fortran_order), data)
        super().__setstate__(values)

    def __deepcopy__(self, _memo: Any) -> np.ndarray[Any, Any]:
        return np.array(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return np.array(self).__reduce_ex__(protocol)


def in_numpys_own(value: Any, classes: tuple[type, ...]) -> Any:
    """Return `value` with its stand-ins replaced by numpy's types and arrays: in containers, and in attributes of
    objects of `classes`. Mutable objects are changed in place."""
    done: dict[int, tuple[Any, Any]] = {}  # keeps the value, so that no other object gets its identity

    def real(value: Any) -> Any:
        if isinstance(value, Number):
            return value.dtype
        if id(value) not in done:
            if isinstance(value, Array):
                done[id(value)] = value, np.array(value)
            elif isinstance(value, tuple):
                items = [real(item) for item in value]
                same = all(new is old for new, old in zip(items, value, strict=True))
                done[id(value)] = value, value if same else tuple.__new__(type(value), items)
            elif isinstance(value, (dict, list, set, *classes)):
                done[id(value)] = value, value
                change(value)
            else:
                return value
        return done[id(value)][1]

    def change(value: Any) -> None:
        if isinstance(value, list):
            value[:] = [real(item) for item in value]
        elif isinstance(value, set):
            items = [real(item) for item in value]
            value.clear()
            value.update(items)
        elif isinstance(value, dict):
            pairs = [(key, real(key), item, real(item)) for key, item in value.items()]
            if any(new is not key for key, new, *_ in pairs):
                value.clear()
            for key, new, item, new_item in pairs:
                if new is not key or new_item is not item or key not in value:
                    value[new] = new_item
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            change(attributes)

    try:
        return real(value)
    finally:
        done.clear()  # the two functions refer to each other: the values would live until garbage is collected


def _type_of(number: Any) -> np.dtype[Any] | None:
    """Return the type from a pickle, also where the user has allowed numpy's own. None if it holds more than numbers,
    texts and dates."""
    if isinstance(number, np.dtype):
        return np.dtype(number.str) if number.kind in "biufcSUmM" else None
    return number.dtype if isinstance(number, Number) else None


def _unit(metadata: Any) -> str:
    _others, (name, count, *rest) = metadata
    name = name.decode("ascii", "replace") if isinstance(name, bytes) else name
    if name == "generic":
        return ""
    if name not in _UNITS or type(count) is not int or not 0 < count < 1 << 31 or rest != [1, 1]:
        raise UnpicklingError("numpy.dtype of dates in an unknown unit")
    return f"[{count}{name}]"


def _reconstruct(kind: Any, *_shape_and_type: Any) -> Array:
    if kind is not Array:
        raise UnpicklingError("numpy.ndarray of another kind")
    return np.ndarray.__new__(Array, (0,), np.int8)


def _scalar(number: Any, data: Any = b"") -> Any:
    kind = _type_of(number)
    if kind is None or not isinstance(data, bytes) or len(data) != kind.itemsize:
        raise UnpicklingError("numpy scalar that is no number, text or date")
    return np.frombuffer(data, kind)[0] if data else kind.type()


STAND_INS: tuple[tuple[Callable[..., Any], str], ...] = (
    (Number, "numpy.dtype"),
    (Array, "numpy.ndarray"),
    *(
        (function, f"{module}.{name}")
        for module in ("numpy._core.multiarray", "numpy.core.multiarray")  # numpy 2, numpy 1
        for function, name in ((_reconstruct, "_reconstruct"), (_scalar, "scalar"))
    ),
)
"""Entries for `torch.serialization.add_safe_globals`: a function, and the name in the pickle that it replaces."""
