"""Returns a block's changes of its inputs to the caller: writes in place, and fields of objects that it sets.

A block gets its inputs through an identity (`_Boundary`), as other tensors on the same memory. A write in place changes
the bytes of both, but only the block's tensor knows the operation that made them. Without this module the caller would
continue with the new bytes and the old graph: a block that returns nothing and works in place would never train.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ds_slide.runtime.weights.fields import Field, put, restore


class _Written(torch.autograd.Function):
    """Gives a tensor the graph of another tensor on the same memory that has been written to."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, _alias: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(tensor)
        ctx.is_view = tensor._is_view()
        return tensor

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor]:
        # The graph of the other tensor leads to the tensor's own past. Autograd needs zeros for a view, and accepts
        # None for any other tensor.
        zero = gradient.new_zeros(()).expand_as(gradient) if ctx.is_view else None
        return zero, gradient


class Passed:
    """The tensors that have gone through a block's boundary, until the block has ended."""

    __slots__ = ("_fields", "_held", "_node", "_through", "inputs")

    def __init__(
        self, inputs: Sequence[torch.Tensor], through: Sequence[torch.Tensor], fields: Sequence[Field]
    ) -> None:
        """Keep them. `fields`: the fields of objects that hold `through` from now on."""
        self.inputs = inputs
        self._through = through
        self._node = through[0].grad_fn
        self._fields = fields
        if fields:
            self._held = put(fields, dict(zip(map(id, inputs), through, strict=True)))

    def hand_back(self) -> None:
        """Show the caller what the block has written, and give the objects their own tensors back. Called when the
        block has ended."""
        for index, alias in enumerate(self._through):
            if alias.grad_fn is not self._node:
                tensor = self.inputs[index]
                # Tensors that the block has saved since its write are unchanged.
                with torch.autograd._unsafe_preserve_version_counter(tensor):
                    _Written.apply(tensor, alias)
        if self._fields:
            restore(self._fields, self._held)
