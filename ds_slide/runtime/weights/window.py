"""The window: GPU slots that hold one block each, filled before compute needs them.

No trace is recorded. The order of the blocks is known from the model: forward goes through them once,
backward comes back the same way, and the next forward starts again. A block used out of that order is
fetched on demand: slower, never wrong.

A block stays in its slot until another block needs the slot or its weights change. So slots beyond the few that hide a
fetch are a cache: with a slot for each block nothing is fetched in backward, nor in the other micro-batches of a step.

In a forward of few tokens without gradients, as in generation, no token uses most frozen experts of a block. Such a
forward leaves them out of the slots, and the block fetches those that it needs (`ds_slide.runtime.weights.experts`).
"""

from __future__ import annotations

import threading
from collections.abc import Container, Iterator, Sequence
from typing import Literal, Protocol

import torch

from ds_slide.errors import SlideError
from ds_slide.runtime.core.context import Context
from ds_slide.runtime.core.device import PASSED, Marker
from ds_slide.runtime.core.futures import Future
from ds_slide.runtime.core.unit import Unit

Direction = Literal["forward", "backward", "inference"]


class Slot:
    """One GPU buffer of bytes; its content has its unit's data type. The h2d lane owns it from `fill` until `ready` is
    complete. Then compute owns it while it is bound, and until the compute stream has passed `free`; then the h2d lane
    again."""

    def __init__(self, index: int, buffer: torch.Tensor) -> None:
        self.index = index
        self.buffer = buffer
        self.unit: Unit | None = None
        self.version = -1
        self.bound = 0
        self.ready: Future | None = None
        self.free: Marker = PASSED
        self.experts: set[str] | None = None
        """The experts that were fetched by themselves, each by parameter and number; None in a slot that holds the
        whole block."""
        self._views: dict[int, list[torch.Tensor]] = {}
        self._elements: dict[torch.dtype, torch.Tensor] = {}

    def elements(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the buffer as elements of `dtype`."""
        if dtype not in self._elements:
            with torch.inference_mode(False):
                self._elements[dtype] = self.buffer.view(dtype)
        return self._elements[dtype]

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


class SlotFiller(Protocol):
    """Brings weights into a slot (`ds_slide.runtime.weights.uploads.Uploads`)."""

    def fill(self, unit: Unit, buffer: torch.Tensor, *, without_experts: bool = False) -> int:
        """Copy a unit's weights into a GPU buffer on the current stream. Returns the bytes moved."""


class Ahead(Protocol):
    """Prepares weights before their fetch is requested: the SSD tier."""

    @property
    def horizon(self) -> int:
        """The number of blocks after the blocks in the slots that it is told about."""

    def expect(self, coming: Sequence[Unit], in_backward: Sequence[Unit]) -> None:
        """Announce blocks, both in the order of their use. `coming`: blocks whose fetch will come or is under way.
        `in_backward`: in backward, also the blocks whose backward will come or is under way."""


class Window:
    """Keeps the next needed blocks in the slots.

    The compute thread calls all methods; the lock only protects against a user who runs forward and backward from
    different threads.
    """

    def __init__(
        self,
        context: Context,
        order: Sequence[Unit],
        buffers: Sequence[torch.Tensor],
        source: SlotFiller,
        ahead: Ahead | None = None,
    ) -> None:
        """Make the slots. `ahead` is told about the blocks after the slots each time they change."""
        self._ahead = ahead
        self._device = context.device
        self._h2d = context.lanes.h2d
        self._failures = context.failures
        self._order = list(order)
        self._position = {unit.order: position for position, unit in enumerate(order)}
        self._source = source
        self._lock = threading.RLock()
        self._slots_of: dict[int, Slot] = {}
        """The last slot of each unit; another unit may have it by now."""
        self.slots = [Slot(index, buffer) for index, buffer in enumerate(buffers)]
        self.by_storage = {slot.buffer.untyped_storage().data_ptr(): slot for slot in self.slots}
        self.misses = 0
        """Blocks that had not been requested before they were needed."""
        self.few_tokens = 0
        """The most tokens of a forward that leaves experts out; 0: it has not been seen yet how they are routed."""
        self._leaves_out = False
        """Whether slots are filled without frozen experts."""

    def refit(self, order: Sequence[Unit], slots: int, more: Sequence[torch.Tensor]) -> None:
        """Serve these blocks from now on, with `slots` slots; `more` are the new buffers. No slot is bound, and no
        fetch is under way. Blocks that are not streamed any more lose their slots, so that a block that returns later
        does not find an old copy."""
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

    def begin_forward(self, tokens: int) -> None:
        """Begin a forward of the whole model, with `tokens` that may leave experts out; 0: none may. Blocks that all
        have a slot stay whole."""
        with self._lock:
            self._leave_out(0 < tokens <= self.few_tokens and len(self.slots) < len(self._order))

    def _leave_out(self, leaves_out: bool) -> None:
        if self._leaves_out and not leaves_out:
            for slot in self.slots:  # whole blocks are needed from now on
                slot.version = slot.version if slot.experts is None else -1
        self._leaves_out = leaves_out

    def give_up_slot(self, least: int) -> int:
        """Let go of a slot, in the middle of a forward or backward, where more than `least` are there. -> bytes that
        have come free; 0 where no slot can go: blocks compute in them, or copies to them are under way.

        The memory was allocated on the compute stream, so what gets it next runs after the block that has computed in
        it.
        """
        with self._lock:
            free = [slot for slot in self.slots if not slot.bound and (slot.ready is None or slot.ready.has_ended)]
            if len(self.slots) <= least or not free:
                return 0
            slot = max(free, key=self._staleness)
            self.slots.remove(slot)
            del self.by_storage[slot.buffer.untyped_storage().data_ptr()]
            self._slots_of = {order: each for order, each in self._slots_of.items() if each is not slot}
            return slot.buffer.untyped_storage().nbytes()

    def lay_out_anew(self, unit: Unit) -> None:
        """Handle new places of the unit's parameters. Its version has changed, too, so that it is fetched again."""
        with self._lock:
            for slot in self.slots:
                slot.drop_views(unit)

    def nbytes(self) -> int:
        """Return the bytes of the slots."""
        return sum(slot.buffer.numel() * slot.buffer.element_size() for slot in self.slots)

    def is_full_for(self, unit: Unit) -> bool:
        """Whether a bound slot has to be given up before `unit` can have one."""
        with self._lock:
            return self._slot_of(unit) is None and all(slot.bound for slot in self.slots)

    def acquire(self, unit: Unit, direction: Direction) -> Slot:
        """Bind the slot that holds `unit` once more and return it. Requests the blocks that `direction` needs next."""
        with self._lock:
            if direction != "inference":
                self._leave_out(False)
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
        """Unbind slots that an exception has left bound: nothing computes with them any more."""
        with self._lock:
            for slot in self.slots:
                if slot.bound:
                    slot.bound = 0
                    slot.free = self._device.mark()

    def forget(self, unit: Unit) -> None:
        """Drop the unit from the slots: its weights may have been written while they were being copied."""
        with self._lock:
            if (slot := self._slot_of(unit)) is not None:
                slot.version = -1

    def prefetch(self, current: Unit | None, direction: Direction) -> None:
        """Request the blocks that follow `current` (None: the first forward) as far as the slots go."""
        with self._lock:
            if direction != "inference":
                self._leave_out(False)
            # A block that has ended its backward is not wanted any more: its weights are about to change. The fetch
            # would delay the h2d lane until its update has run, and with it the blocks that backward needs next.
            ended = current is None or (direction == "backward" and not current.awaits_backward)
            wanted: dict[int, Unit] = {} if current is None or ended else {current.order: current}
            most = min(len(self.slots), len(self._order))
            for unit in self._upcoming(current, direction):
                if len(wanted) >= most:
                    break
                wanted[unit.order] = unit
            slots_of = self._slots_of
            for order, unit in wanted.items():
                slot = slots_of.get(order)
                # `_slot_of` without a call: mostly all of them are there.
                if slot is not None and slot.unit is unit and slot.version == unit.version:
                    continue
                if self._request(unit, keep=wanted) is None:
                    break
            if self._ahead is not None:
                self._tell(self._ahead, ended, current, direction)

    def _tell(self, ahead: Ahead, ended: bool, current: Unit | None, direction: Direction) -> None:
        coming: dict[int, Unit] = {}
        # Compute may be about to wait for the current block itself: then no block is needed sooner.
        standing_at = [] if current is None or ended else [current]
        for unit in (*standing_at, *self._upcoming(current, direction)):
            if len(coming) >= ahead.horizon:
                break
            slot = self._slot_of(unit)
            if slot is None or slot.ready is None or not slot.ready.is_complete:
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
                if unit.awaits_backward or unit.gradient.is_postponed:
                    return
                yield unit

    def _slot_of(self, unit: Unit) -> Slot | None:
        slot = self._slots_of.get(unit.order)
        return slot if slot is not None and slot.holds(unit) else None

    def _request(self, unit: Unit, keep: Container[int]) -> Slot | None:
        """Request a block. `keep`: the blocks that must not make room, by `Unit.order`."""
        slot = self._slot_for(unit, keep)
        if slot is None:
            return None
        slot.unit, slot.version = unit, unit.version
        self._slots_of[unit.order] = slot
        without_experts = self._leaves_out and bool(unit.layout.experts)
        slot.experts = set() if without_experts else None
        slot.ready = ready = Future(self._failures, f"the weights of {unit.name} in a slot of the window")
        updated, free, version = unit.updated, slot.free, unit.version

        def job() -> None:
            updated.wait()
            if unit.shared is not None:
                unit.shared.await_others(unit, version)
            self._h2d.wait(free, f"a slot of the window for {unit.name}")
            start = self._device.mark(self._h2d.stream, timed=True)
            moved = self._source.fill(unit, slot.buffer, without_experts=without_experts)
            end = self._device.mark(self._h2d.stream, timed=True)
            ready.complete(end)
            self._h2d.meter.add_interval(start, end, moved, ("weights", unit.order))

        self._h2d.submit(job)
        return slot

    def _slot_for(self, unit: Unit, keep: Container[int]) -> Slot | None:
        """Return the slot that a block is to have. `keep`: see `_request`.

        Blocks take the slots in turn. Blocks that follow each other, in either direction, then never want the same
        slot, and a block comes back to its own one: a recording reads its weights there.
        """

        def is_free(slot: Slot) -> bool:
            is_kept = slot.unit is not None and slot.unit.order in keep and slot.holds(slot.unit)
            return not slot.bound and (slot.unit is unit or not is_kept)

        own = self.slots[self._position[unit.order] % len(self.slots)]
        if is_free(own):
            return own
        # Stale or empty slots come first, then the slot whose block is last in the order.
        return max(filter(is_free, self.slots), key=self._staleness, default=None)

    @staticmethod
    def _staleness(slot: Slot) -> tuple[bool, int]:
        unit = slot.unit
        return (unit is None or not slot.holds(unit), 0 if unit is None else unit.order)
