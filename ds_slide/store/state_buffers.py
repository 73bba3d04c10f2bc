"""The state buffers of a unit: flat arrays that each hold one state of all its parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ds_slide.optim.low_precision import StateFormat
from ds_slide.optim.rule import StateSpec, UpdateRule

REMAINDER_DTYPE = {torch.bfloat16: torch.int16, torch.float16: torch.float32, torch.float32: None, torch.uint8: None}
"""The data type of the state buffer that completes a weight to its fp32 master, by the weight's dtype. A unit of bytes
has frozen weights alone."""


@dataclass(frozen=True)
class StateBufferSpec:
    """One state buffer beside the weights. `elements_per_item`: parameters that one item stands for (scales: a group).
    `state`: the state of the update rule whose values it holds; None for a remainder and for scales."""

    name: str
    dtype: torch.dtype
    elements_per_item: int = 1
    state: StateSpec | None = None

    def items(self, numel: int) -> int:
        """Items for `numel` parameters."""
        return -(-numel // self.elements_per_item)

    def cut(self, span: slice) -> slice:
        """The items of the parameters `span`, which starts at a whole item."""
        return slice(span.start // self.elements_per_item, self.items(span.stop))

    def nbytes(self, numel: int) -> int:
        return self.items(numel) * self.dtype.itemsize


def optimizer_buffers(weight: torch.dtype, rule: UpdateRule, stored: StateFormat) -> tuple[StateBufferSpec, ...]:
    """Return the state buffers beside weight and gradient. `weight`: dtype of the weights. `stored`: format of the
    states of `rule`."""
    remainder = REMAINDER_DTYPE[weight]
    state_buffers = [] if remainder is None else [StateBufferSpec("remainder", remainder)]
    state_buffers += [StateBufferSpec(state.name, stored.dtype, state=state) for state in rule.states]
    if stored.has_scales:
        state_buffers += [StateBufferSpec(scales_of(state.name), torch.float32, stored.group) for state in rule.states]
    return tuple(state_buffers)


def scales_of(state: str) -> str:
    """The name of the state buffer of a state's scales."""
    return f"{state}_scale"


def optimizer_bytes(state_buffers: Sequence[StateBufferSpec], numel: int) -> int:
    """Bytes of all optimizer state buffers for `numel` parameters."""
    return sum(state_buffer.nbytes(numel) for state_buffer in state_buffers)


def items_of(flat: torch.Tensor, items: slice) -> torch.Tensor:
    """Return `flat[items]`, or `flat` itself where the items are all: a view takes 1.4 us, and an update made ten."""
    return flat if items.start == 0 and items.stop == flat.numel() else flat[items]


@dataclass(frozen=True)
class StateBuffers:
    """Views of the same span of parameters in every state buffer. Its start is a multiple of a scale's group.
    `optimizer`: the state buffers beside weight and gradient, by name."""

    weight: torch.Tensor
    optimizer: Mapping[str, torch.Tensor]

    @property
    def remainder(self) -> torch.Tensor | None:
        """The buffer that completes the weight to its fp32 master, None where the weight is the master."""
        return self.optimizer.get("remainder")

    def states(self, rule: UpdateRule) -> list[torch.Tensor]:
        """The states in the order of the rule."""
        return [self.optimizer[state.name] for state in rule.states]

    def scales(self, rule: UpdateRule) -> list[torch.Tensor | None]:
        """The scales of the states, None for a state without scales."""
        return [self.optimizer.get(scales_of(state.name)) for state in rule.states]

    def part(self, span: slice, specs: Sequence[StateBufferSpec]) -> StateBuffers:
        """Return views of the parameters `span` of this span."""
        optimizer = {spec.name: items_of(self.optimizer[spec.name], spec.cut(span)) for spec in specs}
        return StateBuffers(items_of(self.weight, span), optimizer)

    def weight_bytes(self) -> int:
        """Bytes of the weights and of their remainder."""
        return self.weight.nbytes + (0 if self.remainder is None else self.remainder.nbytes)

    def nbytes(self) -> int:
        return sum(
            state_buffer.numel() * state_buffer.element_size()
            for state_buffer in (self.weight, *self.optimizer.values())
        )
