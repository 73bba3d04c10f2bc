"""RMSNorm, alone or of the sum with a residual.

Bytes of an element of 16 bits: forward 2 read, 2 written (with a residual 4 and 4); backward 4 read, 2 written (with a
residual 6 and 2). Only the fp32 scale of each row is saved beside the input.
"""

from __future__ import annotations

import torch

from ds_slide.kernels.norm.launch import (
    backward_rows,
    check_rows,
    empty_gradient,
    empty_row_numbers,
    empty_rows,
    forward_rows,
)
from ds_slide.kernels.operator import operator


def _y_dtype(x: torch.Tensor, weight: torch.Tensor | None, round_before_weight: bool) -> torch.dtype:
    return torch.promote_types(x.dtype, weight.dtype) if weight is not None and round_before_weight else x.dtype


@operator(
    "ds_slide::rms_norm",
    "(Tensor x, Tensor? weight, float eps, float offset, bool round_before_weight) -> (Tensor, Tensor)",
)
def _rms_norm(x, weight, eps, offset, round_before_weight):
    settings = {"offset": offset, "round_before_weight": round_before_weight}
    dtype = _y_dtype(x, weight, round_before_weight)
    y, _, _, rstd = forward_rows(x, None, weight, None, eps, dtype=dtype, centred=False, **settings)
    return y, rstd


@_rms_norm.register_fake
def _(x, weight, eps, offset, round_before_weight):  # noqa: ARG001
    return empty_rows(x, _y_dtype(x, weight, round_before_weight)), empty_row_numbers(x)


@operator(
    "ds_slide::add_rms_norm",
    "(Tensor x, Tensor residual, Tensor? weight, float eps, float offset, bool round_before_weight)"
    " -> (Tensor, Tensor, Tensor)",
)
def _add_rms_norm(x, residual, weight, eps, offset, round_before_weight):
    settings = {"offset": offset, "round_before_weight": round_before_weight}
    dtype = _y_dtype(x, weight, round_before_weight)
    y, total, _, rstd = forward_rows(x, residual, weight, None, eps, dtype=dtype, centred=False, **settings)
    return y, total, rstd


@_add_rms_norm.register_fake
def _(x, residual, weight, eps, offset, round_before_weight):  # noqa: ARG001
    y = empty_rows(x, _y_dtype(x, weight, round_before_weight))
    return y, empty_rows(x, x.dtype), empty_row_numbers(x)


@operator(
    "ds_slide::rms_norm_backward",
    "(Tensor dy, Tensor? dtotal, Tensor x, Tensor? weight, Tensor rstd, float offset, bool round_before_weight,"
    " bool weight_grad) -> (Tensor, Tensor)",
)
def _rms_norm_backward(dy, dtotal, x, weight, rstd, offset, round_before_weight, weight_grad):
    settings = {"weight_grad": weight_grad, "offset": offset, "round_before_weight": round_before_weight}
    dx, dweight, _ = backward_rows(dy, dtotal, x, weight, None, None, rstd, **settings)
    return dx, dweight


@_rms_norm_backward.register_fake
def _(dy, dtotal, x, weight, rstd, offset, round_before_weight, weight_grad):  # noqa: ARG001
    return empty_rows(x, x.dtype), empty_gradient(x, weight if weight_grad else None)


def _save(ctx, inputs, output):
    x, weight, _, *arguments = inputs
    _, rstd = output
    ctx.save_for_backward(x, weight, rstd)
    ctx.arguments = arguments
    ctx.mark_non_differentiable(rstd)
    ctx.set_materialize_grads(False)


def _backward(launch, ctx, dy, _):
    if dy is None:
        return None, None, None, None, None
    x, weight, rstd = ctx.saved_tensors
    weight_grad = ctx.needs_input_grad[1]
    dx, dweight = launch(dy, None, x, weight, rstd, *ctx.arguments, weight_grad)
    return dx, dweight if weight_grad else None, None, None, None


def _add_save(ctx, inputs, output):
    _, _, weight, _, *arguments = inputs
    _, total, rstd = output
    ctx.save_for_backward(total, weight, rstd)
    ctx.arguments = arguments
    ctx.mark_non_differentiable(rstd)
    ctx.set_materialize_grads(False)


def _add_backward(launch, ctx, dy, dtotal, _):
    if dy is None:  # only the sum was used
        return dtotal, dtotal, None, None, None, None
    total, weight, rstd = ctx.saved_tensors
    weight_grad = ctx.needs_input_grad[2]
    dx, dweight = launch(dy, dtotal, total, weight, rstd, *ctx.arguments, weight_grad)
    return dx, dx, dweight if weight_grad else None, None, None, None


_rms_norm.register_autograd(_rms_norm_backward, _backward, _save)
_add_rms_norm.register_autograd(_rms_norm_backward, _add_backward, _add_save)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, *, offset: float = 0.0, round_before_weight: bool
) -> torch.Tensor:
    """Return x / sqrt(mean(x^2) + eps) * (offset + weight) over the last dimension, in fp32 and one pass over x.

    x [..., h] and weight [h] or None (no factor at all) are bf16, fp16 or fp32. With `round_before_weight` (Llama,
    Qwen) the normalised x is rounded to x's dtype before the product, and y has the promoted dtype of x and weight.
    Without it (Gemma, where offset is 1) only the product is rounded, to x's dtype. y has x's order of memory where x
    is dense. x is read in place if its rows are contiguous with one or two strides, else it is copied first. Raises
    SlideError for other dtypes or shapes. It cannot be differentiated twice.
    """
    check_rows("rms_norm", x, None, weight)
    return _rms_norm(x, weight, eps, offset, round_before_weight)[0]


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    *,
    offset: float = 0.0,
    round_before_weight: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (y, total): total = x + residual, rounded to their dtype, and y = rms_norm(total), in one pass.

    x and residual [..., h] have one shape and dtype. For the rest see `rms_norm`. Both get the same gradient tensor.
    """
    check_rows("add_rms_norm", x, residual, weight)
    y, total, _ = _add_rms_norm(x, residual, weight, eps, offset, round_before_weight)
    return y, total
