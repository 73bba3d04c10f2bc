"""The states of one unit and where they live.

Host tier: every plane is its own exact-size, page-aligned slab; the weight plane and a held gradient are page-locked,
because the GPU copies from and to them. GPU tier: plain device tensors, updated on the GPU. SSD tier: the optimizer
planes, and for blocks the weights too if they are to, lie in the state file and pass through pooled host buffers; so do
held gradients of blocks that fit nowhere else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from ds_slide.errors import SlideError
from ds_slide.optim.low_precision import from_fp32, to_fp32
from ds_slide.optim.rule import StateSpec
from ds_slide.store.planes import Planes, PlaneSpec, scales_of
from ds_slide.store.ssd.unit import SsdUnit
from ds_slide.store.untouched import untouched_bytes

Tier = Literal["host", "gpu", "ssd"]


@dataclass
class UnitState:
    """This rank's planes of one unit, each flat, in the unit's local layout.

    weight: [local_numel] in the model's dtype (bf16: the upper half of the fp32 master, rounded); None while it is on
    SSD. optimizer: the planes of `specs` by name, [items of trainable_numel]; empty in the SSD tier. gradient:
    [trainable_numel], or None when not held or on SSD. ssd: the unit's places on SSD, None when it has none.
    """

    tier: Tier
    """Where the optimizer planes live."""
    specs: Sequence[PlaneSpec]
    weight: torch.Tensor | None
    optimizer: dict[str, torch.Tensor]
    gradient: torch.Tensor | None
    ssd: SsdUnit | None = None

    def nbytes(self) -> int:
        """In memory."""
        planes = (self.weight, self.gradient, *self.optimizer.values())
        return sum(plane.numel() * plane.element_size() for plane in planes if plane is not None)

    def planes(self, span: slice, weight: torch.Tensor | None = None) -> Planes:
        """Views of the parameters `span`, of a unit whose optimizer planes are in memory. `weight`: the weight plane
        where the unit has none of its own in memory."""
        plane = self.weight if weight is None else weight
        assert plane is not None
        return Planes(plane[span], {spec.name: self.optimizer[spec.name][spec.cut(span)] for spec in self.specs})

    def has(self, name: str) -> bool:
        return name == "weight" or any(spec.name == name for spec in self.specs)

    @property
    def gradient_on_ssd(self) -> bool:
        return self.ssd is not None and self.ssd.has_gradient

    def dtype_of(self, name: str) -> torch.dtype:
        """Of a plane as it is stored."""
        if name not in ("weight", "gradient"):
            return self._spec(name).dtype
        plane = self._in_memory(name)
        if plane is not None:
            return plane.dtype
        assert self.ssd is not None
        return self.ssd.dtype_of(name)

    @property
    def device(self) -> torch.device:
        """Where the optimizer planes are updated."""
        return self.weight.device if self.tier == "gpu" and self.weight is not None else torch.device("cpu")

    # Readers and writers have waited for the unit (`SlideRuntime.settle`): nobody else touches its planes.

    def read(self, name: str, span: slice) -> torch.Tensor:
        """The parameters `span` of a plane (weight, gradient, remainder, a state of the update rule): a view or a copy,
        of a state in fp32."""
        state, scale = self._state_of(name), self._scale_of(name)
        if state is None or scale is None:
            raw = self.raw(name, span)
            return raw if state is None else raw.float()
        whole = _groups(span, scale.elements_per_item, self._items(name))
        values = to_fp32(self.raw(name, whole), self.raw(scale.name, scale.cut(whole)), signed=state.signed)
        return values[span.start - whole.start : span.stop - whole.start]

    def raw(self, name: str, items: slice) -> torch.Tensor:
        """Items of a plane as they are stored: a view, or a copy of what is on SSD."""
        plane = self._in_memory(name)
        if plane is not None:
            return plane[items]
        assert self.ssd is not None
        return self.ssd.read(name, items)

    def write(self, name: str, span: slice, values: torch.Tensor) -> None:
        """Set the parameters `span` of a plane; states from fp32, rounded to nearest where they are stored shorter."""
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

    def _spec(self, name: str) -> PlaneSpec:
        return next(spec for spec in self.specs if spec.name == name)

    def _state_of(self, name: str) -> StateSpec | None:
        """The state of the update rule that a plane holds, None for other planes."""
        return next((spec.state for spec in self.specs if spec.name == name), None)

    def _scale_of(self, name: str) -> PlaneSpec | None:
        """The plane of a state's scales, None for planes that hold their values as they are."""
        return next((spec for spec in self.specs if spec.name == scales_of(name)), None)

    def _items(self, name: str) -> int:
        if self.ssd is not None and self.ssd.has_records:
            return self.ssd.places.chunks[-1].span.stop
        return self.optimizer[name].numel()

    def _in_memory(self, name: str) -> torch.Tensor | None:
        if name == "gradient":
            return self.gradient
        return self.weight if name == "weight" else self.optimizer.get(name)

    def _set_raw(self, name: str, items: slice, values: torch.Tensor) -> None:
        plane = self._in_memory(name)
        if plane is not None:
            plane[items].copy_(values)
        else:
            assert self.ssd is not None
            self.ssd.write(name, items, values)


def _groups(span: slice, group: int, numel: int) -> slice:
    """`span` extended to whole groups, within [0, numel)."""
    return slice(span.start // group * group, min(-(-span.stop // group) * group, numel))


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

    def untouched_bytes(self) -> int:
        """Of the tensors, which are all in use still: what the operating system counts as free."""
        return untouched_bytes((tensor.data_ptr(), tensor.numel()) for tensor in self._tensors)

    def pool(self, nbytes: int, count: int, *, transfers: bool) -> Any:
        """A `_native.Pool` of `count` page-aligned buffers. `transfers`: as in `tensor`.

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
        locked = " page-locked" if self._page_lock and transfers else ""
        return SlideError(
            f"host tier: {nbytes:,} bytes{locked} could not be had after "
            f"{self.total_bytes:,} bytes ({error}); lower ds_slide.host_memory, raise ds_slide.gpu_states, "
            "or use a machine with more memory"
        )
