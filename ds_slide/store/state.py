"""The states of one unit and where they live.

Host tier: every state buffer is its own exact-size, page-aligned slab; the weights' state buffer and a held gradient
are page-locked, because the GPU copies from and to them. GPU tier: plain device tensors, updated on the GPU. SSD tier:
the optimizer state buffers, and for blocks the weights too if they are to, lie in the state file and pass through
pooled host buffers; so do held gradients of blocks that fit nowhere else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from ds_slide.optim.low_precision import from_fp32, to_fp32
from ds_slide.optim.rule import StateSpec
from ds_slide.store.ssd.unit import SsdUnit
from ds_slide.store.state_buffers import StateBuffers, StateBufferSpec, scales_of

Tier = Literal["host", "gpu", "ssd"]


@dataclass
class UnitState:
    """This rank's state buffers of one unit, each flat, in the unit's local layout.

    weight: [local_numel] in the model's dtype (bf16: the upper half of the fp32 master, rounded); None while it is on
    SSD. optimizer: the state buffers of `specs` by name, [items of trainable_numel]; empty in the SSD tier. gradient:
    [trainable_numel], or None when not held or on SSD. ssd: the unit's places on SSD, None when it has none.
    """

    tier: Tier
    """Where the optimizer state buffers live."""
    specs: Sequence[StateBufferSpec]
    weight: torch.Tensor | None
    optimizer: dict[str, torch.Tensor]
    gradient: torch.Tensor | None
    ssd: SsdUnit | None = None

    def nbytes(self) -> int:
        """In memory."""
        state_buffers = (self.weight, self.gradient, *self.optimizer.values())
        return sum(
            state_buffer.numel() * state_buffer.element_size()
            for state_buffer in state_buffers
            if state_buffer is not None
        )

    def state_buffers(self, span: slice, weight: torch.Tensor | None = None) -> StateBuffers:
        """Views of the parameters `span`, of a unit whose optimizer state buffers are in memory. `weight`: the weights'
        state buffer where the unit has none of its own in memory."""
        state_buffer = self.weight if weight is None else weight
        assert state_buffer is not None
        return StateBuffers(
            state_buffer[span], {spec.name: self.optimizer[spec.name][spec.cut(span)] for spec in self.specs}
        )

    def has(self, name: str) -> bool:
        return name == "weight" or any(spec.name == name for spec in self.specs)

    @property
    def gradient_on_ssd(self) -> bool:
        return self.ssd is not None and self.ssd.has_gradient

    def dtype_of(self, name: str) -> torch.dtype:
        """Of a state buffer as it is stored."""
        if name not in ("weight", "gradient"):
            return self._spec(name).dtype
        state_buffer = self._in_memory(name)
        if state_buffer is not None:
            return state_buffer.dtype
        assert self.ssd is not None
        return self.ssd.dtype_of(name)

    @property
    def device(self) -> torch.device:
        """Where the optimizer state buffers are updated."""
        return self.weight.device if self.tier == "gpu" and self.weight is not None else torch.device("cpu")

    # Readers and writers have waited for the unit (`SlideRuntime.settle`): nobody else touches its state buffers.

    def read(self, name: str, span: slice) -> torch.Tensor:
        """The parameters `span` of a state buffer (weight, gradient, remainder, a state of the update rule): a view or
        a copy, of a state in fp32."""
        state, scale = self._state_of(name), self._scale_of(name)
        if state is None or scale is None:
            raw = self.raw(name, span)
            return raw if state is None else raw.float()
        whole = _groups(span, scale.elements_per_item, self._items(name))
        values = to_fp32(self.raw(name, whole), self.raw(scale.name, scale.cut(whole)), signed=state.signed)
        return values[span.start - whole.start : span.stop - whole.start]

    def raw(self, name: str, items: slice) -> torch.Tensor:
        """Items of a state buffer as they are stored: a view, or a copy of what is on SSD."""
        state_buffer = self._in_memory(name)
        if state_buffer is not None:
            return state_buffer[items]
        assert self.ssd is not None
        return self.ssd.read(name, items)

    def write(self, name: str, span: slice, values: torch.Tensor) -> None:
        """Set the parameters `span` of a state buffer; states from fp32, rounded to nearest where they are stored
        shorter."""
        state, scale = self._state_of(name), self._scale_of(name)
        if state is None or scale is None:
            self._set_raw(name, span, values)
            return
        whole = _groups(span, scale.elements_per_item, self._items(name))
        wide = self.read(name, whole)
        wide[span.start - whole.start : span.stop - whole.start].copy_(values)
        codes, scales = from_fp32(wide, self.dtype_of(name), signed=state.signed)
        assert scales is not None
        self._set_raw(name, whole, codes)
        self._set_raw(scale.name, scale.cut(whole), scales)

    def zero_gradient(self, numel: int) -> None:
        """Make the held gradient, of `numel` elements, zero."""
        if self.gradient is not None:
            self.gradient.zero_()
            return
        assert self.ssd is not None
        self.ssd.write("gradient", slice(0, numel), torch.zeros(numel, dtype=self.ssd.gradient_dtype))

    def _spec(self, name: str) -> StateBufferSpec:
        return next(spec for spec in self.specs if spec.name == name)

    def _state_of(self, name: str) -> StateSpec | None:
        """The state of the update rule that a state buffer holds, None for other state buffers."""
        return next((spec.state for spec in self.specs if spec.name == name), None)

    def _scale_of(self, name: str) -> StateBufferSpec | None:
        """The state buffer of a state's scales, None for state buffers that hold their values as they are."""
        return next((spec for spec in self.specs if spec.name == scales_of(name)), None)

    def _items(self, name: str) -> int:
        if self.ssd is not None and self.ssd.has_chunks:
            return self.ssd.extents.chunks[-1].span.stop
        return self.optimizer[name].numel()

    def _in_memory(self, name: str) -> torch.Tensor | None:
        if name == "gradient":
            return self.gradient
        return self.weight if name == "weight" else self.optimizer.get(name)

    def _set_raw(self, name: str, items: slice, values: torch.Tensor) -> None:
        state_buffer = self._in_memory(name)
        if state_buffer is not None:
            state_buffer[items].copy_(values)
        else:
            assert self.ssd is not None
            self.ssd.write(name, items, values)


def _groups(span: slice, group: int, numel: int) -> slice:
    """`span` extended to whole groups, within [0, numel)."""
    return slice(span.start // group * group, min(-(-span.stop // group) * group, numel))
