"""Arrays and scalars of numpy in a checkpoint: DeepSpeed saves the state of numpy's generator with a data sampler.

numpy's own functions make anything out of a pickle, also arrays of objects and types of overlapping fields. These take
their places while a checkpoint is read, and make numbers only.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pickle import UnpicklingError
from typing import Any

import numpy as np

_NUMBERS = re.compile(r"[biufc]\d{1,2}")
_BYTE_ORDERS = ("<", ">", "|", "=")


class Number:
    """Stands for a `numpy.dtype` of numbers."""

    def __init__(self, code: Any, *_align_and_copy: Any) -> None:
        if not (isinstance(code, str) and _NUMBERS.fullmatch(code)):
            raise UnpicklingError(f"numpy.dtype of {str(code)[:100]!r}, which is no number")
        self.dtype = np.dtype(code)

    def __setstate__(self, state: Any) -> None:
        _version, order, *fields = state
        if order not in _BYTE_ORDERS or fields[:3] != [None, None, None]:
            raise UnpicklingError("numpy.dtype with fields, which is no number")
        self.dtype = self.dtype.newbyteorder(order)


class Array(np.ndarray):
    """Stands for a `numpy.ndarray` of numbers; a deep copy is one."""

    def __new__(cls, *_arguments: Any) -> Array:
        raise UnpicklingError("numpy.ndarray made in another way than by numpy")

    def __setstate__(self, state: Any) -> None:
        _version, shape, number, in_fortran_order, data = state
        if not isinstance(number, Number) or not isinstance(data, bytes):
            raise UnpicklingError("numpy.ndarray of objects")
        if any(extent < 0 for extent in shape) or math.prod(shape) * number.dtype.itemsize != len(data):
            raise UnpicklingError(f"numpy.ndarray of {shape} elements in {len(data):,} bytes")
        values: Any = (1, tuple(shape), number.dtype, bool(in_fortran_order), data)
        super().__setstate__(values)

    def __deepcopy__(self, _memo: Any) -> np.ndarray[Any, Any]:
        return np.array(self)


def _reconstruct(kind: Any, *_shape_and_type: Any) -> Array:
    if kind is not Array:
        raise UnpicklingError("numpy.ndarray of another kind")
    return np.ndarray.__new__(Array, (0,), np.int8)


def _scalar(number: Any, data: Any) -> Any:
    if not isinstance(number, Number) or not isinstance(data, bytes) or len(data) != number.dtype.itemsize:
        raise UnpicklingError("numpy scalar that is no number")
    return np.frombuffer(data, number.dtype)[0]


STAND_INS: tuple[tuple[Callable[..., Any], str], ...] = (
    (Number, "numpy.dtype"),
    (Array, "numpy.ndarray"),
    *(
        (function, f"{module}.{name}")
        for module in ("numpy._core.multiarray", "numpy.core.multiarray")  # numpy 2, numpy 1
        for function, name in ((_reconstruct, "_reconstruct"), (_scalar, "scalar"))
    ),
)
"""What `torch.serialization.add_safe_globals` takes: a function, and the name in the pickle that it stands for."""
