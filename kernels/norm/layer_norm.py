"""LayerNorm, alone or of the sum with a residual, with the row kernels that RMSNorm shares.

It moves the bytes of `rms_norm`. Mean and scale of each row are saved in fp32, and with a bias the backward pass keeps
two sums in registers.
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


@operator(
    "ds_slide::layer_norm",
    "(Tensor x, Tensor? weight, Tensor? bias, float eps) -> (Tensor, Tensor, Tensor)",
)
def _layer_norm(x, weight, bias, eps):
    y, _, mean, rstd = forward_rows(x, None, weight, bias, eps, dtype=x.dtype, centred=True)
    return y, mean, rstd


@_layer_norm.register_fake
def _(x, weight, bias, eps):  # noqa: ARG001
    return empty_rows(x, x.dtype), empty_row_numbers(x), empty_row_numbers(x)


@operator(
    "ds_slide::add_layer_norm",
    "(Tensor x, Tensor residual, Tensor? weight, Tensor? bias, float eps) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _add_layer_norm(x, residual, weight, bias, eps):
    return forward_rows(x, residual, weight, bias, eps, dtype=x.dtype, centred=True)


@_add_layer_norm.register_fake
def _(x, residual, weight, bias, eps):  # noqa: ARG001
    return empty_rows(x, x.dtype), empty_rows(x, x.dtype), empty_row_numbers(x), empty_row_numbers(x)


@operator(
    "ds_slide::layer_norm_backward",
    "(Tensor dy, Tensor? dtotal, Tensor x, Tensor? weight, Tensor? bias, Tensor mean, Tensor rstd,"
    " bool weight_grad) -> (Tensor, Tensor, Tensor)",
)
def _layer_norm_backward(dy, dtotal, x, weight, bias, mean, rstd, weight_grad):
    return backward_rows(dy, dtotal, x, weight, bias, mean, rstd, weight_grad=weight_grad)


@_layer_norm_backward.register_fake
def _(dy, dtotal, x, weight, bias, mean, rstd, weight_grad):  # noqa: ARG001
    dweight, dbias = (empty_gradient(x, given if weight_grad else None) for given in (weight, bias))
    return empty_rows(x, x.dtype), dweight, dbias


def _gradients(launch, ctx, dy, dtotal, needs_weight, needs_bias):
    x, weight, bias, mean, rstd = ctx.saved_tensors
    dx, dweight, dbias = launch(dy, dtotal, x, weight, bias, mean, rstd, needs_weight or needs_bias)
    return dx, dweight if needs_weight else None, dbias if needs_bias else None


def _save(ctx, inputs, output):
    x, weight, bias, _ = inputs
    _, mean, rstd = output
    ctx.save_for_backward(x, weight, bias, mean, rstd)
    ctx.mark_non_differentiable(mean, rstd)
    ctx.set_materialize_grads(False)


def _backward(launch, ctx, dy, _mean, _rstd):
    if dy is None:
        return None, None, None, None
    return *_gradients(launch, ctx, dy, None, *ctx.needs_input_grad[1:3]), None


def _add_save(ctx, inputs, output):
    _, _, weight, bias, _ = inputs
    _, total, mean, rstd = output
    ctx.save_for_backward(total, weight, bias, mean, rstd)
    ctx.mark_non_differentiable(mean, rstd)
    ctx.set_materialize_grads(False)


def _add_backward(launch, ctx, dy, dtotal, _mean, _rstd):
    if dy is None:  # only the sum was used
        return dtotal, dtotal, None, None, None
    dx, dweight, dbias = _gradients(launch, ctx, dy, dtotal, *ctx.needs_input_grad[2:4])
    return dx, dx, dweight, dbias, None


_layer_norm.register_autograd(_layer_norm_backward, _backward, _save)
_add_layer_norm.register_autograd(_layer_norm_backward, _add_backward, _add_save)


def layer_norm(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    """Return (x - mean) / sqrt(variance + eps) * weight + bias over the last dimension, in fp32, rounded once.

    x [..., h], weight [h] or None and bias [h] or None are bf16, fp16 or fp32. y has x's dtype, and x's order of memory
    where x is dense. x is read in place if its rows are contiguous with one or two strides, else it is copied first.
    Raises SlideError for other dtypes or shapes. It cannot be differentiated twice.
    """
    check_rows("layer_norm", x, None, weight, bias)
    return _layer_norm(x, weight, bias, eps)[0]


def add_layer_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (y, total): total = x + residual, rounded to their dtype, and y = layer_norm(total), in one pass.

    x and residual [..., h] have one shape and dtype. For the rest see `layer_norm`. Both get the same gradient tensor.
    """
    check_rows("add_layer_norm", x, residual, weight, bias)
    y, total, _, _ = _add_layer_norm(x, residual, weight, bias, eps)
    return y, total
