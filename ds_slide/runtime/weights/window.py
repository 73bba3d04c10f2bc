"""The window: GPU slots that hold one block each, filled ahead of the compute lane.

No trace is recorded. The order of the blocks is known from the model: forward goes through them once,
backward comes back the same way, and the next forward starts again. A block used out of that order is
fetched on demand: slower, never wrong.

A block stays in its slot until another one needs that or its weights change. So slots beyond the few that hide a fetch
are a cache: with one for each block nothing is fetched in backward, nor in the other micro-batches of a step.
"""

from __future__ import annotations

import threading
from collections.abc import Container, Iterator, Sequence
from typing import Literal, Protocol

import torch

from ds_slide.errors import SlideError
from ds_slide.runtime.core.device import PASSED, Device, Marker
from ds_slide.runtime.core.futures import Failures, Future
from ds_slide.runtime.core.stream_lane import StreamWorker
from ds_slide.runtime.core.unit import Unit

Direction = Literal["forward", "backward", "inference"]


class Slot:
    """One GPU buffer, of bytes: what it holds has its unit's data type. Owners: the h2d lane from `fill` until `ready`
    is kept; then the compute lane, as long as it is bound and until `free` has been passed on the compute stream; then
    the h2d lane again."""

    def __init__(self, index: int, buffer: torch.Tensor) -> None:
        self.index = index
        self.buffer = buffer
        self.unit: Unit | None = None
        self.version = -1
        self.bound = 0
        self.ready: Future | None = None
        self.free: Marker = PASSED
        self._views: dict[int, list[torch.Tensor]] = {}

    def holds(self, unit: Unit) -> bool:
        return self.unit is unit and self.version == unit.version

    def drop_views(self, unit: Unit) -> None:
        """Make the views of `unit` anew when it is bound next."""
        self._views.pop(unit.order, None)

    def views(self, unit: Unit) -> list[torch.Tensor]:
        """Parameter views of `unit` in this buffer, made once."""
        if unit.order not in self._views:
            self._views[unit.order] = unit.slot_views(self.buffer)
        return self._views[unit.order]


class Source(Protocol):
    """Where the weights come from (`ds_slide.runtime.weights.uploads.Uploads`)."""

    def fill(self, unit: Unit, buffer: torch.Tensor) -> int:
        """Copy a unit's weights into a GPU buffer on the current stream. -> bytes moved."""


class Ahead(Protocol):
    """Who prepares weights before their fetch is asked for: the SSD tier."""

    @property
    def horizon(self) -> int:
        """Blocks behind those in the slots that it is told of."""

    def expect(self, coming: Sequence[Unit], in_backward: Sequence[Unit]) -> None:
        """`coming`: blocks whose fetch is to come or under way; `in_backward`: in backward also the blocks whose
        backward is to come or under way; both in the order of their use."""


class Window:
    """Keeps the blocks that are needed next in the slots.

    All methods are called by the compute thread; the lock only protects against a user who runs
    forward and backward from different threads.
    """

    def __init__(
        self,
        device: Device,
        h2d: StreamWorker,
        failures: Failures,
        order: Sequence[Unit],
        buffers: Sequence[torch.Tensor],
        source: Source,
        ahead: Ahead | None = None,
    ) -> None:
        """`ahead` is told what comes after the slots each time that this changes."""
        self._ahead = ahead
        self._device = device
        self._h2d = h2d
        self._failures = failures
        self._order = list(order)
        self._position = {unit.order: position for position, unit in enumerate(order)}
        self._source = source
        self._lock = threading.RLock()
        self._slots_of: dict[int, Slot] = {}
        """The last slot that was given to each unit; another one may have it by now."""
        self.slots = [Slot(index, buffer) for index, buffer in enumerate(buffers)]
        self.by_storage = {slot.buffer.untyped_storage().data_ptr(): slot for slot in self.slots}
        self.misses = 0
        """Blocks that nobody had requested before they were needed."""

    def refit(self, order: Sequence[Unit], slots: int, more: Sequence[torch.Tensor]) -> None:
        """Serve these blocks from now on, with so many slots, of which `more` are new. No slot is bound, and no fetch
        under way. Blocks that do not pass any more are in no slot, so that none is taken for one that has come back."""
        with self._lock:
            self._order = list(order)
            self._position = {unit.order: position for position, unit in enumerate(order)}
            kept = self.slots[: slots - len(more)]
            for slot in kept:
                slot.unit = None if slot.unit is None or slot.unit.order not in self._position else slot.unit
            self.slots = [*kept, *(Slot(len(kept) + index, buffer) for index, buffer in enumerate(more))]
            self._slots_of = {order: slot for order, slot in self._slots_of.items() if slot in kept}
            self.by_storage.clear()
            self.by_storage.update((slot.buffer.untyped_storage().data_ptr(), slot) for slot in self.slots)

    def lay_out_anew(self, unit: Unit) -> None:
        """The places of the unit's parameters have changed. Its version has, too, so that it is fetched again."""
        with self._lock:
            for slot in self.slots:
                slot.drop_views(unit)

    def nbytes(self) -> int:
        """Bytes of the slots."""
        return sum(slot.buffer.numel() * slot.buffer.element_size() for slot in self.slots)

    def is_full_for(self, unit: Unit) -> bool:
        """Whether a bound slot has to be given up before `unit` can have one."""
        with self._lock:
            return self._slot_of(unit) is None and all(slot.bound for slot in self.slots)

    def acquire(self, unit: Unit, direction: Direction) -> Slot:
        """The slot that holds `unit`, bound once more; requests what `direction` needs next."""
        with self._lock:
            slot = self._slot_of(unit)
            if slot is None:
                self.misses += 1
                slot = self._request(unit, keep=())
                if slot is None:
                    raise SlideError(
                        f"no slot of the window is free for {unit.name}: all {len(self.slots)} hold blocks that "
                        "compute at this moment, because blocks call blocks; raise ds_slide.window"
                    )
            slot.bound += 1
            self.prefetch(unit, direction)
        return slot

    def release(self, slot: Slot) -> None:
        """Unbind once. The h2d lane may refill the buffer after the work submitted to the compute stream so far."""
        with self._lock:
            slot.bound -= 1
            slot.free = self._device.mark()

    def release_all(self) -> None:
        """Unbind what an exception has left bound: nobody computes with it any more."""
        with self._lock:
            for slot in self.slots:
                if slot.bound:
                    slot.bound = 0
                    slot.free = self._device.mark()

    def forget(self, unit: Unit) -> None:
        """What the slots have of the unit may have been copied while its weights were being written."""
        with self._lock:
            if (slot := self._slot_of(unit)) is not None:
                slot.version = -1

    def prefetch(self, current: Unit | None, direction: Direction) -> None:
        """Request the blocks that follow `current` (None: the first forward) as far as the slots go."""
        with self._lock:
            # A block that has ended its backward is not wanted any more: its weights are about to change, and the fetch
            # would hold up the h2d lane, with the blocks that backward needs behind it, until its update has run.
            ended = current is None or (direction == "backward" and not current.awaits_backward)
            wanted: dict[int, Unit] = {} if current is None or ended else {current.order: current}
            for unit in self._upcoming(current, direction):
                if len(wanted) >= min(len(self.slots), len(self._order)):
                    break
                wanted[unit.order] = unit
            for unit in wanted.values():
                if self._slot_of(unit) is None and self._request(unit, keep=wanted) is None:
                    break
            if self._ahead is not None:
                self._tell(self._ahead, ended, current, direction)

    def _tell(self, ahead: Ahead, ended: bool, current: Unit | None, direction: Direction) -> None:
        coming: dict[int, Unit] = {}
        # Compute may be about to wait for the current block itself: then nothing is needed sooner.
        standing_at = [] if current is None or ended else [current]
        for unit in (*standing_at, *self._upcoming(current, direction)):
            if len(coming) >= ahead.horizon:
                break
            slot = self._slot_of(unit)
            if slot is None or slot.ready is None or not slot.ready.is_kept:
                coming[unit.order] = unit
        awaited: list[Unit] = []
        if direction == "backward" and current is not None:
            before = self._order[: self._position[current.order] + 1]
            awaited = [unit for unit in reversed(before) if unit.awaits_backward][: ahead.horizon]
        ahead.expect(list(coming.values()), awaited)

    def _upcoming(self, current: Unit | None, direction: Direction) -> Iterator[Unit]:
        order = self._order
        if current is None:
            yield from order
            return
        position = self._position[current.order]
        if direction == "forward":
            yield from order[position + 1 :]
            yield from reversed(order)
        elif direction == "inference":
            yield from order[position + 1 :]
            yield from order[:position]
        else:
            yield from (unit for unit in reversed(order[:position]) if unit.awaits_backward)
            for unit in order:
                # Its weights are about to change: fetching them now would fetch them twice.
                if unit.awaits_backward or unit.is_postponed:
                    return
                yield unit

    def _slot_of(self, unit: Unit) -> Slot | None:
        slot = self._slots_of.get(unit.order)
        return slot if slot is not None and slot.holds(unit) else None

    def _request(self, unit: Unit, keep: Container[int]) -> Slot | None:
        """Request a block. `keep`: orders of the blocks that must not make room."""
        slot = self._victim(keep)
        if slot is None:
            return None
        slot.unit, slot.version = unit, unit.version
        self._slots_of[unit.order] = slot
        slot.ready = ready = Future(self._failures, f"the weights of {unit.name} in a slot of the window")
        updated, free, version = unit.updated, slot.free, unit.version

        def job() -> None:
            updated.wait()
            unit.await_others(version)
            self._h2d.wait(free, f"a slot of the window for {unit.name}")
            start = self._device.mark(self._h2d.stream, timed=True)
            moved = self._source.fill(unit, slot.buffer)
            end = self._device.mark(self._h2d.stream, timed=True)
            ready.keep(end)
            self._h2d.meter.add_interval(start, end, moved, ("weights", unit.order))

        self._h2d.submit(job)
        return slot

    def _victim(self, keep: Container[int]) -> Slot | None:
        def kept(slot: Slot) -> bool:
            return slot.unit is not None and slot.unit.order in keep and slot.holds(slot.unit)

        free = [slot for slot in self.slots if not slot.bound and not kept(slot)]
        # Stale or empty slots first; then the one whose block lies farthest along the order.
        return max(free, key=self._staleness, default=None)

    @staticmethod
    def _staleness(slot: Slot) -> tuple[bool, int]:
        unit = slot.unit
        return (unit is None or not slot.holds(unit), 0 if unit is None else unit.order)
