"""A weight whose rows come in chunks, and what the functions over one share: a checked pass, and its place in a graph.

Nothing here needs Triton: what describes a head must load where no kernel does.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch

from ds_slide.errors import SlideError


class WeightRows(Protocol):
    """A weight [v, h] that comes in chunks of rows, in order and without gaps.

    The tensors of a chunk are the reader's until it asks for the next one; what it does with them it submits to the
    current stream before. Chunks are of one size, but for the last.
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
        """(first row, chunk [c, h]), contiguous, on the device of the computation and ready on the current stream."""

    def rows_and_gradients(self) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """The same with a buffer [c, h] of `dtype`, content undefined, for the gradient of these rows.

        It is called, in backward only, where the weight required a gradient in forward.
        """


def pass_rows(
    weight: WeightRows, device: torch.device, with_gradients: bool = False
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor | None]]:
    """One pass over `weight`: (first row, chunk, buffer for its gradient or None).

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
    """What makes a result require gradients for the sake of `weight`, which is no tensor: an empty one, if needed."""
    if weight.requires_grad and torch.is_grad_enabled():
        return torch.empty(0, device=device).requires_grad_()
    return None


def weight_is_wanted(ctx, bias: torch.Tensor | None, anchor: torch.Tensor | None) -> bool:
    """Whether this backward pass of a function of hidden, bias, anchor, ... is to make the gradient of the weight.

    Not when it was asked for other inputs alone (torch.autograd.grad, backward(inputs=...)): a plain weight gets no
    gradient from such a pass either.
    """
    if anchor is None:
        return False
    node, _ = ctx.next_functions[1 if bias is None else 2]  # of tensors only
    return node is not None and bool(torch._C._will_engine_execute_node(node))


class _Sealed(torch.autograd.Function):
    """A gradient that depends on `sources`, and says so instead of passing for a constant."""

    @staticmethod
    def forward(ctx, function, gradient, *_sources):
        ctx.function = function
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx, *_):
        raise SlideError(f"{ctx.function} has no second derivative: use torch.nn.functional with create_graph.")


def seal(function: str, gradient: torch.Tensor | None, *sources: torch.Tensor | None) -> torch.Tensor | None:
    """`gradient`, which with create_graph refuses to be differentiated; for use at the end of a backward."""
    if gradient is None or not torch.is_grad_enabled():
        return gradient
    return _Sealed.apply(function, gradient, *sources)
