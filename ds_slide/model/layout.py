"""Flat layout of one unit: where every parameter lies in the local state buffers and in the gathered GPU slot.

Pure integers, no torch. Two address spaces, both counted in elements:

* local state buffers (weights' state buffer, moments, gradients): the pieces that this rank's ZeRO-3 partition holds;
* slot: the whole parameters, as the GPU reads them.

With one rank they are the same space. With more, the all-gathered buffer is rank-major: the state buffer of rank r
starts at `r * local_numel`. The piece of an entry lies at `r * local_numel + entry.offset`, and belongs at
`entry.slot_offset + piece(entry, r)[0]` of the slot. Strides depend only on sizes, so a parameter without a gradient in
some step shifts nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

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


@dataclass(frozen=True)
class Entry:
    """Place of one parameter; all numbers are elements."""

    name: str
    shape: tuple[int, ...]
    numel: int
    group: int | None
    partition_numel: int
    """ceil(numel / world_size): the size of every rank's ZeRO-3 partition, padding of the last ranks included."""
    offset: int
    """Start of this rank's partition in the local state buffers."""
    slot_offset: int
    """Start of the whole parameter in the gathered GPU slot."""

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
    in the given order."""
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
    for entry in layout.entries:
        for rank in range(layout.world_size):
            start, stop = piece(entry, rank)
            if stop > start:
                place = entry.slot_offset + start
                yield rank, slice(entry.offset, entry.offset + stop - start), slice(place, place + stop - start)


def build_layout(parameters: Sequence[ParameterInfo], world_size: int) -> UnitLayout:
    """Lay `parameters` out for `world_size` ranks. Raises ValueError when `world_size` is below one."""
    if world_size < 1:
        raise ValueError(f"world_size is {world_size}; a layout needs at least one rank")
    return _in_order(sorted(parameters, key=_group_order), world_size)


def with_later(layout: UnitLayout, groups: Mapping[str, int]) -> UnitLayout:
    """Return `layout` with the frozen entries that `groups` names, by optimizer group, trainable.

    They follow the entries that were trainable before, whose places stay the same.
    """
    infos = [
        ParameterInfo(entry.name, entry.shape, entry.numel, groups.get(entry.name, entry.group))
        for entry in layout.entries
    ]
    trainable = sum(entry.trainable for entry in layout.entries)
    return _in_order([*infos[:trainable], *sorted(infos[trainable:], key=_group_order)], layout.world_size)


def _in_order(parameters: Sequence[ParameterInfo], world_size: int) -> UnitLayout:
    entries: list[Entry] = []
    offset = slot_offset = 0
    for info in parameters:
        partition_numel = -(-info.numel // world_size)
        entries.append(Entry(info.name, info.shape, info.numel, info.group, partition_numel, offset, slot_offset))
        offset += align_up(partition_numel)
        slot_offset += align_up(info.numel)

    # Frozen entries come last, so the first frozen entry ends the trainable span.
    first_frozen = next((entry for entry in entries if not entry.trainable), None)
    trainable_numel = first_frozen.offset if first_frozen else offset
    return UnitLayout(
        entries=tuple(entries),
        world_size=world_size,
        trainable_numel=trainable_numel,
        local_numel=offset,
        slot_trainable_numel=first_frozen.slot_offset if first_frozen else slot_offset,
        slot_numel=slot_offset,
        segments=_segments(entries),
    )


def _group_order(info: ParameterInfo) -> tuple[bool, int]:
    return (info.group is None, info.group or 0)


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
