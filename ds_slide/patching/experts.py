"""Experts whose weights come in parts: tokens are sorted by expert, and a few experts at a time compute their tokens.

Each part is computed by the module's own function, as `experts_implementation` of transformers chooses it: with the
rows of its tokens, each routed to one expert with weight one. Routing weights and the sum over a token's experts follow
in the way of that implementation. So every product and sum is the one that the whole module computes.

The graph keeps the module's input and the routing, and no weight. Backward fetches the experts again, computes each
part again and goes back through it at once.

PEFT's `target_parameters` adds the product of two factors to a whole 3-D parameter. Here it is added to each part, by
PEFT's own operation, and backward collects the gradients of the factors.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch.autograd.function import once_differentiable

from ds_slide.errors import SlideError
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
    """Make the module of `experts` ask `source` for the experts that its tokens are routed to. PEFT's adapters read all
    experts before the module is called, so the outermost of them asks."""
    own = (*experts.adapters, experts.module)[0]

    def build(original: Forward) -> Forward:
        def forward(self: Any, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> Any:
            # A deep copy has experts of its own, and the engine leaves nothing out where code may be compiled.
            if own is self and not torch.compiler.is_compiling():
                source.bring(index)
            return original(self, hidden, index, weights)

        return forward

    return replace_forward(own, "experts", build)


def stream_experts(experts: Experts, source: ExpertSource) -> Iterator[ForwardPatch]:
    """Make the module of `experts` compute with `source` instead of its 3-D parameters, and its adapters leave their
    addition to it."""
    called: list[tuple[Any, str]] = []
    yield replace_forward(experts.module, "experts", lambda original: _streamed(original, experts, source, called))
    for wrapper in experts.adapters:
        yield replace_forward(wrapper, "experts", functools.partial(_left_to_experts, own=wrapper, called=called))


def _left_to_experts(original: Forward, own: Any, called: list[tuple[Any, str]]) -> Forward:
    """Return a forward of PEFT's wrapper that is in `called`, with its adapter, while the wrapped module computes."""

    @torch.compiler.disable
    def forward(self: Any, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        active = [name for name in self.active_adapters if name in self.lora_A]
        if self is not own or self.disable_adapters or self.merged or kwargs.get("adapter_names") or not active:
            return original(self, hidden, *args, **kwargs)
        if len(active) > 1:
            raise SlideError(
                f"{len(active)} adapters of {self.parameter_name} are active, but experts that move in parts take one "
                "at a time; activate one, or set ds_slide.experts to 0"
            )
        called.append((self, active[0]))
        try:
            return self.base_layer(hidden, *args, **kwargs)
        finally:
            called.pop()

    return forward


def _streamed(original: Forward, experts: Experts, source: ExpertSource, called: Sequence[tuple[Any, str]]) -> Forward:
    own: Any = experts.module

    @torch.compiler.disable
    def forward(self: Any, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> Any:
        if self is not own:  # a deep copy, with experts of its own
            return original(self, hidden, index, weights)
        present = {name: p for name, p in self._parameters.items() if p is not None}  # a look-up would gather it
        others = {name: p for name, p in present.items() if name not in experts.names}
        implementation = self.config._experts_implementation or "eager"
        in_order = implementation == "eager"
        # Gradients of an expert's weights are sums over its tokens, and each implementation has an order: in the loop
        # the tokens of the first places come first.
        pairs = (index.t() if in_order else index).reshape(-1)
        of_pair, order = torch.sort(pairs, stable=implementation != "grouped_mm")
        if in_order:
            order = order % len(index) * index.shape[-1] + order // len(index)
        counts = torch.bincount(of_pair, minlength=self.num_experts)
        ranks = ((counts > 0).cumsum(0) - 1)[of_pair]
        on_host = counts.tolist()  # the only wait for the GPU
        used = [expert for expert, count in enumerate(on_host) if count]
        bounds = [0, *itertools.accumulate(on_host[expert] for expert in used)]
        autocast = autocast_dtype(hidden.device.type)
        factors, scalings = [], {}
        for wrapper, adapter in called:
            here, name = copy.copy(wrapper), wrapper.parameter_name
            here.get_param = functools.partial(present.__getitem__, name)  # its data type alone counts
            *both, scalings[name] = here.get_delta_factors(adapter)
            factors += both
        call = _Call(self, original, source, tuple(others), scalings, used, bounds, implementation, autocast)
        return _Experts.apply(call, hidden, weights, order, ranks, *factors, *others.values())

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
    scalings: dict[str, float]
    """Of the products that are added to the experts' parameters, by name."""
    experts: list[int]
    """The experts that have tokens, ascending."""
    bounds: list[int]
    """The first pair of each of them, and the number of all pairs."""
    implementation: str
    """Of the experts in transformers."""
    autocast: torch.dtype | None

    @property
    def in_order(self) -> bool:
        """Whether a token's experts are added one after the other, as in the loop of transformers. Its other
        implementations add them in one sum."""
        return self.implementation == "eager"

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

    def chosen(self, part: _Part, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the slices of `tensors` ([experts, ...]) that a part's experts have."""
        if not tensors:
            return []
        used = torch.tensor(self.experts[part.experts], device=tensors[0].device)
        return [selected(each, used) for each in tensors]

    def computed(
        self,
        part: _Part,
        parameters: Mapping[str, torch.Tensor],
        given: _Given,
        rows: torch.Tensor,
        factors: Sequence[torch.Tensor],
    ) -> torch.Tensor:
        """Return the results [n, h] of a part's experts for the rows [n, h] of its pairs. `factors`: of a part."""
        here = copy.copy(self.module)
        here.__dict__.pop("forward", None)
        here._parameters = {**parameters, **dict(zip(self.others, self.chosen(part, given.others), strict=True))}
        for (name, scaling), left, right in zip(self.scalings.items(), factors[::2], factors[1::2], strict=True):
            with torch.autocast(rows.device.type, enabled=False):  # as in PEFT
                here._parameters[name] = torch.baddbmm(parameters[name], left, right, alpha=scaling)
        here.num_experts = part.experts.stop - part.experts.start
        index = given.ranks[part.pairs] - part.experts.start
        ones = torch.ones_like(index, dtype=rows.dtype)[:, None]
        after = None
        if factors and self.implementation == "grouped_mm" and not rows.is_cuda:
            # It sorts the rows once more. On a CPU with AVX-512 that sort exchanges equal numbers, and gradients of
            # weights would be sums in another order than in the whole module.
            after = torch.sort(index)[1]
            rows = rows[after.argsort()]
        result: torch.Tensor = self.function(here, rows, index[:, None], ones)
        return result if after is None else result[after]

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
    factors: tuple[torch.Tensor, ...]
    """Two for each of `_Call.scalings`, [experts, ..., rank] and [experts, rank, ...]."""
    others: tuple[torch.Tensor, ...]
    """The module's parameters in the block's slot."""

    @classmethod
    def of(cls, call: _Call, tensors: Sequence[torch.Tensor]) -> _Given:
        (hidden, weights, order, ranks), rest = tensors[:4], tuple(tensors[4:])
        count = 2 * len(call.scalings)
        return cls(hidden, weights, order, ranks, rest[:count], rest[count:])

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
            output = _output(call, _Given.of(call, tensors))
        if results is not None:
            results.put(output)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        call: _Call = ctx.call
        given = _Given.of(call, ctx.saved_tensors)
        hidden, tokens, flat = given.hidden, given.tokens, given.weights.reshape(-1)
        of_weights, of_rows = torch.zeros_like(flat), hidden.new_empty(len(tokens), hidden.shape[-1])
        of_factors = [torch.zeros_like(each) for each in given.factors]
        with call.parts() as parts:
            for part, parameters in parts:
                where, pairs = tokens[part.pairs], given.order[part.pairs]
                rows, own = hidden[where].requires_grad_(), flat[pairs].requires_grad_()
                factors = [each.requires_grad_() for each in call.chosen(part, given.factors)]
                with torch.enable_grad(), call.in_backward(hidden.device.type):
                    result = call.computed(part, parameters, given, rows, factors) * own[:, None]
                    result = result.to(hidden.dtype) if call.in_order else result
                of_rows[part.pairs], of_weights[pairs], *of_part = torch.autograd.grad(
                    result, (rows, own, *factors), gradient[where].to(result.dtype)
                )
                for whole, each in zip(of_factors, of_part, strict=True):
                    whole[call.experts[part.experts]] = each
        of_hidden = torch.zeros_like(hidden)
        if call.in_order:
            # Autograd adds the gradients of the loop's steps, the last one first.
            for pairs in reversed(call.of_each()):
                of_hidden.index_add_(0, tokens[pairs], of_rows[pairs])
        else:
            of_hidden.index_put_((tokens,), of_rows, accumulate=True)
        of_others = [None for _ in given.others]
        return None, of_hidden, of_weights.view_as(given.weights), None, None, *of_factors, *of_others


def selected(whole: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Return `whole[places]`, with its dimensions in memory in the order of `whole`.

    Torch multiplies a transposed matrix with another order of sums, on a CPU without AVX-512 at least. In PEFT's
    factors the experts can be innermost, so that no matrix is contiguous or transposed. A copy of one expert alone
    would be: so it has room for two.
    """
    order = sorted(range(whole.dim()), key=whole.stride, reverse=True)
    copied = places if len(places) > 1 else places.repeat(2)
    picked = whole.permute(order).index_select(order.index(0), copied)
    return picked.permute([order.index(dim) for dim in range(whole.dim())])[: len(places)]


def _output(call: _Call, given: _Given) -> torch.Tensor:
    """Return the sum [t, h] over each token's experts, times their routing weights."""
    hidden, tokens, flat = given.hidden, given.tokens, given.weights.reshape(-1)
    added, weighted = torch.zeros_like(hidden), None
    with call.parts() as parts:
        for part, parameters in parts:
            rows, pairs = hidden[tokens[part.pairs]], given.order[part.pairs]
            factors = call.chosen(part, given.factors)
            result = call.computed(part, parameters, given, rows, factors) * flat[pairs, None]
            if call.in_order:
                # A token has an expert once, so that the order of these sums is fixed.
                for each in call.of_each(part):
                    start, stop = each.start - part.pairs.start, each.stop - part.pairs.start
                    added.index_add_(0, tokens[each], result[start:stop].to(hidden.dtype))
            else:
                weighted = result.new_empty(len(tokens), hidden.shape[-1]) if weighted is None else weighted
                weighted[pairs] = result
    return added if weighted is None else weighted.view(*given.weights.shape, -1).sum(dim=1).to(hidden.dtype)
