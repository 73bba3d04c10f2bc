"""Experts that move in parts: while a block computes, a few of its experts at a time pass through GPU buffers.

    compute stream  routes the tokens; the host reads how many tokens each expert has
    h2d lane        fills a buffer with the next experts that have tokens, when its last reader has been submitted
    compute stream  computes with these experts, and gives the buffer back

A block of DeepSeek-V3's size has 23 GB of experts in bf16, and three buffers of 256 MiB hold nine of them. Experts
without a token are not fetched. The same happens once more in backward, because the graph keeps no weight of an expert
(`ds_slide.patching.experts`).

The experts are frozen, and the block's slot was filled before they run. So no update and no other rank's part is waited
for here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

from ds_slide.model.experts import Experts
from ds_slide.model.layout import Entry, align_up
from ds_slide.plan.allocations import EXPERTS
from ds_slide.runtime.core.context import Context
from ds_slide.runtime.core.device import PASSED, Marker
from ds_slide.runtime.core.futures import Future, wait_on_stream
from ds_slide.runtime.core.unit import KeptResults, Unit
from ds_slide.runtime.weights.uploads import Uploads


class ExpertRing:
    """The buffers of all blocks. The compute thread calls all methods.

    A buffer belongs to the h2d lane from its request until its future is complete. Then it belongs to the compute
    stream, until the stream has passed the marker in `read`."""

    def __init__(self, context: Context, uploads: Uploads) -> None:
        self.device, self.recorder = context.device, context.recorder
        self.buffers = context.allocator.buffers(EXPERTS)
        self.read: list[Marker] = [PASSED] * len(self.buffers)
        self._failures, self._h2d, self._uploads = context.failures, context.lanes.h2d, uploads

    def source_of(self, experts: Experts, units: Iterable[Unit]) -> StreamedExperts | None:
        """Return the source of one module's experts; None where they are in the slots of their block."""
        for unit in units:
            if all(name in unit.experts for name in experts.parameter_names):
                entries = dict(zip(experts.names, experts.parameter_names, strict=True))
                return StreamedExperts(self, unit, {name: unit.experts[full] for name, full in entries.items()})
        return None

    def request(self, turn: int, unit: Unit, copies: Sequence[tuple[Entry, slice, torch.Tensor]]) -> Future:
        """Let the lane fill buffer number `turn`, whose last reader has been submitted."""
        ready = Future(self._failures, f"experts of {unit.name} on the GPU")
        read, lane = self.read[turn], self._h2d

        def job() -> None:
            lane.wait(read, f"a buffer for experts of {unit.name}")
            start = self.device.mark(lane.stream, timed=True)
            moved = self._uploads.fill_experts(unit, copies)
            end = self.device.mark(lane.stream, timed=True)
            ready.complete(end)
            lane.meter.add_interval(start, end, moved, ("experts", unit.order))

        lane.submit(job)
        return ready


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
        return self._unit.results

    def passes(self, experts: Sequence[int]) -> Iterator[dict[str, torch.Tensor]]:
        """Yield the parameters ([n, ..., ...], by attribute) of the given experts, the next `at_once` of them each
        time. They belong to the caller until it asks for the next ones or closes the iterator."""
        count = len(self._ring.buffers)
        groups = [experts[start : start + self.at_once] for start in range(0, len(experts), self.at_once)]
        ready = [self._request(turn, group) for turn, group in enumerate(groups[:count])]
        for number, group in enumerate(groups):
            turn = number % count
            wait_on_stream(ready[turn], self._ring.device, self._ring.recorder)
            try:
                yield self._parameters(turn, len(group))
            finally:
                self._ring.read[turn] = self._ring.device.mark()
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
            entry, numel, flat = self._entries[name], self._numel[name], parameter.view(-1)
            for start, stop in _runs(group):  # neighbours are one copy
                span = slice(group[start] * numel, (group[stop - 1] + 1) * numel)
                copies.append((entry, span, flat[start * numel : stop * numel]))
        return self._ring.request(turn, self._unit, copies)


def _runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield [start, stop) of the longest runs of neighbours in ascending numbers."""
    start = 0
    for place in range(1, len(numbers) + 1):
        if place == len(numbers) or numbers[place] != numbers[place - 1] + 1:
            yield start, place
            start = place
