"""Experts whose weights come in parts: tokens are sorted by expert, and a few experts at a time compute their tokens.

Each part is computed by the module's own function, as `experts_implementation` of transformers chooses it: with the
rows of its tokens, each routed to one expert with weight one. Routing weights and the sum over a token's experts follow
in the way of that implementation. So every product and sum is the one that the whole module computes.

The graph keeps the module's input and the routing, and no weight. Backward fetches the experts again, computes each
part again and goes back through it at once.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.autograd.function import once_differentiable

from ds_slide.model.experts import Experts
from ds_slide.patching.kinds import Forward, ForwardPatch, autocast_dtype, replace_forward


class ExpertSource(Protocol):
    """The experts of one module."""

    @property
    def at_once(self) -> int:
        """The most experts in a part."""

    def passes(self, experts: Sequence[int]) -> Iterator[dict[str, torch.Tensor]]:
        """Yield the parameters of the next `at_once` of `experts` (ascending), by attribute of the module."""


def stream_experts(experts: Experts, source: ExpertSource) -> ForwardPatch:
    """Make the module of `experts` compute with `source` instead of its 3-D parameters."""
    return replace_forward(experts.module, "experts", lambda original: _streamed(original, experts, source))


def _streamed(original: Forward, experts: Experts, source: ExpertSource) -> Forward:
    @torch.compiler.disable
    def forward(self: Any, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        others = {name: p for name, p in self._parameters.items() if name not in experts.names and p is not None}
        routing = _Routing.of(index, self.num_experts)
        parts = _Parts(self, original, source, tuple(others), routing, autocast_dtype(hidden.device.type))
        output: torch.Tensor = _Experts.apply(parts, hidden, weights, routing.order, routing.ranks, *others.values())
        return output

    return forward


@dataclass(frozen=True)
class _Routing:
    """Pairs of a token and one of its experts, sorted by expert. The host knows the counts."""

    experts: list[int]
    """The experts that have tokens, ascending."""
    counts: list[int]
    """The number of tokens of each of them."""
    order: torch.Tensor
    """The sorted pairs [tokens * k], as token * k + place."""
    ranks: torch.Tensor
    """For each sorted pair, the place of its expert in `experts`."""

    @classmethod
    def of(cls, index: torch.Tensor, num_experts: int) -> _Routing:
        """Return the routing of `index` [tokens, k]."""
        of_pair, order = torch.sort(index.reshape(-1))
        counts = torch.bincount(of_pair, minlength=num_experts)
        ranks = ((counts > 0).cumsum(0) - 1)[of_pair]
        on_host = counts.tolist()  # the only wait for the GPU
        used = [expert for expert, count in enumerate(on_host) if count]
        return cls(used, [on_host[expert] for expert in used], order, ranks)


@dataclass(frozen=True)
class _Part:
    """Sorted pairs `rows`, and the number of their experts: `experts` in `_Routing.experts`."""

    rows: slice
    experts: slice


@dataclass(frozen=True)
class _Parts:
    """One call of an experts module. `others`: names of the module's parameters that are in the block's slot."""

    module: Any
    function: Forward
    source: ExpertSource
    others: tuple[str, ...]
    routing: _Routing
    autocast: torch.dtype | None

    @property
    def adds_in_order(self) -> bool:
        """Whether a token's experts are added one after the other, and not in one sum. The loop of transformers does
        that."""
        return self.module.config._experts_implementation in ("eager", None)

    def __iter__(self) -> Iterator[_Part]:
        of_each, step = self.of_each, self.source.at_once
        for first in range(0, len(of_each), step):
            last = min(first + step, len(of_each))
            yield _Part(slice(of_each[first].start, of_each[last - 1].stop), slice(first, last))

    @property
    def of_each(self) -> list[slice]:
        """The sorted pairs of each expert."""
        bounds = [0, *itertools.accumulate(self.routing.counts)]
        return [slice(*each) for each in itertools.pairwise(bounds)]

    def computed(
        self, part: _Part, parameters: Mapping[str, torch.Tensor], others: Sequence[torch.Tensor], rows: torch.Tensor,
        ranks: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        """Return the experts' results [n, h] for `rows` [n, h]."""
        here = copy.copy(self.module)
        here.__dict__.pop("forward", None)
        used = torch.tensor(self.routing.experts[part.experts], device=rows.device) if others else None
        here._parameters = {**parameters, **{name: each[used] for name, each in zip(self.others, others, strict=True)}}
        here.num_experts = part.experts.stop - part.experts.start
        local = (ranks[part.rows] - part.experts.start)[:, None]
        result: torch.Tensor = self.function(here, rows, local, torch.ones_like(local, dtype=rows.dtype))
        return result

    def context(self) -> contextlib.AbstractContextManager[Any]:
        """The autocast of the forward, for a backward."""
        kind = self.routing.order.device.type
        return torch.autocast(kind, dtype=self.autocast) if self.autocast else contextlib.nullcontext()


class _Experts(torch.autograd.Function):
    """`parts`, hidden [t, h], routing weights [t, k], sorted pairs and their ranks [t * k], parameters in the slot ->
    [t, h]. These parameters are saved, so that the engine brings them back for backward."""

    @staticmethod
    def forward(
        ctx: Any,
        parts: _Parts,
        hidden: torch.Tensor,
        weights: torch.Tensor,
        order: torch.Tensor,
        ranks: torch.Tensor,
        *others: torch.Tensor,
    ) -> torch.Tensor:
        ctx.parts = parts
        ctx.save_for_backward(hidden, weights, order, ranks, *others)
        tokens, flat = order // weights.shape[-1], weights.reshape(-1)
        added = torch.zeros_like(hidden)
        weighted: torch.Tensor | None = None
        with contextlib.closing(parts.source.passes(parts.routing.experts)) as passes:  # type: ignore[type-var]
            for part, parameters in zip(parts, passes, strict=True):
                where = tokens[part.rows]
                result = parts.computed(part, parameters, others, hidden[where], ranks)
                result = result * flat[order[part.rows], None]
                if parts.adds_in_order:
                    result = result.to(hidden.dtype)
                    for pairs in parts.of_each[part.experts]:  # no token has an expert twice: the order is fixed
                        added.index_add_(
                            0, tokens[pairs], result[pairs.start - part.rows.start :][: len(tokens[pairs])]
                        )
                    continue
                weighted = result.new_empty(len(order), result.shape[-1]) if weighted is None else weighted
                weighted[order[part.rows]] = result
        if weighted is None:
            return added
        return weighted.view(*weights.shape, -1).sum(dim=1).to(hidden.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        parts: _Parts = ctx.parts
        hidden, weights, order, ranks, *others = ctx.saved_tensors
        tokens, flat = order // weights.shape[-1], weights.reshape(-1)
        of_weights, of_rows = torch.zeros_like(flat), hidden.new_empty(len(order), hidden.shape[-1])
        with contextlib.closing(parts.source.passes(parts.routing.experts)) as passes:  # type: ignore[type-var]
            for part, parameters in zip(parts, passes, strict=True):
                where, pairs = tokens[part.rows], order[part.rows]
                rows, own = hidden[where].requires_grad_(), flat[pairs].requires_grad_()
                with torch.enable_grad(), parts.context():
                    result = parts.computed(part, parameters, others, rows, ranks) * own[:, None]
                    result = result.to(hidden.dtype) if parts.adds_in_order else result
                of_rows[part.rows], of_weights[pairs] = torch.autograd.grad(
                    result, (rows, own), gradient[where].to(result.dtype)
                )
        of_hidden = torch.zeros_like(hidden)
        if parts.adds_in_order:
            # Autograd adds the gradients of the loop's steps, the last one first.
            for pairs in reversed(parts.of_each):
                of_hidden.index_add_(0, tokens[pairs], of_rows[pairs])
        else:
            of_hidden.index_put_((tokens,), of_rows, accumulate=True)
        return None, of_hidden, of_weights.view_as(weights), None, None, *(None for _ in others)
