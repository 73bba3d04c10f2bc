"""Muon: the update of a weight matrix is its momentum, made orthogonal by a Newton-Schulz iteration.

The arithmetic is DeepSpeed's (`deepspeed.runtime.zero.muon`), with fp32 gradients and momentum:

    m = momentum * m + (1 - momentum) * g
    u = momentum * m + (1 - momentum) * g                        Nesterov's, always
    w = (1 - lr * weight_decay) * w - lr * scale * orthogonal(u)

A rule for whole matrices has no step over single elements. `ds_slide.runtime.updates.matrices` runs this one on the
accelerator. Parameters that are not marked for Muon are updated by AdamW.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from ds_slide.optim.adamw import ADAMW, AdamWHyper
from ds_slide.optim.muon_groups import SHORT_DTYPES, most_bytes
from ds_slide.optim.rule import Hyper, StateSpec, UpdateRule, range_problems, require_ranges

Method = Literal["gram", "standard"]
"""DeepSpeed's `ns_method`."""
ScaleRule = Literal["deepspeed", "moonlight"]
"""The value of ``ds_slide.muon_scale``."""

ITERATION = 3.4445, -4.7750, 2.0315
"""X becomes ``(a + b S + c S S) X``, where S is X X^T."""
STEPS = 5
RESTART = 2
"""The iteration in which "gram" computes the product of the matrix anew, so that errors do not add up."""

_A, _B, _C = ITERATION


@dataclass(frozen=True)
class MuonHyper:
    """Hyper-parameters of one update of one parameter group. ``factor``: None, or the factor of a gradient that is the
    orthogonal update already, while the momentum has advanced. Raises SlideConfigError for values outside their
    range."""

    rule: MuonRule = field(compare=False)
    lr: float
    momentum: float
    weight_decay: float
    method: Method
    step: int = 1
    factor: float | None = None
    kernel: str = ""
    two_passes: bool = False

    def __post_init__(self) -> None:
        require_ranges(
            'lr and weight_decay are finite and not negative, momentum is in [0, 1), ns_method is "gram" or "standard"',
            ("lr", self.lr, 0.0 <= self.lr < math.inf),
            ("momentum", self.momentum, 0.0 <= self.momentum < 1.0),
            ("weight_decay", self.weight_decay, 0.0 <= self.weight_decay < math.inf),
            ("ns_method", self.method, self.method in ("gram", "standard")),
        )

    def constants(self, grad_scale: float = 1.0) -> tuple[float, ...]:
        return (grad_scale,)


def orthogonalized(hypers: Sequence[Hyper], factor: float) -> list[Hyper]:
    """Return `hypers` of a step whose gradients have been replaced by Muon's updates, which are multiplied by
    `factor`."""
    return [replace(each, factor=factor) if isinstance(each, MuonHyper) else each for each in hypers]


@dataclass(frozen=True)
class MuonRule(UpdateRule):
    """The rule of a model that Muon trains. `adamw_groups`: parameter groups that AdamW updates. `dtypes`: the data
    type of each method's products. `heads`: the number of heads of the parameters whose heads are orthogonalized one by
    one (`per_head_muon`)."""

    adamw_groups: frozenset[int] = frozenset()
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)
    heads: Mapping[nn.Parameter, int] = field(default_factory=dict)
    method: Method = "gram"
    """The method that a plan counts."""

    def of_group(self, group: int) -> UpdateRule:
        return ADAMW if group in self.adamw_groups else self

    def largest_matrix(self, shapes: Sequence[tuple[nn.Parameter, tuple[int, ...]]]) -> int:
        return max((math.prod(self.matrices(*each).shape[1:]) for each in shapes), default=0)

    def batch_bytes(self, shapes: Sequence[tuple[nn.Parameter, tuple[int, ...]]]) -> int:
        if self.dtypes.get(self.method) not in SHORT_DTYPES:
            return 0
        return most_bytes([self.matrices(*each).shape for each in shapes])

    def product_flop(self, shapes: Sequence[tuple[nn.Parameter, tuple[int, ...]]]) -> int:
        return sum(flop(self.matrices(*each).shape, self.method) for each in shapes)

    def matrices(self, parameter: nn.Parameter, shape: Sequence[int]) -> Matrices:
        """Return what the iteration sees of a parameter of this shape."""
        return matrices_of(shape, self.heads.get(parameter))


def muon_rule(
    adamw_groups: frozenset[int],
    dtypes: Mapping[str, torch.dtype],
    heads: Mapping[nn.Parameter, int],
    method: Method = "gram",
) -> MuonRule:
    """Return the rule of an optimizer with these parameter groups."""
    rule: MuonRule

    def hyper_of(group: Mapping[str, Any], step: int, optimizer: Any) -> Hyper:
        if not group["use_muon"]:
            mode = getattr(optimizer, "adam_w_mode", True)
            return AdamWHyper.from_param_group(group, step=step, adam_w_mode=bool(mode))
        return MuonHyper(
            rule,
            lr=float(group["lr"]),
            momentum=float(group["momentum"]),
            weight_decay=float(group["weight_decay"]),
            method=group["ns_method"],
            step=step,
        )

    def problems(optimizer: Any) -> Iterator[str]:
        yield from range_problems(hyper_of, optimizer)
        if not getattr(getattr(optimizer, "aux_optimizer", None), "fp32_optimizer_states", True):
            yield "optimizer.params.fp32_optimizer_states is false, but DS-Slide keeps its own; remove it"

    rule = MuonRule(
        name="Muon",
        states=(StateSpec("momentum_buffer"),),
        state_dtypes=("fp32", "bf16"),
        hyper_of=hyper_of,
        reference_step=_not_by_elements,
        gpu_step=_not_by_elements,
        problems=problems,
        adamw_groups=adamw_groups,
        dtypes=dtypes,
        heads=heads,
        method=method,
    )
    return rule


def _not_by_elements(*_arguments: Any) -> Any:
    raise AssertionError("Muon updates whole matrices (ds_slide.runtime.updates.matrices)")


# ----------------------------------------------------------------------------------------------------------------------
# Matrices of a parameter, and their orthogonal updates.


class Matrices(NamedTuple):
    """A parameter as [count, rows, columns], and the two sizes that set DeepSpeed's scale of the update."""

    shape: tuple[int, int, int]
    scaled_by: tuple[int, int]

    def together(self, most: int) -> Iterator[tuple[slice, Matrices]]:
        """Yield groups of matrices with at most `most` elements each, or of one matrix, and each one's place in the
        parameter."""
        count, one = self.shape[0], math.prod(self.shape[1:])
        number = max(1, most // one)
        for first in range(0, count, number):
            last = min(first + number, count)
            yield slice(first * one, last * one), self._replace(shape=(last - first, *self.shape[1:]))

    def scale(self, rule: ScaleRule) -> float:
        """Return the factor of the orthogonal update. "deepspeed": sqrt(max(1, rows / columns)). "moonlight":
        0.2 * sqrt(max(rows, columns))."""
        if rule == "moonlight":
            # 0.2: the root mean square of AdamW's update, which Moonlight (arXiv 2502.16982) gives to Muon's.
            return 0.2 * math.sqrt(max(self.shape[1:]))
        rows, columns = self.scaled_by
        return math.sqrt(rows / columns) if rows > columns else 1.0


def matrices_of(shape: Sequence[int], heads: int | None = None) -> Matrices:
    """Return the matrices of a parameter with two dimensions or more: each head of a projection, each expert of a 3-D
    tensor, or a filter [out, in, height, width] as [out, in * height * width]. DeepSpeed scales the last by its height
    and width."""
    rows, columns = shape[-2:]
    if heads:
        return Matrices((heads, rows // heads, columns), (rows // heads, columns))
    if len(shape) == 4:
        return Matrices((1, shape[0], math.prod(shape[1:])), (rows, columns))
    return Matrices((math.prod(shape[:-2]), rows, columns), (rows, columns))


def orthogonal(update: torch.Tensor, method: Method, dtype: torch.dtype) -> torch.Tensor:
    """Return ``update``, fp32 [count, rows, columns], with singular values of about 1, in ``dtype``, which the products
    are in. "gram" iterates on the square of the matrix' smaller side and costs half of "standard" where the sides
    differ by a factor of five. Like in DeepSpeed, "standard" divides by the norm in ``dtype``, "gram" in fp32."""
    tall = update.size(-2) > update.size(-1)
    x = update.mT if tall else update
    if method == "standard":
        x = x.to(dtype)
    norm = x.norm(dim=(-2, -1), keepdim=True) + 1e-7
    x = iterated(torch.div(x, norm, out=torch.empty_like(x, dtype=dtype)), method)
    return x.mT if tall else x


def flop(shape: tuple[int, int, int], method: Method) -> int:
    """Return the FLOP of the iterations over matrices [count, rows, columns]."""
    count, short, long = shape[0], min(shape[1:]), max(shape[1:])
    whole, square = 2 * short * short * long, 2 * short**3
    if method == "gram" and long > short:
        # Products with the matrix itself: two squares, and the products before and after them. Products of two squares
        # of its smaller side, in five iterations: z, the product, the next square.
        return count * (4 * whole + (5 + 3 + 6) * square)
    return count * 5 * (2 * whole + square)


def iterated(x: torch.Tensor, method: Method) -> torch.Tensor:
    """Return the products of the five iterations from ``x`` [count, rows, columns], whose norms are 1 and which is not
    tall. "gram" is for wide matrices, as in DeepSpeed."""
    return _by_gram(x) if method == "gram" and x.size(-1) > x.size(-2) else _by_products(x)


def _by_products(x: torch.Tensor) -> torch.Tensor:
    for _ in range(STEPS):
        square = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=_B, alpha=_C), x, beta=_A)
    return x


def _by_gram(x: torch.Tensor) -> torch.Tensor:
    gram, product = x @ x.mT, None
    for step in range(STEPS):
        if step == RESTART:
            assert product is not None
            x = product @ x
            gram, product = x @ x.mT, None
        z = torch.baddbmm(gram, gram, gram, beta=_B, alpha=_C)
        if product is None:
            product = z.clone()
            product.diagonal(dim1=-2, dim2=-1).add_(_A)
        else:
            product = torch.baddbmm(product, z, product, beta=_A)
        if step + 1 not in (RESTART, STEPS):
            half = torch.baddbmm(gram, z, gram, beta=_A)
            gram = torch.baddbmm(half, z, half, beta=_A)
    assert product is not None
    return product @ x
