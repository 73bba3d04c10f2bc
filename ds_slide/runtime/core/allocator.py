"""Allocates the entries of the plan, each once, in the tier and with the bytes that the plan has."""

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
    """The builder asks for entries by name. An unknown name, a name asked for twice and an entry left over
    (`require_all_given`) are faults of the builder and raise KeyError."""

    def __init__(self, allocations: Iterable[Allocation], memory: HostMemory, device: Device) -> None:
        self._left = {each.what: each for each in allocations}
        self._memory = memory
        self._device = device
        self.pools: dict[str, BufferPool] = {}
        """The pools given out so far, by name."""

    def tensor(self, what: str, dtype: torch.dtype, memory: SharedHostMemory | None = None) -> torch.Tensor:
        """Return a zeroed flat tensor on the GPU or in host memory, there in `memory` if it is given. Raises SlideError
        when the allocation fails."""
        entry = self._give(what, "gpu", "host")
        return self._tensor(entry, entry.nbytes // dtype.itemsize, dtype, memory)

    def buffers(self, what: str) -> list[torch.Tensor]:
        """Return the pieces of an entry, each a zeroed tensor of bytes."""
        entry = self._give(what, "gpu", "host")
        return [self._tensor(entry, entry.piece, torch.uint8) for _ in range(entry.count)]

    def pool(self, what: str, failures: Failures) -> BufferPool:
        """Return a pool of the entry's pieces, page-aligned host buffers that are leased and given back. It may be
        empty."""
        entry = self._give(what, "host")
        native = self._memory.pool(entry.piece, entry.count, transfers=entry.page_locked)
        self.pools[what] = BufferPool(native, failures, what)
        return self.pools[what]

    def on_ssd(self, what: str) -> int:
        """Return the bytes of an entry, for a part of the state file that the caller makes."""
        return self._give(what, "ssd").nbytes

    def begun(self, what: str) -> int:
        """Return the bytes of an entry, for tensors that the caller makes."""
        return self._give(what, "gpu", "host").nbytes

    def tier(self, what: str) -> Tier | None:
        """Return the planned tier of an entry that has not been given out; None where the plan has no such name."""
        entry = self._left.get(what)
        return None if entry is None else entry.tier

    def require_all_given(self) -> None:
        """Raise KeyError where an entry of the plan, which the budgets were checked with, has not been given out."""
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
