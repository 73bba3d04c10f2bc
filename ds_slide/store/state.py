"""The states of one unit and where they live.

Host tier: every plane is its own exact-size, page-aligned slab; the weight plane and a held gradient are
page-locked, because the GPU copies from and to them. GPU tier: plain device tensors, updated on the GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from ds_slide.errors import SlideError
from ds_slide.model.layout import UnitLayout

Tier = Literal["host", "gpu"]


@dataclass
class UnitState:
    """This rank's planes of one unit, each flat, in the unit's local layout.

    weight: [local_numel] in the model's dtype (bf16: the upper half of the fp32 master, rounded).
    remainder: [trainable_numel] int16 for bf16, fp32 master for fp16, None for fp32.
    exp_avg, exp_avg_sq: [trainable_numel] fp32. gradient: [trainable_numel], or None when not held.
    """

    tier: Tier
    weight: torch.Tensor
    remainder: torch.Tensor | None
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    gradient: torch.Tensor | None
    slabs: list[Any] = field(default_factory=list)

    def nbytes(self) -> int:
        planes = (self.weight, self.remainder, self.exp_avg, self.exp_avg_sq, self.gradient)
        return sum(plane.numel() * plane.element_size() for plane in planes if plane is not None)


REMAINDER_DTYPE = {torch.bfloat16: torch.int16, torch.float16: torch.float32, torch.float32: None}


class HostMemory:
    """Hands out host tensors in slabs of their exact size, and knows how much it has handed out."""

    def __init__(self, *, page_lock: bool, huge_pages: bool) -> None:
        self._page_lock = page_lock
        self._huge_pages = huge_pages
        self.total_bytes = 0
        self.pinned_bytes = 0

    def tensor(self, numel: int, dtype: torch.dtype, *, transfers: bool) -> tuple[torch.Tensor, Any]:
        """A zeroed flat tensor and its slab. `transfers`: the GPU copies from or to it, so it is page-locked."""
        from ds_slide import _native

        if numel == 0:
            return torch.empty(0, dtype=dtype), None
        size = numel * dtype.itemsize
        pin = self._page_lock and transfers
        try:
            slab = _native.Slab(size, pin, self._huge_pages)
        except (RuntimeError, MemoryError) as error:
            raise SlideError(
                f"host tier: {size:,} bytes{' page-locked' if pin else ''} could not be had after "
                f"{self.total_bytes:,} bytes ({error}); lower ds_slide.host_memory, raise ds_slide.gpu_states, "
                "or use a machine with more memory"
            ) from error
        self.total_bytes += slab.nbytes
        self.pinned_bytes += slab.nbytes if pin else 0
        return torch.frombuffer(slab, dtype=torch.uint8, count=size).view(dtype), slab


def host_state(
    memory: HostMemory, layout: UnitLayout, dtype: torch.dtype, gradient_dtype: torch.dtype | None
) -> UnitState:
    """Zeroed host planes for `layout`; with `gradient_dtype` also a page-locked plane for held gradients."""
    slabs: list[Any] = []

    def plane(numel: int, plane_dtype: torch.dtype, transfers: bool = False) -> torch.Tensor:
        tensor, slab = memory.tensor(numel, plane_dtype, transfers=transfers)
        if slab is not None:
            slabs.append(slab)
        return tensor

    remainder_dtype = REMAINDER_DTYPE[dtype]
    return UnitState(
        tier="host",
        weight=plane(layout.local_numel, dtype, transfers=True),
        remainder=None if remainder_dtype is None else plane(layout.trainable_numel, remainder_dtype),
        exp_avg=plane(layout.trainable_numel, torch.float32),
        exp_avg_sq=plane(layout.trainable_numel, torch.float32),
        gradient=None if gradient_dtype is None else plane(layout.trainable_numel, gradient_dtype, transfers=True),
        slabs=slabs,
    )


def gpu_state(device: torch.device, layout: UnitLayout, dtype: torch.dtype, gradient_dtype: torch.dtype) -> UnitState:
    """Zeroed device planes for a unit that is updated on the GPU; its gradient is always held there."""

    def plane(numel: int, plane_dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(numel, dtype=plane_dtype, device=device)

    remainder_dtype = REMAINDER_DTYPE[dtype]
    return UnitState(
        tier="gpu",
        weight=plane(layout.local_numel, dtype),
        remainder=None if remainder_dtype is None else plane(layout.trainable_numel, remainder_dtype),
        exp_avg=plane(layout.trainable_numel, torch.float32),
        exp_avg_sq=plane(layout.trainable_numel, torch.float32),
        gradient=plane(layout.trainable_numel, gradient_dtype),
    )
