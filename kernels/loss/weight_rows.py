"""A weight with rows that come in chunks, and shared code of its functions: a checked pass, and its place in a graph.

This file does not need Triton: descriptions of a head must load where kernels cannot.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch

from ds_slide.errors import SlideError


class WeightRows(Protocol):
    """A weight [v, h] that comes in chunks of rows, in order and without gaps.

    The tensors of a chunk belong to the reader until it asks for the next one. It submits its work on them to the
    current stream before that. All chunks but the last have one size.
    """

    @property
    def shape(self) -> torch.Size:
        """(v, h)"""

    @property
    def dtype(self) -> torch.dtype:
        """bf16, fp16 or fp32."""

    @property
    def requires_grad(self) -> bool: ...

    def rows(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (first row, chunk [c, h]). Chunks are contiguous, on the computing device, and ready on the current
        stream."""

    def rows_and_gradients(self) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """Yield the same with a buffer [c, h] of `dtype`, content undefined, for the gradient of these rows.

        Called only in backward, where the weight required a gradient in forward.
        """


def pass_rows(
    weight: WeightRows, device: torch.device, with_gradients: bool = False
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor | None]]:
    """Yield (first row, chunk, buffer for its gradient or None) in one pass over `weight`.

    Raises SlideError where the chunks are not the rows in order, on `device`: a loss over other rows would look like a
    loss.
    """
    expected, (height, width) = 0, weight.shape
    passing = weight.rows_and_gradients() if with_gradients else ((first, rows, None) for first, rows in weight.rows())
    for first, rows, gradient in passing:
        if first != expected or first + rows.shape[0] > height:
            raise SlideError(
                f"a streamed weight [{height}, {width}] brought {rows.shape[0]} rows from {first} on where row "
                f"{expected} was next: bring all rows in order and without gaps."
            )
        for tensor in (rows,) if gradient is None else (rows, gradient):
            if (
                tensor.shape != (rows.shape[0], width)
                or (tensor.dtype, tensor.device.type) != (weight.dtype, device.type)
                or not tensor.is_contiguous()
            ):
                raise SlideError(
                    f"a streamed weight [{height}, {width}] brought {tensor.dtype} {tuple(tensor.shape)} on "
                    f"{tensor.device} from row {first} on: bring contiguous rows of {weight.dtype} on {device}."
                )
        if rows.shape[0]:
            yield first, rows, gradient
        expected += rows.shape[0]
    if expected != height:
        raise SlideError(f"a streamed weight [{height}, {width}] ended after {expected} rows: bring all of them.")


def anchor(weight: WeightRows, device: torch.device) -> torch.Tensor | None:
    """Return an empty tensor that makes a result require gradients if `weight`, which is no tensor, needs them."""
    if weight.requires_grad and torch.is_grad_enabled():
        return torch.empty(0, device=device).requires_grad_()
    return None


def weight_is_wanted(ctx, bias: torch.Tensor | None, anchor: torch.Tensor | None) -> bool:
    """Whether this backward pass of a function of hidden, bias, anchor, ... makes the gradient of the weight.

    It does not where only other inputs were asked (torch.autograd.grad, backward(inputs=...)): a plain weight gets no
    gradient from such a pass either.
    """
    if anchor is None:
        return False
    node, _ = ctx.next_functions[1 if bias is None else 2]  # of tensors only
    return node is not None and bool(torch._C._will_engine_execute_node(node))


class _Sealed(torch.autograd.Function):
    """A gradient that depends on `sources`, and raises an error instead of passing for a constant."""

    @staticmethod
    def forward(ctx, function, gradient, *_sources):
        ctx.function = function
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx, *_):
        raise SlideError(f"{ctx.function} has no second derivative: use torch.nn.functional with create_graph.")


def seal(function: str, gradient: torch.Tensor | None, *sources: torch.Tensor | None) -> torch.Tensor | None:
    """Return `gradient`, which with create_graph refuses to be differentiated. For the end of a backward."""
    if gradient is None or not torch.is_grad_enabled():
        return gradient
    return _Sealed.apply(function, gradient, *sources)
