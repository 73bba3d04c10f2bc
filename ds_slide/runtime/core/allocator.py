"""Gives out what the plan lists, each entry once, in the tier and with the bytes that the plan has."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ds_slide.plan.allocations import Allocation
from ds_slide.runtime.core.device import Device
from ds_slide.runtime.core.futures import Failures
from ds_slide.runtime.core.pool import BufferPool
from ds_slide.store.host_memory import HostMemory
from ds_slide.store.memory_file import SharedHostMemory
from ds_slide.store.tiers import Tier


class Allocator:
    """Entries are asked for by name. One that is not in the plan, or has been given out, is a fault of the builder and
    so a KeyError; so is one that is left (`require_all_given`)."""

    def __init__(self, allocations: Iterable[Allocation], memory: HostMemory, device: Device) -> None:
        self._left = {each.what: each for each in allocations}
        self._memory = memory
        self._device = device
        self.pools: dict[str, BufferPool] = {}
        """That were given out, by name."""

    def tensor(self, what: str, dtype: torch.dtype, memory: SharedHostMemory | None = None) -> torch.Tensor:
        """A zeroed flat tensor, on the GPU or in host memory; there in `memory`, if it is given. SlideError when the
        memory cannot be had."""
        entry = self._give(what, "gpu", "host")
        return self._tensor(entry, entry.nbytes // dtype.itemsize, dtype, memory)

    def buffers(self, what: str) -> list[torch.Tensor]:
        """Its pieces, each a zeroed tensor of bytes."""
        entry = self._give(what, "gpu", "host")
        return [self._tensor(entry, entry.piece, torch.uint8) for _ in range(entry.count)]

    def pool(self, what: str, failures: Failures) -> BufferPool:
        """Its pieces, page-aligned host buffers that come and go. It may have none."""
        entry = self._give(what, "host")
        native = self._memory.pool(entry.piece, entry.count, transfers=entry.page_locked)
        self.pools[what] = BufferPool(native, failures, what)
        return self.pools[what]

    def on_ssd(self, what: str) -> int:
        """Its bytes, of which the caller makes a part of the state file."""
        return self._give(what, "ssd").nbytes

    def begun(self, what: str) -> int:
        """Its bytes, of which the caller makes tensors of its own."""
        return self._give(what, "gpu", "host").nbytes

    def tier(self, what: str) -> Tier | None:
        """Where an entry that has not been given out is to be; None where the plan has none of that name."""
        entry = self._left.get(what)
        return None if entry is None else entry.tier

    def require_all_given(self) -> None:
        """Raise KeyError where an entry that the budgets were checked with has not been given out."""
        if self._left:
            raise KeyError(f"in the plan, and not allocated: {', '.join(self._left)}")

    def _give(self, what: str, *tiers: Tier) -> Allocation:
        if self._left[what].tier not in tiers:
            raise KeyError(f"{what} is in the tier {self._left[what].tier}")
        return self._left.pop(what)

    def _tensor(
        self, entry: Allocation, numel: int, dtype: torch.dtype, memory: SharedHostMemory | None = None
    ) -> torch.Tensor:
        if entry.tier == "gpu":
            return torch.zeros(numel, dtype=dtype, device=self._device.torch)
        return (memory or self._memory).tensor(numel, dtype, transfers=entry.page_locked)
