"""What spare GPU memory is used for: states of blocks, which are then updated there, or activations that are kept.

Pure functions over what the first steps have shown. Seconds are those of one step, bytes those of the GPU.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from ds_slide.plan.keeping import Filling, Keepable, fillings
from ds_slide.plan.spare import NO_SLOTS, Movable, Slots
from ds_slide.plan.two_passes import FIRST_PASS, Schedule

MEMORY_RATE = 1e12
"""Bytes a second that an update on the GPU reads and writes where nobody knows it; of a card of the middle class, so
that no state is moved for a gain that its own update takes back."""
LEAST_GAIN = 0.01
"""Of a step. What is less is no more than its noise, and moving states takes a second or two."""
LEVEL = 0.03
"""Of a step, that it may be expected to take longer with states in memory that nothing else needs. An update on the GPU
takes its time for certain, and what the host does beside it is not as well hidden as it is expected to be: 1.5 B took
0.332 s with the states of 17 blocks in host memory, where 0.282 were expected, and 0.307 with all of them on the GPU
(benchmarks/results/2026-11-23_nvidia-h200_hand-sweep.md)."""
HEADROOM, HEADROOM_OF_VARYING = 0.25, 1.0
"""Of a batch's need: left free of states where these cannot go when a longer batch begins, because all ranks would have
to move them together, or gradients have been accumulated by then. So little where all batches had one shape; where they
differ, room for one that is twice as long as any so far. Activations, which go at once, may be kept there."""
RESERVE = 1.0
"""Of a batch's need: left free of states that would make the step no shorter there. As many tokens with more images
take more, and somebody may load another model."""


def for_states(room: float, needed: float, *, tied: bool, varying: bool = False) -> tuple[float, float]:
    """What an `Offer` has as `room` and `reserve`, of `room` bytes beside the `needed` ones of a batch. `tied`: states
    cannot always go when a longer batch begins. `varying`: batches have differed."""
    headroom = (HEADROOM_OF_VARYING if varying else HEADROOM) if tied else 0.0
    return room - headroom * needed, (RESERVE - headroom) * needed


@dataclass(frozen=True)
class StepTimes:
    """One measured step. `compute`: when the GPU computed. `stall`: when it waited for transfers and updates. `lane`:
    of the busiest of the other lanes of this machine's processors and bus. `fetch`: of the one that brings blocks.
    `queue`: seconds of the updates that one wait is for, of all units. `disk`: of the SSD. `of_states`: the part of
    these that states take; inputs of blocks, which have the rest, do not leave with them."""

    compute: float
    stall: float
    lane: float
    fetch: float = 0.0
    queue: float = 0.0
    disk: float = 0.0
    of_states: float = 1.0

    @classmethod
    def of(
        cls,
        busy: Mapping[str, float],
        step_s: float,
        schedule: Schedule,
        *,
        holding: float = 0.0,
        inputs: int = 0,
        on_ssd: int = 0,
    ) -> StepTimes:
        """Of a step of `step_s` seconds in which the lanes were `busy` for so many. `holding`: of the update's lane,
        for gradients that wait for the step, which are held under the backwards and make no queue longer that a
        forward waits for. `inputs`: bytes of inputs of blocks, of the `on_ssd` that the disk has read and written."""
        compute = busy["compute"]
        lane = max((seconds for lane, seconds in busy.items() if lane not in ("compute", "ssd")), default=0.0)
        updates = max(0.0, busy.get("update", 0.0) - holding)
        queue = FIRST_PASS * updates if schedule == "two passes" else updates
        if schedule == "under backward":
            queue = lane
        of_states = 1.0 - min(1.0, inputs / on_ssd) if on_ssd else 1.0
        stall, fetch, disk = max(0.0, step_s - compute), busy.get("h2d", 0.0), busy.get("ssd", 0.0)
        return cls(compute, stall, lane, fetch, queue, disk, of_states)

    def predicted(
        self,
        recomputed_less: float,
        moved_share: float,
        updates: float,
        fetched: float = 1.0,
        disk_share: float = 0.0,
    ) -> float:
        """Of a step with so many seconds less of recomputation, so much of the host's work gone, seconds of updates on
        the GPU, so many times the fetches, and so much of the disk's work on states gone: what is hidden costs nothing,
        until what hides it has become shorter.

        The GPU waits for the end of a queue, and what leaves it shortens the wait second for second, until it is over:
        with updates under backward the end comes after the backward (7.6 B waited 0.32 s of 1.50, and 0.05 s of 1.24
        when 12 of its 28 blocks had moved), with deferred ones under the next forward, whose last block waits longest.
        Where a disk is busy for longer than a queue, the updates themselves wait for it.
        """
        computes = self.compute - recomputed_less + updates
        disk_share *= self.of_states
        if self.disk > self.queue:
            gone = max(self.stall, self.disk) * disk_share
        else:
            gone = max(self.stall, self.queue) * moved_share
        lanes = self.lane * (1.0 - moved_share), self.fetch * fetched, self.disk * (1.0 - disk_share)
        return max(computes + max(0.0, self.stall - gone), *lanes)


@dataclass(frozen=True)
class Choice:
    """`states`: units whose states go to the GPU. `seconds`: of the step that is expected. `slots`: that the window has
    then. `filling`: of the activations that then fit."""

    states: frozenset[int]
    seconds: float
    slots: int
    filling: Filling

    @property
    def kept(self) -> int:
        """Number of blocks whose activations stay as a whole."""
        return self.filling.whole

    @property
    def mixed(self) -> int:
        """Of those that keep some results."""
        return self.filling.mixed


@dataclass(frozen=True)
class Offer:
    """What is to be shared out. `room`: bytes. `states`: in the order in which they move. `slots`: of the window; those
    beyond the least give way to states, and go anyway where fewer blocks pass than there are slots. `memory_rate`:
    bytes a second of the GPU's memory. `reserve`: bytes of the room, left free of states that make the step no
    shorter."""

    room: float
    states: Sequence[Movable]
    activations: Collection[Keepable]
    times: StepTimes
    slots: Slots = NO_SLOTS
    memory_rate: float = MEMORY_RATE
    reserve: float = 0.0


def share_out(offer: Offer) -> Choice:
    """States move where that makes the step shorter by more than its noise, and then into what is left beyond the
    reserve, as far as the step is level with that. What the choice keeps of activations is what is expected; what is
    left in the end decides in each forward."""
    without, best = choose(replace(offer, states=())), choose(offer)
    if best.seconds > (1 - LEAST_GAIN) * without.seconds:
        best = without
    room = offer.room - offer.reserve - best.filling.nbytes
    filled = [
        found
        for moved in _moves(offer)[len(best.states) + 1 :]
        if (found := _expected(offer, moved, best.filling, room)) and found.seconds <= (1 + LEVEL) * best.seconds
    ]
    return filled[-1] if filled else best


def choose(offer: Offer) -> Choice:
    """The shortest step that the room allows, of those the one that takes the fewest bytes.

    `states` go in the order in which they are given, and activations by their value, so that a choice is two numbers,
    and all pairs of them are looked at."""
    nothing = Filling(0, 0.0, 0, 0)
    best = Choice(frozenset(), offer.times.predicted(0.0, 0.0, 0.0), offer.slots.count, nothing)
    least = best.seconds, 0
    filled = fillings(offer.activations)
    for moved in _moves(offer):
        for filling in filled:
            found = _expected(offer, moved, filling, offer.room - filling.nbytes)
            if found is None:
                break
            if (found.seconds, moved.nbytes + filling.nbytes) < least:
                best, least = found, (found.seconds, moved.nbytes + filling.nbytes)
    return best


@dataclass(frozen=True)
class _Moved:
    """The first states, and sums over them."""

    orders: frozenset[int]
    nbytes: int
    share: float
    disk_share: float
    streamed: int


def _moves(offer: Offer) -> list[_Moved]:
    """The first states, from none to all of them."""
    found = [_Moved(frozenset(), 0, 0.0, 0.0, 0)]
    for each in offer.states:
        last = found[-1]
        found.append(
            _Moved(
                last.orders | {each.order},
                last.nbytes + each.nbytes,
                last.share + each.share,
                last.disk_share + each.disk_share,
                last.streamed + each.streamed,
            )
        )
    return found


def _expected(offer: Offer, moved: _Moved, filling: Filling, room: float) -> Choice | None:
    """With these states on the GPU, and so many bytes beside the activations; None where they do not fit."""
    slots, left = offer.slots, room - moved.nbytes
    count = slots.fitting(left, moved.streamed) if moved.orders else slots.count if left >= 0 else None
    if count is None:
        return None
    fetches = slots.fetches(0, slots.count)
    fetched = slots.fetches(moved.streamed, count) / fetches if fetches else 1.0
    updates = 2 * moved.nbytes / offer.memory_rate
    seconds = offer.times.predicted(filling.seconds, moved.share, updates, fetched, moved.disk_share)
    return Choice(moved.orders, seconds, count, filling)
