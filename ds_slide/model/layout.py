"""Flat layout of one unit: where every parameter lies in the local state buffers and in the gathered GPU slot.

Two address spaces, both counted in elements of the unit's data type:

* local state buffers (weights' state buffer, moments, gradients): the pieces that this rank's ZeRO-3 partition holds;
* slot: the whole parameters, as the GPU reads them.

With one rank they are the same space. With more, the all-gathered buffer is rank-major: the state buffer of rank r
starts at `r * local_numel`. The piece of an entry lies at `r * local_numel + entry.offset`, and belongs at
`entry.slot_offset + piece(entry, r)[0]` of the slot. Strides depend only on sizes, so a parameter without a gradient in
some step shifts nothing.

A frozen tensor of another data type than the unit's is kept as bytes (`ParameterInfo.dtype`): it fills whole elements
of the unit, and is viewed in its own data type where it is read.

Experts that can move in parts come last. A slot need not hold them (`UnitLayout.without_experts`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import lcm

import torch

# 128 bytes in bf16: a full GPU memory transaction and two CPU cache lines. Threads that update neighbouring entries
# never write the same line, and vector loads of every entry start aligned.
ALIGNMENT = 64


@dataclass(frozen=True)
class ParameterInfo:
    """What the layout needs to know of a parameter.

    `group` is the index of its optimizer parameter group; None means frozen (no gradient, no state).
    """

    name: str
    shape: tuple[int, ...]
    numel: int
    group: int | None
    dtype: torch.dtype | None = None
    """The data type of a frozen tensor that is kept as bytes; None: the unit's."""
    of_experts: bool = False
    """Whether it is a frozen 3-D parameter of experts that can move in parts: a slice of it is an expert."""


@dataclass(frozen=True, kw_only=True)
class Entry(ParameterInfo):
    """Place of one parameter. `numel` and `partition_numel` are elements of the parameter, offsets are elements of the
    unit: the same, except for a tensor that is kept as bytes."""

    partition_numel: int
    """ceil(numel / world_size): the size of every rank's ZeRO-3 partition, padding of the last ranks included. A tensor
    that is kept as bytes may have a few more elements, so that every rank holds whole elements of the unit."""
    offset: int
    """Start of this rank's partition in the local state buffers."""
    slot_offset: int
    """Start of the whole parameter in the gathered GPU slot."""
    unit_itemsize: int = 0
    """Bytes of an element of the unit, for a tensor that is kept as bytes."""

    def items(self, numel: int) -> int:
        """Return the elements of the unit that hold `numel` elements of the parameter."""
        return numel if self.dtype is None else -(-numel * self.dtype.itemsize // self.unit_itemsize)

    @property
    def place(self) -> slice:
        """The span of this rank's partition in the local state buffers."""
        return slice(self.offset, self.offset + self.items(self.partition_numel))

    @property
    def slot_place(self) -> slice:
        """The span of the whole parameter in the slot."""
        return slice(self.slot_offset, self.slot_offset + self.items(self.numel))

    def viewed(self, items: torch.Tensor, numel: int) -> torch.Tensor:
        """Return `numel` elements of the parameter that `items` ([items(numel)], the unit's data type) holds, flat.
        They are `items` itself where the data type is the unit's, because a state buffer's own view follows exchanges
        of its memory, and a view of that view does not; otherwise a view."""
        if self.dtype is None:
            return items
        return items.view(torch.uint8)[: numel * self.dtype.itemsize].view(self.dtype)

    def stored(self, values: torch.Tensor, unit_dtype: torch.dtype) -> torch.Tensor:
        """Return flat `values` of the parameter as elements of the unit ([items(values.numel())]), with zero bytes at
        the end where the last element is not full."""
        if self.dtype is None:
            return values
        as_bytes = values.to(self.dtype).contiguous().view(torch.uint8)
        missing = self.items(values.numel()) * self.unit_itemsize - as_bytes.numel()
        if missing:
            as_bytes = torch.nn.functional.pad(as_bytes, (0, missing))
        elif as_bytes.storage_offset() % self.unit_itemsize:  # a slice of a file that is mapped, for instance
            as_bytes = as_bytes.clone()
        return as_bytes.view(unit_dtype)

    @property
    def trainable(self) -> bool:
        """True when the parameter has a gradient and optimizer states."""
        return self.group is not None


@dataclass(frozen=True)
class Segment:
    """Local span [start, stop) that one optimizer parameter group updates, alignment padding included."""

    group: int
    start: int
    stop: int


@dataclass(frozen=True)
class UnitLayout:
    """Layout of a unit on one rank; the same on every rank. Every offset and total is a multiple of ALIGNMENT."""

    entries: tuple[Entry, ...]
    """Trainable entries, sorted stably by group. Then come entries that became trainable later, and then frozen entries
    in the given order, those of experts last."""
    world_size: int
    trainable_numel: int
    """Local elements with gradient and states: [0, trainable_numel) of the local state buffers."""
    local_numel: int
    """Local elements of all entries, frozen ones included."""
    slot_trainable_numel: int
    """Slot elements of the trainable entries: [0, slot_trainable_numel) of the slot."""
    slot_numel: int
    """Slot elements of all entries."""
    segments: tuple[Segment, ...]
    """Spans of one group each; they cover [0, trainable_numel) without gaps."""
    carried: tuple[Entry, ...] = ()
    """Places of frozen tensors that are no parameters, behind all parameters."""

    @property
    def experts(self) -> tuple[Entry, ...]:
        """The entries of experts that can move in parts."""
        return tuple(entry for entry in self.entries if entry.of_experts)

    @property
    def expert_numel(self) -> int:
        """Elements of one expert's slices of these entries, each aligned; 0 where there are none."""
        return sum(align_up(entry.numel // entry.shape[0]) for entry in self.experts)

    def without_experts(self) -> UnitLayout:
        """Return the layout of what is in front of the experts: in a slot, and in each rank's state buffer."""
        if not self.experts:
            return self
        first, entries = self.experts[0], tuple(entry for entry in self.entries if not entry.of_experts)
        return replace(self, entries=entries, local_numel=first.offset, slot_numel=first.slot_offset)


def align_up(numel: int) -> int:
    """Return the smallest multiple of ALIGNMENT that is not below `numel`."""
    return -(-numel // ALIGNMENT) * ALIGNMENT


def piece(entry: Entry, rank: int) -> tuple[int, int]:
    """Return the span [start, stop) of the parameter's flat elements that `rank` holds.

    It is at most `entry.partition_numel` long; shorter or empty on the last ranks, where the partition is padding.
    """
    start = min(rank * entry.partition_numel, entry.numel)
    return start, min(start + entry.partition_numel, entry.numel)


def pieces(layout: UnitLayout) -> Iterator[tuple[int, slice, slice]]:
    """Yield (rank, span in that rank's part of the unit, span in slot layout) for every piece."""
    for entry in (*layout.entries, *layout.carried):
        for rank in range(layout.world_size):
            start, stop = piece(entry, rank)
            if stop > start:
                place, items = entry.slot_offset + entry.items(start), entry.items(stop - start)
                yield rank, slice(entry.offset, entry.offset + items), slice(place, place + items)


def build_layout(
    parameters: Sequence[ParameterInfo], world_size: int, itemsize: int = 1, carried: Sequence[ParameterInfo] = ()
) -> UnitLayout:
    """Lay `parameters` out for `world_size` ranks, and behind them the frozen tensors `carried`, kept as bytes.
    `itemsize`: bytes of an element of the unit, which tensors that are kept as bytes need. Raises ValueError when
    `world_size` is below one."""
    if world_size < 1:
        raise ValueError(f"world_size is {world_size}; a layout needs at least one rank")
    return _in_order(sorted(parameters, key=_group_order), world_size, itemsize, carried)


def with_later(layout: UnitLayout, groups: Mapping[str, int]) -> UnitLayout:
    """Return `layout` with the frozen entries that `groups` names, by optimizer group, trainable.

    They follow the entries that were trainable before, whose places stay the same.
    """
    infos = [
        replace(entry, group=groups[entry.name], of_experts=False) if entry.name in groups else entry
        for entry in layout.entries
    ]
    trainable = sum(entry.trainable for entry in layout.entries)
    itemsize = max((entry.unit_itemsize for entry in (*layout.entries, *layout.carried)), default=1)
    in_order = [*infos[:trainable], *sorted(infos[trainable:], key=_group_order)]
    return _in_order(in_order, layout.world_size, itemsize, layout.carried)


def _in_order(
    parameters: Sequence[ParameterInfo], world_size: int, itemsize: int, carried: Sequence[ParameterInfo]
) -> UnitLayout:
    entries: list[Entry] = []
    offset = slot_offset = 0
    for info in (*parameters, *carried):
        partition_numel = -(-info.numel // world_size)
        if info.dtype is not None:  # whole elements of the unit
            whole = lcm(itemsize, info.dtype.itemsize) // info.dtype.itemsize
            partition_numel = -(-partition_numel // whole) * whole if world_size > 1 else partition_numel
        entry = Entry(
            *(info.name, info.shape, info.numel, info.group, info.dtype, info.of_experts),
            partition_numel=partition_numel,
            offset=offset,
            slot_offset=slot_offset,
            unit_itemsize=0 if info.dtype is None else itemsize,
        )
        entries.append(entry)
        offset += align_up(entry.items(partition_numel))
        slot_offset += align_up(entry.items(info.numel))

    # Frozen entries come last, so the first frozen entry ends the trainable span.
    first_frozen = next((entry for entry in entries if not entry.trainable), None)
    trainable_numel = first_frozen.offset if first_frozen else offset
    return UnitLayout(
        entries=tuple(entries[: len(parameters)]),
        carried=tuple(entries[len(parameters) :]),
        world_size=world_size,
        trainable_numel=trainable_numel,
        local_numel=offset,
        slot_trainable_numel=first_frozen.slot_offset if first_frozen else slot_offset,
        slot_numel=slot_offset,
        segments=_segments(entries),
    )


def _group_order(info: ParameterInfo) -> tuple[bool, int, bool]:
    return (info.group is None, info.group or 0, info.of_experts)


def _segments(entries: Iterable[Entry]) -> tuple[Segment, ...]:
    """Return one segment for each run of entries of one group: one per group where all were trainable from the
    start."""
    segments = []
    for group, run in groupby(entries, key=lambda entry: entry.group):
        members = list(run)
        start, stop = members[0].offset, members[-1].offset + align_up(members[-1].partition_numel)
        if group is not None and stop > start:
            segments.append(Segment(group, start, stop))
    return tuple(segments)
