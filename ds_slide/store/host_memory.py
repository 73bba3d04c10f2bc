"""Host memory of the states: slabs of their exact size, page-locked where the GPU copies from or to them."""

from __future__ import annotations

from typing import Any

import torch

from ds_slide.errors import SlideError
from ds_slide.report.log import size
from ds_slide.store.untouched import untouched_bytes


class HostMemory:
    """Hands out host tensors in slabs of their exact size, and knows how much it has handed out."""

    def __init__(self, *, page_lock: bool, huge_pages: bool) -> None:
        self._page_lock = page_lock
        self._huge_pages = huge_pages
        self.total_bytes = 0
        self.pinned_bytes = 0
        self._tensors: list[torch.Tensor] = []

    def tensor(self, numel: int, dtype: torch.dtype, *, transfers: bool) -> torch.Tensor:
        """A zeroed flat tensor. `transfers`: the GPU copies from or to it, so it is page-locked."""
        return self._tensor(None, numel, dtype, transfers, counts=True)

    def mapped(
        self, descriptor: int, offset: int, numel: int, dtype: torch.dtype, *, transfers: bool, counts: bool = True
    ) -> torch.Tensor:
        """A flat tensor over a part of a memory file. `counts`: this process has brought the memory, no other."""
        return self._tensor((descriptor, offset), numel, dtype, transfers, counts=counts)

    def _tensor(
        self, place: tuple[int, int] | None, numel: int, dtype: torch.dtype, transfers: bool, *, counts: bool
    ) -> torch.Tensor:
        """`place`: descriptor and offset of memory in a file, None for new memory."""
        from ds_slide import _native

        if numel == 0:
            return torch.empty(0, dtype=dtype)
        size = numel * dtype.itemsize
        pin = self._page_lock and transfers
        try:
            if place is None:
                slab = _native.Slab(size, pin, self._huge_pages)
            else:
                slab = _native.Slab(*place, size, pin, self._huge_pages)
        except (RuntimeError, MemoryError, ValueError) as error:
            raise self.refusal(size, transfers, error) from error
        whole = torch.frombuffer(slab, dtype=torch.uint8, count=size)
        if counts:
            self._count(size, pin)
            self._tensors.append(whole)
        return whole.view(dtype)

    def give_back(self, tensor: torch.Tensor, *, transfers: bool) -> None:
        """Let go of a tensor of `tensor`, whose memory is freed with its last user."""
        if not tensor.numel():
            return
        self._tensors = [each for each in self._tensors if each.data_ptr() != tensor.data_ptr()]
        self._count(-tensor.nbytes, self._page_lock and transfers)

    def untouched_bytes(self) -> int:
        """Bytes of the tensors, all of them still in use, that the operating system counts as free."""
        return untouched_bytes((tensor.data_ptr(), tensor.numel()) for tensor in self._tensors)

    def forget(self) -> None:
        """Hold no tensor any longer; each goes with its last user."""
        self._tensors.clear()

    def pool(self, nbytes: int, count: int, *, transfers: bool) -> Any:
        """A `_native.Pool` of `count` page-aligned buffers of `nbytes` each. `transfers`: as in `tensor`.

        Always in huge pages where the kernel has them: a request of 1 MiB in scattered small pages has 256 segments,
        more than a disk's queue takes at once (254), and each is an entry for the host to walk. Reads of one virtual
        disk went from 1.1 to 1.6 GB/s, writes from 1.9 to 2.6.
        """
        from ds_slide import _native

        pin = self._page_lock and transfers
        try:
            pool = _native.Pool(nbytes, count, pin, True)
        except (RuntimeError, MemoryError) as error:
            raise self.refusal(nbytes * count, transfers, error) from error
        self._count(nbytes * count, pin)
        return pool

    def _count(self, nbytes: int, pin: bool) -> None:
        self.total_bytes += nbytes
        self.pinned_bytes += nbytes if pin else 0

    def refusal(self, nbytes: int, transfers: bool, error: BaseException) -> SlideError:
        """What to raise when so much memory could not be had."""
        of_memory = " of page-locked memory" if self._page_lock and transfers else ""
        return SlideError(
            f"host tier: {size(nbytes)}{of_memory} could not be had after "
            f"{size(self.total_bytes)} ({error}); lower ds_slide.host_memory, raise ds_slide.gpu_states, "
            "or use a machine with more memory"
        )
