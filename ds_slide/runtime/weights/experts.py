"""Frozen experts that are fetched when the router has chosen them, and not with their block.

**In parts** (`StreamedExperts`): while a block computes, a few of its experts at a time pass through GPU buffers.

    compute stream  routes the tokens; the host reads how many tokens each expert has
    h2d lane        fills a buffer with the next experts that have tokens, when its last reader has been submitted
    compute stream  computes with these experts, and gives the buffer back

A block of DeepSeek-V3's size has 23 GB of experts in bf16, and three buffers of 256 MiB hold nine of them. Experts
without a token are not fetched. The same happens once more in backward, because the graph keeps no weight of an expert
(`ds_slide.patching.experts`).

**Into the slot** (`ExpertsInSlot`): a forward of few tokens without gradients leaves the experts out of the slots, and
their places in the slot are filled with those that tokens were routed to. A token of Qwen3-30B-A3B uses 8 of 128
experts, 8 tokens use 52 of them, and 64 tokens use 126. The bytes that are left out have to outweigh the fetch of whole
blocks under the blocks before. So this is for forwards with at most half as many routings as experts: 8 tokens there.

The experts are frozen, and the block's slot was filled before they run. So no update and no other rank's part is waited
for here.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from ds_slide.model.experts import Experts
from ds_slide.model.layout import Entry, align_up
from ds_slide.plan.allocations import EXPERTS
from ds_slide.runtime.core.context import Context
from ds_slide.runtime.core.device import PASSED, Marker
from ds_slide.runtime.core.futures import Future, wait_on_stream
from ds_slide.runtime.core.unit import KeptResults, Unit
from ds_slide.runtime.weights.uploads import Copy, Uploads

if TYPE_CHECKING:
    from ds_slide.runtime.engine import SlideRuntime


def sources_of(
    runtime: SlideRuntime, found: Iterable[Experts]
) -> Iterator[tuple[Experts, StreamedExperts | ExpertsInSlot]]:
    """Yield the experts that are fetched when they are needed, each with its source."""
    units = {entry.name: (unit, entry) for unit in runtime.blocks for entry in unit.layout.experts}
    for experts in found:
        places = [units.pop(name) for name in experts.parameter_names if name in units]
        if len(places) < len(experts.names):
            continue
        unit, entries = places[0][0], dict(zip(experts.names, (entry for _, entry in places), strict=True))
        if unit.experts:
            assert runtime.parts.experts is not None
            yield experts, StreamedExperts(runtime.parts.experts, unit, entries)
        else:
            yield experts, ExpertsInSlot(runtime, unit, entries)
    assert not units, f"no module computes with {', '.join(units)}"


def _fetch(context: Context, uploads: Uploads, unit: Unit, copies: Sequence[Copy], read: Marker) -> Future:
    """Let the h2d lane copy experts of `unit`, to memory whose last reader ends at `read`."""
    ready, lane = Future(context.failures, f"experts of {unit.name} on the GPU"), context.lanes.h2d

    def job() -> None:
        lane.wait(read, f"memory for experts of {unit.name}")
        start = context.device.mark(lane.stream, timed=True)
        moved = uploads.fill_experts(unit, copies)
        end = context.device.mark(lane.stream, timed=True)
        ready.complete(end)
        lane.meter.add_interval(start, end, moved, ("experts", unit.order))

    lane.submit(job)
    return ready


def _runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield [start, stop) of the longest runs of neighbours in ascending numbers: they are one copy."""
    start = 0
    for place in range(1, len(numbers) + 1):
        if place == len(numbers) or numbers[place] != numbers[place - 1] + 1:
            yield start, place
            start = place


class ExpertRing:
    """The buffers of all blocks whose experts move in parts. The compute thread owns the object.

    A buffer belongs to the h2d lane from its request until its future is complete. Then it belongs to the compute
    stream, until the stream has passed the marker in `read`."""

    def __init__(self, context: Context, uploads: Uploads) -> None:
        self.context, self.uploads = context, uploads
        self.buffers = context.allocator.buffers(EXPERTS)
        self.read: list[Marker] = [PASSED] * len(self.buffers)


class StreamedExperts:
    """The experts of one module; `ExpertSource` of `ds_slide.patching.experts`. `entries`: by attribute."""

    def __init__(self, ring: ExpertRing, unit: Unit, entries: Mapping[str, Entry]) -> None:
        self._ring, self._unit, self._entries = ring, unit, entries
        self._numel = {name: entry.numel // entry.shape[0] for name, entry in entries.items()}
        """Elements of an expert."""
        self._views = [each.view(unit.dtype) for each in ring.buffers]
        self.at_once = self._views[0].numel() // sum(align_up(numel) for numel in self._numel.values())

    @property
    def results(self) -> KeptResults | None:
        """The results that the block's call under way keeps for its recomputations."""
        return self._unit.uses.results

    def passes(self, experts: Sequence[int]) -> Generator[dict[str, torch.Tensor]]:
        """Yield the parameters ([n, ..., ...], by attribute) of the given experts, the next `at_once` of them each
        time. They belong to the caller until it asks for the next ones or closes the iterator."""
        ring, count = self._ring, len(self._ring.buffers)
        groups = [experts[start : start + self.at_once] for start in range(0, len(experts), self.at_once)]
        ready = [self._request(turn, group) for turn, group in enumerate(groups[:count])]
        for number, group in enumerate(groups):
            turn = number % count
            wait_on_stream(ready[turn], ring.context.device, ring.context.recorder)
            try:
                yield self._parameters(turn, len(group))
            finally:
                ring.read[turn] = ring.context.device.mark()
            if number + count < len(groups):
                ready[turn] = self._request(turn, groups[number + count])

    def _parameters(self, turn: int, count: int) -> dict[str, torch.Tensor]:
        """Return the parameters of `count` experts in a buffer, one parameter after the other."""
        made, place = {}, 0
        for name, numel in self._numel.items():
            flat = self._views[turn][place : place + count * numel]
            made[name] = flat.view(count, *self._entries[name].shape[1:])
            place += align_up(count * numel)
        return made

    def _request(self, turn: int, group: Sequence[int]) -> Future:
        copies = []
        for name, parameter in self._parameters(turn, len(group)).items():
            numel, flat = self._numel[name], parameter.view(-1)
            for start, stop in _runs(group):
                span = slice(group[start] * numel, (group[stop - 1] + 1) * numel)
                copies.append(Copy(self._entries[name], span, flat[start * numel : stop * numel]))
        return _fetch(self._ring.context, self._ring.uploads, self._unit, copies, self._ring.read[turn])


class ExpertsInSlot:
    """The experts of one module whose block has slots for all of them; `SlotExperts` of `ds_slide.patching.experts`.

    The block is bound when its experts run, so that the compute thread owns the slot. The places of experts belong to
    the h2d lane from the request until the compute stream has waited for it."""

    def __init__(self, runtime: SlideRuntime, unit: Unit, entries: Mapping[str, Entry]) -> None:
        self._runtime, self._unit, self._entries = runtime, unit, entries
        self._count = min(entry.shape[0] for entry in entries.values())

    def bring(self, index: torch.Tensor) -> None:
        """Fetch the experts in `index` [tokens, k] that the block's slot does not hold."""
        slot, window = self._runtime.bindings.slots.get(self._unit.order), self._runtime.parts.window
        if window is None or slot is None:
            return
        window.few_tokens = self._count // (2 * index.shape[-1])
        if slot.experts is None:
            return
        self._runtime.bindings.bind_experts(self._unit, slot)
        used = index.unique().tolist()  # waits for the GPU; ascending
        flat, copies = slot.elements(self._unit.dtype), []
        for entry in self._entries.values():
            missing = [expert for expert in used if f"{entry.name} {expert}" not in slot.experts]
            slot.experts.update(f"{entry.name} {expert}" for expert in missing)
            numel = entry.numel // entry.shape[0]
            for start, stop in _runs(missing):
                span = slice(missing[start] * numel, (missing[stop - 1] + 1) * numel)
                target = flat[entry.slot_offset + span.start : entry.slot_offset + span.stop]
                copies.append(Copy(entry, span, target))
        if copies:
            parts = self._runtime.parts
            ready = _fetch(parts.context, parts.uploads, self._unit, copies, PASSED)
            wait_on_stream(ready, parts.context.device, parts.context.recorder)
