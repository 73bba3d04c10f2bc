"""States that move from host memory or SSD to the GPU and back while the run goes on, between two steps.

The GPU memory that activations leave free is known when the first steps have been run. A unit is *promoted* then: its
states are copied to the GPU, are updated there from the next step on, and pass through no lane any more. It is
*demoted* where the memory is needed for something else: a larger batch, an evaluation, a second engine.

A promoted unit keeps its state buffers in host memory and its places on SSD (`Unit.home`), which stay in the plan.
Demotion writes the states back there. So it takes no host memory at a moment when there may be none, and page-locks
nothing a second time, which takes 0.35 s a GiB. In between the old copies there are out of date, and nothing reads
them: copies that were read ahead have been forgotten when the unit has settled, and are not asked for again.

The bits of weights and states are the same before and after, and later steps give the same bits as with that placement
from the start (`docs/architecture.md`, "The idea": placement never changes the result).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TypeVar

import torch
from tqdm import tqdm

from ds_slide.errors import SlideError
from ds_slide.plan.allocations import (
    BLOCK_RING,
    GATHERED,
    OUTER_RING,
    PIECES_RING,
    SLOTS,
    gpu_sum_of,
    of_promoted,
    promoted_buffer_of,
    whole_weights_of,
)
from ds_slide.plan.memory import Plan
from ds_slide.plan.movable import (
    movable_states,
    promoted_states,
    summable_units,
    summed_units,
    why_fixed,
    window_slots,
)
from ds_slide.plan.spare import NO_SLOTS, Movable, Slots, Summable, least_slots
from ds_slide.report.log import size
from ds_slide.runtime.build_units import state_on_gpu
from ds_slide.runtime.core.allocator import Allocator
from ds_slide.runtime.core.running import deferred_interrupt
from ds_slide.runtime.core.unit import Unit
from ds_slide.runtime.engine import SlideRuntime
from ds_slide.runtime.memory.staged_copies import StagedCopies
from ds_slide.store.ssd.extents import PAGE
from ds_slide.store.ssd.unit import page_buffer
from ds_slide.store.state import UnitState

T = TypeVar("T")


@dataclass(frozen=True)
class Moved:
    """The units that a move has moved, by `Unit.order`. `no_room`: units that were to be promoted, and stay where they
    are because the GPU had no memory for them."""

    promoted: tuple[int, ...] = ()
    demoted: tuple[int, ...] = ()
    no_room: tuple[int, ...] = ()


@dataclass(frozen=True)
class _Room:
    """GPU memory for a unit."""

    state: UnitState
    resident: torch.Tensor


def move(
    runtime: SlideRuntime, on_gpu: frozenset[int], *, slots: int | None = None, summed: frozenset[int] | None = None
) -> Moved | None:
    """Update the units `on_gpu`, by `Unit.order`, on the GPU from now on, and no others. `slots`: the most slots of the
    window from now on; None: as before. `summed`: units outside the GPU whose gradients are added up there from now on,
    and no others'; None: as before. Returns None, and does nothing, where units cannot move now: gradients are
    accumulated, a forward or backward is under way, or a script has gathered parameters of these units.

    Units are promoted, and get sums, in their order as far as the GPU has memory. Collective: all ranks call it with
    the same values at the same place of the program. SlideError for units that can never move (`why_fixed`).
    """
    units, ranks, plan = runtime.units, runtime.parts.context.ranks, runtime.parts.plan
    present, sums = plan.placement.window, plan.placement.summed
    window = present if slots is None else slots
    summed = (sums if summed is None else summed) - on_gpu
    moving = [units[order] for order in sorted(on_gpu ^ {unit.order for unit in units if not unit.is_uploaded})]
    is_moment = runtime.interruptions.is_between_steps() and not any(_is_gathered_by_script(unit) for unit in moving)
    if ranks.world_size > 1:
        values = {"the units": sorted(on_gpu), "the number of slots": window, "the units with sums": sorted(summed)}
        ranks.require_equal(values, "what is to move")
    if not ranks.least([is_moment])[0]:
        return None
    if not moving and (window, summed) == (present, sums):
        return Moved()
    if window < 1:
        raise SlideError(f"the window cannot have {window} slots; give it one at least")
    for unit in moving:
        if (reason := why_fixed(plan, unit.order)) is not None:
            raise SlideError(f"the states of {unit.name} cannot move to the GPU and back: {reason}")
    # Tensors made in inference mode, by an evaluation, could not be used in a forward with gradients.
    with deferred_interrupt(), torch.inference_mode(False):
        return _move(runtime, moving, window, summed)


def _move(runtime: SlideRuntime, moving: Sequence[Unit], slots: int, summed: frozenset[int]) -> Moved:
    present = runtime.parts.plan.placement
    _settle(runtime, [*moving, *(runtime.units[order] for order in sorted(present.summed - summed))])
    runtime.parts.spare.activations.captures.leave_weights()  # recordings hold the weights where they are
    demoted = [unit for unit in moving if not unit.is_uploaded]
    wanted = [unit for unit in moving if unit.is_uploaded]
    promoted: list[Unit] = []
    try:
        with _copies(runtime, moving) as copies:
            # Demotions first: their memory may be the room for promotions.
            for unit in demoted:
                _demote(runtime, unit, copies)
            for order in present.summed - summed:
                runtime.units[order].gradient.gpu_sum = None
            if demoted or slots < present.window:
                _refit(runtime, slots)
            if wanted or slots > present.window or summed - present.summed:
                # Otherwise the states would lie in the middle of memory that batches use again: a state of 150 MB cut
                # from the 1 GB of a batch's logits leaves the next batch no place for its logits.
                runtime.device.release_cached()
            for unit, room in zip(wanted, _make_rooms(runtime, wanted), strict=False):
                _promote(runtime, unit, room, copies)
                promoted.append(unit)
    finally:
        _refit(runtime, slots)
        _make_sums(runtime, [runtime.units[order] for order in sorted(summed)])
    if runtime.parts.window is not None:
        runtime.device.synchronize()  # new slots are zeroed on this thread's stream, and filled on the lane's
        runtime.parts.window.prefetch(None, "forward")
    orders = [tuple(unit.order for unit in some) for some in (promoted, demoted, wanted[len(promoted) :])]
    return Moved(*orders)


def _is_gathered_by_script(unit: Unit) -> bool:
    """Whether parameters hold weights that a script has gathered: these would be gone when they are bound anew."""
    bound = None if unit.resident is None else unit.resident.untyped_storage().data_ptr()
    return any(each.numel() and each.untyped_storage().data_ptr() != bound for each in unit.parameters)


def _settle(runtime: SlideRuntime, moving: Iterable[Unit]) -> None:
    """Wait until no lane, no rank and no stream uses the units or the window."""
    for unit in moving:
        runtime.access.settle(unit)
    runtime.access.begin_writing()
    runtime.parts.context.lanes.h2d.drain()
    runtime.device.synchronize()


# ---- one unit --------------------------------------------------------------------------------------------------------


def _demote(runtime: SlideRuntime, unit: Unit, copies: StagedCopies) -> None:
    home = unit.home
    assert home is not None
    _copy_on_all(runtime, unit, copies, home)
    resident = None if unit.spec.kind == "block" else unit.resident
    several, on_disk = runtime.parts.context.ranks.world_size > 1, home.weights.buffer.tier == "ssd"
    gathered = several and (runtime.parts.context.shared is None or on_disk)
    unit.state, unit.home, unit.resident, unit.is_gathered = home, None, resident, gathered
    _show(runtime, unit)


def _promote(runtime: SlideRuntime, unit: Unit, room: _Room, copies: StagedCopies) -> None:
    home = unit.state
    _copy_on_all(runtime, unit, copies, room.state)
    gathered = runtime.parts.context.ranks.world_size > 1
    unit.state, unit.home, unit.resident, unit.is_gathered = room.state, home, room.resident, gathered
    _show(runtime, unit)


def _copy_on_all(runtime: SlideRuntime, unit: Unit, copies: StagedCopies, target: UnitState) -> None:
    """Copy the states of `unit` to `target`. The disk of one rank may fail: then the other ranks raise, too, since they
    would gather the weights with it next. Collective."""
    error: Exception | None = None
    try:
        copies.copy_states(target, unit.state)
    except Exception as caught:
        error = caught
    ranks = runtime.parts.context.ranks
    given = ranks.exchange(None if error is None else str(error), f"moving the states of {unit.name}")
    if error is not None:
        raise error
    for rank, why in enumerate(given):
        if why is not None:
            raise SlideError(
                f"the states of {unit.name} have not moved, because rank {rank} could not copy them: {why}"
            )


@contextmanager
def _copies(runtime: SlideRuntime, moving: Sequence[Unit]) -> Iterator[StagedCopies]:
    """Yield what copies the states of the units, with a progress bar on rank 0.

    Gradients pass through the buffer at other times: here it is free, or comes free with the updates under way.
    """
    context = runtime.parts.context
    pools = [context.allocator.pools[what] for what in (PIECES_RING, BLOCK_RING, OUTER_RING)]
    pools = [pool for pool in pools if pool.addresses]
    lease = pools[0].lease() if pools and moving else None
    buffer = None if lease is None else lease.buffer
    if runtime.parts.ssd is not None and (buffer is None or buffer.numel() < 2 * PAGE):
        buffer = page_buffer(2 * PAGE)  # the model is tiny
    progress = tqdm(
        total=sum(unit.state.nbytes() for unit in moving),
        desc="ds_slide: moving states",
        unit="B",
        unit_scale=True,
        disable=None if context.ranks.rank == 0 else True,
        leave=False,
        delay=3,  # seconds; a shorter move does not hold the training up
    )
    copies = StagedCopies(buffer, context, progress)
    try:
        with progress:
            yield copies
    finally:
        copies.close()
        if lease is not None:
            lease.release()


def _show(runtime: SlideRuntime, unit: Unit) -> None:
    """Show the new state buffers of `unit` to all parts that knew the old ones."""
    runtime.access.weights_changed(unit)
    runtime.bindings.residents.leave(unit)
    runtime.parts.context.clients.adopt(unit)
    if unit.resident is not None:
        runtime.resident_weights.bind(unit)
    runtime.parts.context.failures.progressed()


# ---- memory ----------------------------------------------------------------------------------------------------------


def _make_rooms(runtime: SlideRuntime, units: Sequence[Unit]) -> list[_Room]:
    """Return GPU memory for the first of `units` that find some."""
    if not units or not _make_scratch(runtime, units):
        return []
    return _as_many_as_fit(runtime, (_make_room(runtime, unit) for unit in units))


def _make_room(runtime: SlideRuntime, unit: Unit) -> _Room:
    parts, name = runtime.parts, unit.name
    allocator = Allocator(
        of_promoted(parts.plan.units[unit.order], parts.plan.needs), parts.context.memory, runtime.device
    )

    def take(buffer: str, dtype: torch.dtype) -> torch.Tensor:
        return allocator.tensor(promoted_buffer_of(name, buffer), dtype)

    resident, several = unit.resident, parts.context.ranks.world_size > 1
    if several and resident is None:
        resident = allocator.tensor(whole_weights_of(name), unit.dtype)
    weight = take("weight", unit.dtype) if several or resident is None else resident
    gradient = unit.state.dtype_of("gradient") if unit.state.has("gradient") else unit.codec.dtype
    buffers = {"weight": weight, **{spec.name: take(spec.name, spec.dtype) for spec in unit.state.specs}}
    buffers["gradient"] = take("gradient", gradient)
    state = state_on_gpu(unit.state.specs, buffers, runtime.device)
    allocator.require_all_given()
    return _Room(state, weight if resident is None else resident)


def _make_scratch(runtime: SlideRuntime, units: Sequence[Unit]) -> bool:
    """Have the GPU buffer where all ranks gather the weights of `units` once promoted. -> whether it fits."""
    parts = runtime.parts
    if parts.context.ranks.world_size == 1:
        return True
    nbytes = _plan_with(runtime, parts.plan.placement.window, units).entry(GATHERED).nbytes
    if parts.gathers.scratch is not None and parts.gathers.scratch.numel() >= nbytes:
        return True
    made = _as_many_as_fit(runtime, (_bytes_on_gpu(runtime, nbytes) for _ in range(1)))
    parts.gathers.scratch = made[0] if made else parts.gathers.scratch
    return bool(made)


def _refit(runtime: SlideRuntime, slots: int) -> None:
    """Fit the plan, the window and the buffer of gathers to the units as they are now."""
    parts, plan = runtime.parts, _plan_with(runtime, slots)
    streamed = [unit for unit in runtime.units if unit.is_streamed]
    if parts.window is not None:
        entry, present = plan.entry(SLOTS), len(parts.window.slots)
        more: list[torch.Tensor] = []
        if entry.count > present:
            more = _as_many_as_fit(runtime, (_bytes_on_gpu(runtime, entry.piece) for _ in range(present, entry.count)))
        count = min(entry.count, present + len(more))
        if streamed and not count:
            raise SlideError(f"GPU tier: {size(entry.piece)} for a slot of the window could not be had; free some")
        if count < entry.count:
            plan = _plan_with(runtime, count)
        parts.window.refit(streamed, count, more)
    if parts.context.ranks.world_size > 1:
        _shrink_scratch(runtime, plan.entry(GATHERED).nbytes)
    parts.gathers.forget(all_fit=plan.placement.window >= len(streamed))
    parts.plan = plan


def _make_sums(runtime: SlideRuntime, wanted: Sequence[Unit]) -> None:
    """Give the first of `wanted` that find GPU memory a buffer that adds up their gradients, if they have none."""
    parts = runtime.parts
    plan = _plan_with(runtime, parts.plan.placement.window, summed=wanted)
    allocator = Allocator(
        [entry for entry in plan.allocations if entry.why == "held gradients"], parts.context.memory, runtime.device
    )
    without = [unit for unit in wanted if unit.gradient.gpu_sum is None]
    made = _as_many_as_fit(
        runtime, (allocator.tensor(gpu_sum_of(unit.name), unit.state.dtype_of("gradient")) for unit in without)
    )
    for unit, buffer in zip(without, made, strict=False):
        unit.gradient.gpu_sum = buffer
    parts.plan = _plan_with(runtime, parts.plan.placement.window)


def _shrink_scratch(runtime: SlideRuntime, nbytes: int) -> None:
    gathers = runtime.parts.gathers
    if gathers.scratch is not None and gathers.scratch.numel() > nbytes:
        gathers.scratch = None  # before the next one is made, which then finds room
        gathers.scratch = _bytes_on_gpu(runtime, nbytes) if nbytes else None


def _plan_with(runtime: SlideRuntime, slots: int, more: Iterable[Unit] = (), summed: Iterable[Unit] = ()) -> Plan:
    """Return the plan of the units as they are, with `more` promoted too, and sums for `summed` too."""
    promoted = [unit for unit in runtime.units if unit.home is not None]
    summing = [unit for unit in runtime.units if unit.gradient.gpu_sum is not None]
    orders = [frozenset(unit.order for unit in some) for some in ((*promoted, *more), (*summing, *summed))]
    return runtime.parts.plan.with_promoted(orders[0], slots, orders[1])


def _bytes_on_gpu(runtime: SlideRuntime, nbytes: int) -> torch.Tensor:
    return torch.zeros(nbytes, dtype=torch.uint8, device=runtime.device.torch)


def _as_many_as_fit(runtime: SlideRuntime, making: Iterator[T]) -> list[T]:
    """Return what `making` makes, up to the first that finds no GPU memory, on any rank. Collective."""
    made: list[T] = []
    with suppress(torch.OutOfMemoryError):
        for each in making:
            made.append(each)
    return made[: runtime.parts.context.ranks.least([len(made)])[0]]


class RunningStates:
    """The states of a running engine as candidates for spare GPU memory, in the order of `movable_states`."""

    def __init__(self, runtime: SlideRuntime) -> None:
        self._runtime = runtime
        plan = runtime.parts.plan
        self._least = least_slots(plan.placement.window, plan.needs)

    def movable(self, forwards: int) -> list[Movable]:
        """Return the movable states in host memory and on SSD, with `forwards` forwards a step."""
        return movable_states(self._runtime.parts.plan, forwards)

    def promoted(self) -> list[Movable]:
        """Return the states that were promoted to the GPU."""
        return promoted_states(self._runtime.parts.plan)

    def summable(self, forwards: int) -> list[Summable]:
        """Return the units whose gradients may be added up on the GPU, with `forwards` forwards a step."""
        return summable_units(self._runtime.parts.plan, forwards)

    def summed(self) -> list[Movable]:
        """Return the units whose gradients are added up on the GPU."""
        return summed_units(self._runtime.parts.plan)

    def on_their_way(self) -> int:
        """Return the bytes of gradients that leave the GPU by themselves."""
        return self._runtime.parts.gradients.on_their_way

    def slots(self, forwards: int) -> Slots:
        """Return the slots of the window, which serves `forwards` forwards a step."""
        parts = self._runtime.parts
        return NO_SLOTS if parts.window is None else window_slots(parts.plan, forwards)

    def may_park(self) -> bool:
        """Whether states on the GPU can make room for a forward or a backward under way."""
        return any(map(self._runtime.parked.may_park, self._runtime.units))

    def park(self) -> int:
        """Park the states of the unit that went to the GPU last and is not parked yet. -> bytes that have come free."""
        promoted = [self._runtime.units[each.order] for each in reversed(self.promoted())]
        unit = next(filter(self._runtime.parked.may_park, promoted), None)
        return 0 if unit is None else self._runtime.parked.park(unit)

    def give_up_slot(self) -> int:
        """Give up a slot of the window that hides no fetch, in a forward or backward under way. -> bytes that have come
        free. Ranks give none up: each would fetch, and gather, at other places of the program."""
        parts = self._runtime.parts
        if parts.window is None or parts.context.ranks.world_size > 1:
            return 0
        freed = parts.window.give_up_slot(self._least)
        if freed:
            parts.plan = _plan_with(self._runtime, len(parts.window.slots))
        return freed

    def give_up_sum(self) -> int:
        """Give up the sum of a unit's gradients on the GPU, in a forward or backward under way. What is in it goes down
        first. -> bytes that have come free. Ranks give none up: their placements have to be the same."""
        parts = self._runtime.parts
        if parts.context.ranks.world_size > 1:
            return 0
        units = [self._runtime.units[each.order] for each in reversed(self.summed())]
        # The gradient that is being taken may be half in its sum.
        unit = next((unit for unit in units if not unit.gradient.finalized), None)
        if unit is None or unit.gradient.gpu_sum is None:
            return 0
        parts.gradients.bring_down(unit)
        unit.gradient.arrived.synchronize()
        parts.context.lanes.d2h.drain()  # it has let go of the buffer
        freed, unit.gradient.gpu_sum = unit.gradient.gpu_sum.nbytes, None
        parts.plan = _plan_with(self._runtime, parts.plan.placement.window)
        return freed

    def may_move(self) -> bool:
        """Whether states may move now: nothing is accumulated, and no graph waits for its backward."""
        return self._runtime.interruptions.is_between_steps()

    def move(self, orders: frozenset[int], slots: int | None = None, summed: frozenset[int] | None = None) -> bool:
        """Make `orders` the promoted units, as far as there is memory, give the window at most `slots` slots, but never
        fewer than the least, and add up the gradients of the units `summed` on the GPU. None: as before. -> whether
        they could move now. Collective."""
        window = self._runtime.parts.window
        if slots is None:
            slots = 0 if window is None else len(window.slots)
        on_gpu = orders | self._runtime.parts.plan.placement.on_gpu
        return move(self._runtime, on_gpu, slots=max(slots, self._least), summed=summed) is not None
