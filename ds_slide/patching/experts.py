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
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch.autograd.function import once_differentiable

from ds_slide.model.experts import Experts
from ds_slide.patching.kinds import Forward, ForwardPatch, autocast_dtype, replace_forward


class Results(Protocol):
    """The results that a call of a block keeps for its recomputations."""

    def take(self) -> torch.Tensor | None:
        """Return the next result; None where it is still to be computed."""

    def put(self, result: torch.Tensor) -> None:
        """Go on to the next result, which is `result`."""


class ExpertSource(Protocol):
    """The experts of one module."""

    @property
    def results(self) -> Results | None:
        """The results of the block's call under way, if it may be recomputed."""

    @property
    def at_once(self) -> int:
        """The most experts in a part."""

    def passes(self, experts: Sequence[int]) -> Generator[dict[str, torch.Tensor]]:
        """Yield the parameters of the next `at_once` of `experts` (ascending), by attribute of the module."""


class SlotExperts(Protocol):
    """The experts of one module, whose block may have been fetched without them."""

    def bring(self, index: torch.Tensor) -> None:
        """Fetch the experts in `index` [tokens, k] that are not there."""


def bring_experts(experts: Experts, source: SlotExperts) -> ForwardPatch:
    """Make the module of `experts` ask `source` for the experts that its tokens are routed to."""

    def build(original: Forward) -> Forward:
        def forward(self: Any, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> Any:
            # A deep copy has experts of its own, and the engine leaves nothing out where code may be compiled.
            if experts.module is self and not torch.compiler.is_compiling():
                source.bring(index)
            return original(self, hidden, index, weights)

        return forward

    return replace_forward(experts.module, "experts", build)


def stream_experts(experts: Experts, source: ExpertSource) -> ForwardPatch:
    """Make the module of `experts` compute with `source` instead of its 3-D parameters."""
    return replace_forward(experts.module, "experts", lambda original: _streamed(original, experts, source))


def _streamed(original: Forward, experts: Experts, source: ExpertSource) -> Forward:
    own: Any = experts.module

    @torch.compiler.disable
    def forward(self: Any, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> Any:
        if self is not own:  # a deep copy, with experts of its own
            return original(self, hidden, index, weights)
        others = {name: p for name, p in self._parameters.items() if name not in experts.names and p is not None}
        of_pair, order = torch.sort(index.reshape(-1))
        counts = torch.bincount(of_pair, minlength=self.num_experts)
        ranks = ((counts > 0).cumsum(0) - 1)[of_pair]
        on_host = counts.tolist()  # the only wait for the GPU
        used = [expert for expert, count in enumerate(on_host) if count]
        bounds = [0, *itertools.accumulate(on_host[expert] for expert in used)]
        # The loop of transformers adds a token's experts one after the other, its other implementations in one sum.
        in_order = self.config._experts_implementation in (None, "eager")
        call = _Call(self, original, source, tuple(others), used, bounds, in_order, autocast_dtype(hidden.device.type))
        return _Experts.apply(call, hidden, weights, order, ranks, *others.values())

    return forward


@dataclass(frozen=True)
class _Part:
    """Places in `_Call.experts`, and the pairs of these experts."""

    experts: slice
    pairs: slice


@dataclass(frozen=True)
class _Call:
    """One call of an experts module. A pair is a token with one of its experts; pairs are sorted by expert."""

    module: Any
    function: Forward
    source: ExpertSource
    others: tuple[str, ...]
    """Names of the module's parameters that are in the block's slot."""
    experts: list[int]
    """The experts that have tokens, ascending."""
    bounds: list[int]
    """The first pair of each of them, and the number of all pairs."""
    in_order: bool
    """Whether a token's experts are added one after the other."""
    autocast: torch.dtype | None

    def of_each(self, part: _Part | None = None) -> list[slice]:
        """Return the pairs of each expert of a part, or of all."""
        each = [slice(*both) for both in itertools.pairwise(self.bounds)]
        return each if part is None else each[part.experts]

    @contextlib.contextmanager
    def parts(self) -> Iterator[Iterator[tuple[_Part, dict[str, torch.Tensor]]]]:
        """A context with the parts and their parameters, which are on the GPU until the next part is asked for."""
        step, last = self.source.at_once, len(self.experts)
        chosen = [slice(first, min(first + step, last)) for first in range(0, last, step)]
        parts = [_Part(each, slice(self.bounds[each.start], self.bounds[each.stop])) for each in chosen]
        with contextlib.closing(self.source.passes(self.experts)) as passes:
            yield zip(parts, passes, strict=True)

    def computed(
        self, part: _Part, parameters: Mapping[str, torch.Tensor], given: _Given, rows: torch.Tensor
    ) -> torch.Tensor:
        """Return the results [n, h] of a part's experts for the rows [n, h] of its pairs."""
        here = copy.copy(self.module)
        here.__dict__.pop("forward", None)
        others = dict(zip(self.others, given.others, strict=True))
        used = torch.tensor(self.experts[part.experts], device=rows.device) if others else None
        here._parameters = {**parameters, **{name: each[used] for name, each in others.items()}}
        here.num_experts = part.experts.stop - part.experts.start
        index = (given.ranks[part.pairs] - part.experts.start)[:, None]
        result: torch.Tensor = self.function(here, rows, index, torch.ones_like(index, dtype=rows.dtype))
        return result

    def in_backward(self, device: str) -> contextlib.AbstractContextManager[Any]:
        """The autocast of the forward."""
        return torch.autocast(device, dtype=self.autocast or torch.bfloat16, enabled=self.autocast is not None)


class _Given(NamedTuple):
    """The tensors of a call."""

    hidden: torch.Tensor
    """[t, h]."""
    weights: torch.Tensor
    """Routing weights [t, k]."""
    order: torch.Tensor
    """The sorted pairs [t * k], each as token * k + place."""
    ranks: torch.Tensor
    """The place of each pair's expert in `_Call.experts`, [t * k]."""
    others: tuple[torch.Tensor, ...]
    """The module's parameters in the block's slot."""

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> _Given:
        hidden, weights, order, ranks, *others = tensors
        return cls(hidden, weights, order, ranks, tuple(others))

    @property
    def tokens(self) -> torch.Tensor:
        """The token of each pair."""
        return self.order // self.weights.shape[-1]


class _Experts(torch.autograd.Function):
    """A call and its tensors -> [t, h]. They are all saved. So the engine brings the parameters back for backward."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.call = call
        ctx.save_for_backward(*tensors)
        results = call.source.results
        output = None if results is None else results.take()
        if output is None:
            output = _output(call, _Given.of(tensors))
        if results is not None:
            results.put(output)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        call: _Call = ctx.call
        given = _Given.of(ctx.saved_tensors)
        hidden, tokens, flat = given.hidden, given.tokens, given.weights.reshape(-1)
        of_weights, of_rows = torch.zeros_like(flat), hidden.new_empty(len(tokens), hidden.shape[-1])
        with call.parts() as parts:
            for part, parameters in parts:
                where, pairs = tokens[part.pairs], given.order[part.pairs]
                rows, own = hidden[where].requires_grad_(), flat[pairs].requires_grad_()
                with torch.enable_grad(), call.in_backward(hidden.device.type):
                    result = call.computed(part, parameters, given, rows) * own[:, None]
                    result = result.to(hidden.dtype) if call.in_order else result
                of_rows[part.pairs], of_weights[pairs] = torch.autograd.grad(
                    result, (rows, own), gradient[where].to(result.dtype)
                )
        of_hidden = torch.zeros_like(hidden)
        if call.in_order:
            # Autograd adds the gradients of the loop's steps, the last one first.
            for pairs in reversed(call.of_each()):
                of_hidden.index_add_(0, tokens[pairs], of_rows[pairs])
        else:
            of_hidden.index_put_((tokens,), of_rows, accumulate=True)
        return None, of_hidden, of_weights.view_as(given.weights), None, None, *(None for _ in given.others)


def _output(call: _Call, given: _Given) -> torch.Tensor:
    """Return the sum [t, h] over each token's experts, times their routing weights."""
    hidden, tokens, flat = given.hidden, given.tokens, given.weights.reshape(-1)
    added, weighted = torch.zeros_like(hidden), None
    with call.parts() as parts:
        for part, parameters in parts:
            rows, pairs = hidden[tokens[part.pairs]], given.order[part.pairs]
            result = call.computed(part, parameters, given, rows) * flat[pairs, None]
            if call.in_order:
                # A token has an expert once, so that the order of these sums is fixed.
                for each in call.of_each(part):
                    start, stop = each.start - part.pairs.start, each.stop - part.pairs.start
                    added.index_add_(0, tokens[each], result[start:stop].to(hidden.dtype))
            else:
                weighted = result.new_empty(len(tokens), hidden.shape[-1]) if weighted is None else weighted
                weighted[pairs] = result
    return added if weighted is None else weighted.view(*given.weights.shape, -1).sum(dim=1).to(hidden.dtype)
