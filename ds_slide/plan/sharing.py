"""What spare GPU memory is used for: states of blocks, which are then updated there, or activations that are kept.

Pure functions over what the first steps have shown. Seconds are those of one step, bytes those of the GPU.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from ds_slide.plan.keeping import Filling, Keepable, fillings
from ds_slide.plan.spare import NO_SLOTS, Movable, Slots
from ds_slide.plan.step_model import Change, Step

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
    """What is to be shared out.

    `room`: bytes. `states`: in the order in which they move. `step`: with nothing kept. `slots`: of the window; those
    beyond the least give way to states, and go anyway where fewer blocks pass than there are slots. `memory_rate`:
    bytes a second of the GPU's memory. `reserve`: bytes of the room, left free of states that make the step no
    shorter.
    """

    room: float
    states: Sequence[Movable]
    activations: Collection[Keepable]
    step: Step
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
    best = Choice(frozenset(), offer.step.after(Change()), offer.slots.count, nothing)
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
    change = Change(filling.seconds, moved.share, updates, fetched, moved.disk_share)
    return Choice(moved.orders, offer.step.after(change), count, filling)
