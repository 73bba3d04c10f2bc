"""The states of one unit. Each part is in its own tier (`ds_slide.store.tiers`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property

import torch

from ds_slide.optim.low_precision import to_fp32, with_scales
from ds_slide.optim.rule import StateSpec
from ds_slide.store.state_buffers import StateBuffers, StateBufferSpec, items_of, scales_of
from ds_slide.store.tiers import GradientSink, Lessee, OptimizerStates, StateBuffer, Weights


@dataclass(frozen=True)
class UnitState:
    """This rank's state buffers of one unit, each flat, in the unit's local layout. `specs` describe the optimizer
    state buffers.

    Where the unit's gradients are compressed, an update writes `change` instead of the weights. The GPU then applies
    the change to the weights. Optimizer states, change and gradient are in the layout of the codec. `masters` are
    beside the weights on the GPU and complete them."""

    specs: Sequence[StateBufferSpec]
    weights: Weights
    optimizer: OptimizerStates
    gradient: GradientSink
    change: Weights | None = None
    masters: Mapping[str, StateBuffer] = field(default_factory=dict)

    @cached_property
    def buffers(self) -> dict[str, StateBuffer]:
        """Return the state buffers by name: weight, the names of `specs`, a held gradient, and a change if any."""
        change = {} if self.change is None else {"change": self.change.buffer}
        return {
            "weight": self.weights.buffer,
            **self.masters,
            **self.optimizer.buffers,
            **self.gradient.buffers,
            **change,
        }

    @property
    def writes_change(self) -> bool:
        """Whether an update writes a change of the weights, and the gradient is in the layout of the codec."""
        return self.change is not None

    @property
    def written(self) -> Weights:
        """The state buffer that an update writes."""
        return self.weights if self.change is None else self.change

    def nbytes(self) -> int:
        """Bytes of the states in all tiers."""
        return sum(each.numel * each.dtype.itemsize for each in self.buffers.values())

    def has(self, name: str) -> bool:
        return name in self.buffers

    @cached_property
    def in_memory(self) -> bool:
        """Whether all buffers are in memory, where a lease is given at once and costs nothing."""
        return all(each.tensor is not None for each in self.buffers.values())

    def dtype_of(self, name: str) -> torch.dtype:
        """The data type of a state buffer as it is stored."""
        return self.buffers[name].dtype

    @property
    def device(self) -> torch.device:
        """The device that updates the optimizer state buffers."""
        return self.weights.buffer.device

    # ---- for an update

    def reserve(self, count: int) -> None:
        """Announce `count` leases, which follow as soon as their gradient is in host memory."""
        self.written.reserve(count)

    def lease(
        self, index: int, span: slice, update: Lessee, use: Callable[[SpanLease], None], *, reserved: bool
    ) -> None:
        """Call `use`, at once or later on any thread, when the parameters `span` are in memory in all state buffers.
        `SpanLease.put_back` follows. `index`: the number of the span in the unit. `update`: the update that leases
        them, once the update before has put its leases back. `reserved`: whether `reserve` has announced the lease."""
        # Every update takes the weights first: two updates that each hold one part would wait for ever for the other.
        self.written.lease(SpanLease(self, index, span, update, use), reserved=reserved)

    def state_buffers(self, span: slice) -> StateBuffers:
        """Return views of the parameters `span`, for an update in place."""
        return StateBuffers(
            self.raw("weight", span), {spec.name: self.raw(spec.name, spec.cut(span)) for spec in self.specs}
        )

    # ---- for readers and writers, who have waited for the unit (`StateAccess.settle`)

    @contextmanager
    def settling(self) -> Iterator[None]:
        """Let the caller wait for the pending update. Then wait for its writes and empty the other buffers."""
        with self.written.hurry(), self.optimizer.hurry():
            yield
        self.drain()

    def drain(self) -> None:
        """Wait until no transfer is under way, and empty the other buffers: the stored numbers are then current."""
        self.optimizer.drain()
        self.weights.drain()

    def read(self, name: str, span: slice) -> torch.Tensor:
        """Return the parameters `span` of a state buffer (weight, gradient, remainder, a state of the update rule). The
        result is a view or a copy. States of the update rule come in fp32."""
        state, scale = self._state_of(name), self._scale_of(name)
        if state is None or scale is None:
            raw = self.raw(name, span)
            return raw if state is None else raw.float()
        whole = _groups(span, scale.elements_per_item, self.buffers[name].numel)
        values = to_fp32(self.raw(name, whole), self.raw(scale.name, scale.cut(whole)), signed=state.signed)
        return values[span.start - whole.start : span.stop - whole.start]

    def raw(self, name: str, items: slice) -> torch.Tensor:
        """Return items of a state buffer as they are stored: a view in memory, a copy from SSD."""
        return self.buffers[name].read(items)

    def write(self, name: str, span: slice, values: torch.Tensor) -> None:
        """Set the parameters `span` of a state buffer. States are given in fp32, and rounded to nearest where they are
        stored in a shorter format."""
        state, scale = self._state_of(name), self._scale_of(name)
        if state is None or scale is None:
            self.buffers[name].write(span, values)
            return
        whole = _groups(span, scale.elements_per_item, self.buffers[name].numel)
        wide = self.read(name, whole)
        wide[span.start - whole.start : span.stop - whole.start].copy_(values)
        codes, scales = with_scales(wide, signed=state.signed)
        self.buffers[name].write(whole, codes)
        self.buffers[scale.name].write(scale.cut(whole), scales)

    def zero_gradient(self) -> None:
        """Set the held gradient to zero."""
        gradient = self.buffers["gradient"]
        gradient.write(slice(0, gradient.numel), torch.zeros(1, dtype=gradient.dtype).expand(gradient.numel))

    def _state_of(self, name: str) -> StateSpec | None:
        """Return the state of the update rule that a state buffer holds, None for other state buffers."""
        return next((spec.state for spec in self.specs if spec.name == name), None)

    def _scale_of(self, name: str) -> StateBufferSpec | None:
        """Return the state buffer of a state's scales, None for state buffers without scales."""
        return next((spec for spec in self.specs if spec.name == scales_of(name)), None)


@dataclass(eq=False)
class SpanLease:
    """The state buffers of one span of a unit, which an update has to itself from `UnitState.lease` to `put_back`."""

    state: UnitState
    index: int
    span: slice
    update: Lessee
    _use: Callable[[SpanLease], None]
    _weights: torch.Tensor | None = None
    _states: torch.Tensor | None = None

    def have_weights(self, buffer: torch.Tensor | None) -> None:
        self._weights = buffer
        self.state.optimizer.lease(self)

    def have_states(self, buffer: torch.Tensor | None) -> None:
        self._states = buffer
        self._use(self)

    def state_buffers(self) -> StateBuffers:
        """Return the views that the update works on. Called where it runs."""
        weight = self.state.written.leased(self._weights)
        return StateBuffers(
            items_of(weight, self.span), self.state.optimizer.leased(self.index, self._states, self.span)
        )

    def put_back(self) -> None:
        """End the lease after its update. Called by the lane that ends it."""
        self.state.optimizer.put_back(self.index)
        self.state.written.put_back(self.span)


def _groups(span: slice, group: int, numel: int) -> slice:
    """Return `span` extended to whole groups, within [0, numel)."""
    return slice(span.start // group * group, min(-(-span.stop // group) * group, numel))
