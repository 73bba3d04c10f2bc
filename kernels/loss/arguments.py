"""Checks of the arguments of losses over a linear layer. Every error names the function and the remedy."""

from __future__ import annotations

from typing import Protocol

import torch

from ds_slide.errors import SlideConfigError
from ds_slide.kernels.dtypes import KERNEL_DTYPES

MEAN, SUM, DIVIDE = 0, 1, 2
"""The divisor of the sum over rows: the number of counted rows, none, or a given number."""


class Matrix(Protocol):
    """A weight in the checks: a tensor, or a weight that is elsewhere."""

    @property
    def shape(self) -> torch.Size: ...
    @property
    def dtype(self) -> torch.dtype: ...


def check_linear(function: str, hidden: torch.Tensor, weight: Matrix, bias: torch.Tensor | None) -> None:
    """Raise SlideConfigError for dtypes that differ or have no kernels, and for a bias without one element per word."""
    if hidden.dtype != weight.dtype or (bias is not None and bias.dtype != weight.dtype):
        shown = "" if bias is None else f", bias in {bias.dtype}"
        raise SlideConfigError(
            f"{function} got hidden in {hidden.dtype} and weight in {weight.dtype}{shown}: cast to one dtype."
        )
    if weight.dtype not in KERNEL_DTYPES:
        raise SlideConfigError(f"{function} cannot use {weight.dtype}: cast to bfloat16, float16 or float32.")
    if bias is not None and tuple(bias.shape) != tuple(weight.shape[:1]):
        raise SlideConfigError(
            f"{function} needs a bias [{weight.shape[0]}], not {tuple(bias.shape)}: one element a word."
        )


def check_loss(
    function: str, hidden: torch.Tensor, weight: Matrix, labels: torch.Tensor, bias: torch.Tensor | None
) -> None:
    """Raise SlideConfigError unless hidden is [n, h], weight [v, h], labels int64 [n] and bias [v] or None."""
    if hidden.ndim != 2 or len(weight.shape) != 2 or hidden.shape[1] != weight.shape[1] or not weight.shape[0]:
        raise SlideConfigError(
            f"{function} needs hidden [n, h] and weight [v, h] with v > 0, not {tuple(hidden.shape)} and "
            f"{tuple(weight.shape)}: flatten the tokens into rows."
        )
    check_linear(function, hidden, weight, bias)
    if labels.shape != hidden.shape[:1] or labels.dtype != torch.int64:
        raise SlideConfigError(
            f"{function} needs int64 labels [{hidden.shape[0]}], not {labels.dtype} {tuple(labels.shape)}: "
            "flatten and cast them as the rows of hidden."
        )


def check_options(function: str, reduction: str, label_smoothing: float, softcap: float | None) -> None:
    """Raise SlideConfigError for a reduction other than "mean" and "sum", and for numbers out of their range."""
    if reduction not in ("mean", "sum"):
        raise SlideConfigError(f'{function} has no reduction "{reduction}": use "mean" or "sum".')
    if softcap is not None and not softcap > 0:
        raise SlideConfigError(f"{function} got a softcap of {softcap}: give a positive number, or None.")
    if not 0.0 <= label_smoothing <= 1.0:
        raise SlideConfigError(f"{function} got label_smoothing {label_smoothing}: give one within [0, 1].")


def divide_by(
    function: str, reduction: str, num_items: int | torch.Tensor | None, device: torch.device
) -> tuple[int, torch.Tensor | None, float]:
    """Return MEAN, SUM or DIVIDE, and for DIVIDE the divisor: a 0-d tensor on `device`, or else the number."""
    if isinstance(num_items, torch.Tensor):
        if num_items.ndim:
            shape = tuple(num_items.shape)
            raise SlideConfigError(f"{function} got num_items {shape}: give an int or a 0-d tensor.")
        return DIVIDE, num_items.detach().to(device, non_blocking=True), 1.0
    if num_items is not None:
        return DIVIDE, None, float(num_items)
    return (MEAN if reduction == "mean" else SUM), None, 1.0
