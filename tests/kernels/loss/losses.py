"""The loss of a linear layer with its weight in one piece, and with one whose rows pass by, against fp64."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from references.linear_cross_entropy import linear_cross_entropy as reference

from ds_slide.kernels.loss.linear_cross_entropy import linear_cross_entropy
from ds_slide.kernels.loss.streamed_linear_cross_entropy import streamed_linear_cross_entropy

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Relative to the largest element. 16-bit logits are rounded at up to 4: 2^-9 * 4 each, and their gradients once more.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
STEP = 40  # 101 words: two chunks of 40 and one of 21


OPTIONS = {
    "plain": {},
    "sum": {"reduction": "sum"},
    "ignore_index": {"ignore_index": 5},
    "smoothing": {"label_smoothing": 0.1},
    "z_loss": {"z_loss": 0.02},
    "softcap": {"softcap": 2.0},
    "num_items": {"num_items": 37, "reduction": "sum"},
    "all": {"label_smoothing": 0.2, "z_loss": 0.01, "softcap": 3.0, "num_items": 5},
}


@dataclass
class Case:
    """One problem with fresh inputs, seeded by its shape and options."""

    rows: int = 11
    width: int = 24
    vocabulary: int = 101
    dtype: torch.dtype = torch.float32
    ignored: bool = True
    bias: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def inputs(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        generator = torch.Generator().manual_seed(zlib.crc32(repr(self).encode()))

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator)

        hidden = normal(self.rows, self.width).to(self.dtype)
        weight = (1.5 * normal(self.vocabulary, self.width) / self.width**0.5).to(self.dtype)
        labels = torch.randint(self.vocabulary, (self.rows,), generator=generator)
        if self.ignored:
            labels[::3] = self.options.get("ignore_index", -100)
        bias = normal(self.vocabulary).to(self.dtype).to(DEVICE) if self.bias else None
        return hidden.to(DEVICE), weight.to(DEVICE), labels.to(DEVICE), bias


class Rows:
    """A weight that passes through two buffers, all of them nan while they are not the reader's."""

    def __init__(self, weight: torch.Tensor, step: int = STEP, requires_grad: bool = True) -> None:
        self.weight, self.step = weight.detach(), step
        self.shape, self.dtype, self.requires_grad = weight.shape, weight.dtype, requires_grad
        self.gradient: torch.Tensor | None = None
        self.passes: list[str] = []
        """Those that were made to their end."""

    def _chunks(self) -> Iterator[tuple[int, torch.Tensor]]:
        height, width = self.shape
        buffers = [torch.full((self.step, width), torch.nan, dtype=self.dtype, device=DEVICE) for _ in range(2)]
        for number, first in enumerate(range(0, height, self.step)):
            rows = buffers[number % 2][: min(self.step, height - first)]
            rows.copy_(self.weight[first : first + self.step])
            yield first, rows
            rows.fill_(torch.nan)

    def rows(self) -> Iterator[tuple[int, torch.Tensor]]:
        yield from self._chunks()
        self.passes.append("rows")

    def rows_and_gradients(self) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        assert self.requires_grad
        parts = []
        buffer = torch.empty(self.step, self.shape[1], dtype=self.dtype, device=DEVICE)
        for first, rows in self._chunks():
            gradient = buffer[: rows.shape[0]].fill_(torch.nan)
            yield first, rows, gradient
            parts.append(gradient.clone())
        self.gradient = torch.cat(parts)
        self.passes.append("gradients")


def differentiate_whole(function: Any, case: Case, widen: bool, grad_loss: float = 1.0) -> list[torch.Tensor]:
    """Loss and gradients (hidden, weight and, where there is one, bias)."""
    hidden, weight, labels, bias = case.inputs()
    leaves = [hidden, weight] if bias is None else [hidden, weight, bias]
    leaves = [(leaf.double() if widen else leaf).requires_grad_() for leaf in leaves]
    options = dict(case.options, bias=leaves[2] if case.bias else None)
    loss = function(leaves[0], leaves[1], labels, **options)
    return [loss.detach(), *torch.autograd.grad(loss * grad_loss, leaves)]


def backward(
    result: torch.Tensor, leaves: list[torch.Tensor], upstream: torch.Tensor | None = None, retain_graph: bool = False
) -> list[torch.Tensor]:
    """What a plain backward leaves in `leaves`; unlike torch.autograd.grad it also wants the weight's gradient."""
    for leaf in leaves:
        leaf.grad = None
    result.backward(upstream, retain_graph=retain_graph)
    return [leaf.grad for leaf in leaves if leaf.grad is not None]


def differentiate_streamed(case: Case, step: int = STEP, grad_loss: float = 1.0) -> list[torch.Tensor]:
    """Loss and gradients (hidden, weight and, where there is one, bias) of the streamed loss."""
    hidden, weight, labels, bias = case.inputs()
    rows = Rows(weight, step)
    leaves = [leaf.requires_grad_() for leaf in (hidden, bias) if leaf is not None]
    loss = streamed_linear_cross_entropy(hidden, rows, labels, bias=bias, **case.options)
    gradients = backward(loss * grad_loss, leaves)
    assert rows.passes == ["rows", "gradients"] and rows.gradient is not None
    return [loss.detach(), gradients[0], rows.gradient, *gradients[1:]]


def assert_near(
    found: list[torch.Tensor], expected: list[torch.Tensor], dtype: torch.dtype, scale: float = 0.0
) -> None:
    """Within TOLERANCE of the largest element of each result, or of `scale` where that is larger."""
    assert found[0].dtype == torch.float32 and found[0].ndim == 0
    for name, got, want in zip(("loss", "hidden", "weight", "bias"), found, expected, strict=False):
        assert name == "loss" or got.dtype == dtype
        assert got.shape == want.shape
        # Half the smallest number that differs from zero, where a result is that small.
        floor = 2.0**-25 if got.dtype == torch.float16 else 1e-30
        bound = TOLERANCE[dtype] * max(want.abs().max().item(), scale) + floor
        assert (got.double() - want).abs().max() <= bound, (name, (got.double() - want).abs().max(), bound)


def refused_calls(as_weight: Callable[[torch.Tensor], Any]) -> Iterator[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    """(what the refusal says, arguments, options); `as_weight`: of a tensor, what the loss takes."""
    hidden, tensor, labels, _ = Case().inputs()
    weight = as_weight(tensor)
    yield from [
        ("bfloat16.*float32", (hidden.bfloat16(), weight, labels), {}),
        ("float64", (hidden.double(), as_weight(tensor.double()), labels), {}),
        ("flatten", (hidden[None], weight, labels), {}),
        ("flatten", (hidden, as_weight(tensor[:, :-1]), labels), {}),
        ("int64 labels", (hidden, weight, labels[:-1]), {}),
        ("int64 labels", (hidden, weight, labels.int()), {}),
        ("bias", (hidden, weight, labels), {"bias": tensor[:-1, 0]}),
        ('"none"', (hidden, weight, labels), {"reduction": "none"}),
        ("softcap", (hidden, weight, labels), {"softcap": 0.0}),
        ("label_smoothing", (hidden, weight, labels), {"label_smoothing": 1.5}),
        ("num_items", (hidden, weight, labels), {"num_items": torch.ones(1)}),
    ]


@dataclass(frozen=True)
class Way:
    """One of the two losses."""

    name: str
    function: Callable[..., torch.Tensor]
    as_weight: Callable[[torch.Tensor], Any]
    """Of a tensor, what the loss takes."""
    differentiate: Callable[..., list[torch.Tensor]]
    """(case, grad_loss=1.0) -> loss and gradients: hidden, weight and, where there is one, bias."""

    def compare(self, case: Case, grad_loss: float = 1.0) -> None:
        found = self.differentiate(case, grad_loss=grad_loss)
        assert_near(found, differentiate_whole(reference, case, True, grad_loss), case.dtype)

    def backward(self, loss: torch.Tensor, leaves: list[torch.Tensor], weight: Any) -> list[torch.Tensor]:
        """Gradients of the leaves, and of the weight."""
        if weight.requires_grad and isinstance(weight, torch.Tensor):
            return backward(loss, [*leaves, weight])
        return [*backward(loss, leaves), weight.gradient]


def of_a_tensor(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_()


def of_the_whole(case: Case, grad_loss: float = 1.0) -> list[torch.Tensor]:
    return differentiate_whole(linear_cross_entropy, case, False, grad_loss)


WAYS = {
    "whole": Way("whole", linear_cross_entropy, of_a_tensor, of_the_whole),
    "streamed": Way("streamed", streamed_linear_cross_entropy, Rows, differentiate_streamed),
}
