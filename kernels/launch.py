"""Launches without Triton's search for a compiled kernel.

The search looks at each argument, at each of 16 pointers in one argument, and at the constants of the kernel's module.
It takes 14 to 35 us of the host for each launch, and the launch itself 1 to 8 us.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import torch

# Triton compiles a kernel for pointers that are multiples of it, or for any pointers.
POINTER_BYTES = 16
UNITS = (64, 8, 1)
"""Elements. A kernel that gets places in buffers as multiples of a unit knows how they are aligned. With units of 1 it
reads elements one by one, otherwise in vectors."""

Compiled = dict[Hashable, Any]
"""Compiled kernels for launches on one device, by kernel and kind."""


def launch(
    known: Compiled,
    kernel: Any,
    kind: Sequence[Hashable] | None,
    programs: int,
    arguments: Sequence[Any],
    **constants: Any,
) -> None:
    """Launch `kernel` in the form that `known` has for this `kind`, or let Triton compile it.

    kind: what the compiled kernel depends on beside its constants, and what may differ between launches with one
        `known`: data types of tensors and numbers that the kernel specializes on. All pointers must be `aligned`. None:
        unknown, so Triton searches itself.
    """
    key = None if kind is None else (id(kernel), *kind, *constants.values())
    compiled = known.get(key)
    if compiled is not None:
        # Each constant needs a place among the arguments, although it is compiled in.
        unread = (None,) * (len(kernel.arg_names) - len(arguments))
        compiled[(programs, 1, 1)](*arguments, *unread)
        return
    compiled = kernel[(programs,)](*arguments, **constants)
    if key is not None:
        known[key] = compiled


def unit_of(places: Iterable[int]) -> int:
    """Return the largest of `UNITS` that divides all `places`."""
    common = math.gcd(*places)
    return next(unit for unit in UNITS if common % unit == 0)


def aligned(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether Triton compiles the same kernel for these tensors as for separately allocated ones."""
    together = 0
    for tensor in tensors:
        together |= tensor.data_ptr()
    return together % POINTER_BYTES == 0
