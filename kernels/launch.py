"""Launches without Triton's search for what it has compiled.

That looks at each argument, at each of 16 pointers in one, and at the constants of the kernel's module: 14 to 35 us a
launch on the host, for 1 to 8 of the launch itself.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import torch

# Bytes that Triton compiles for: pointers are multiples of it, or nothing is known of them.
_POINTER = 16

Compiled = dict[Hashable, Any]
"""What Triton has compiled for launches on one device, by kernel and kind."""


def launch(
    known: Compiled,
    kernel: Any,
    kind: Sequence[Hashable] | None,
    programs: int,
    arguments: Sequence[Any],
    **constants: Any,
) -> None:
    """Launch `kernel` as it was compiled for the last launch of this `kind` that is `known`.

    kind: what the compiled kernel depends on beside its constants, and may differ between launches of one `known`: the
        data types of tensors and the numbers that the kernel specializes on, where all pointers are `aligned`. None:
        unknown; Triton looks itself.
    """
    key = None if kind is None else (id(kernel), *kind, *constants.values())
    compiled = known.get(key)
    if compiled is not None:
        # A place for each constant, which is compiled in.
        unread = (None,) * (len(kernel.arg_names) - len(arguments))
        compiled[(programs, 1, 1)](*arguments, *unread)
        return
    compiled = kernel[(programs,)](*arguments, **constants)
    if key is not None:
        known[key] = compiled


def aligned(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether Triton compiles the same for these pointers as for those of memory that is allocated for them alone."""
    together = 0
    for tensor in tensors:
        together |= tensor.data_ptr()
    return together % _POINTER == 0
