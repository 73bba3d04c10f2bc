"""How spare GPU memory is used: for states of blocks, which are then updated there, or for activations that are kept.

Pure functions over what the first steps have shown. Seconds are per step; bytes are bytes of the GPU.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from ds_slide.plan.keeping import Filling, Keepable, fillings
from ds_slide.plan.spare import NO_SLOTS, Movable, Slots, Summable
from ds_slide.plan.step_model import Change, Step

MEMORY_RATE = 1e12
"""Bytes a second that an update on the GPU reads and writes, where the rate is not known. It is the rate of a mid-range
card, so that no state moves for a gain that its own update takes back."""


@dataclass(frozen=True)
class Tolerances:
    """What a choice leaves out or leaves free, as parts of a step's time or of a batch's need."""

    least_gain: float = 0.01
    """Part of a step. A smaller gain is within the noise, and moving states takes a second or two."""
    slowdown: float = 0.03
    """The predicted step may be longer by this part with states in memory that nothing else needs. An update on the GPU
    takes a certain time. The host's work beside it is less well hidden than predicted: 1.5 B took 0.332 s with the
    states of 17 blocks in host memory, where 0.282 were expected, and 0.307 with all of them on the GPU
    (benchmarks/results/2026-11-23_nvidia-h200_hand-sweep.md)."""
    headroom: float = 0.25
    """Part of a batch's need that stays free of states, where states cannot leave when a longer batch begins: all ranks
    would have to move them together, or gradients have been accumulated by then. Activations, which leave at once, may
    be kept there. This part is for batches of one shape."""
    headroom_of_varying: float = 1.0
    """The same where batches differ: there is room for a batch twice as long as any so far."""
    reserve: float = 1.0
    """Part of a batch's need that stays free of states that would make the step no shorter. The same number of tokens
    with more images takes more memory, and the script may load another model."""


TOLERANCES = Tolerances()


def for_states(room: float, needed: float, *, tied: bool, varying: bool = False) -> tuple[float, float]:
    """Return `room` and `reserve` of an `Offer`, from `room` bytes beside the `needed` bytes of a batch. `tied`: states
    cannot always leave when a longer batch begins. `varying`: batches have differed."""
    headroom = (TOLERANCES.headroom_of_varying if varying else TOLERANCES.headroom) if tied else 0.0
    return room - headroom * needed, (TOLERANCES.reserve - headroom) * needed


@dataclass(frozen=True)
class Choice:
    """`states`: units whose states go to the GPU. `seconds`: predicted length of the step. `slots`: slots of the window
    then. `filling`: the activations that then fit. `sums`: other units whose gradients are then added up on the GPU."""

    states: frozenset[int]
    seconds: float
    slots: int
    filling: Filling
    sums: frozenset[int] = frozenset()

    def moves(self, offer: Offer) -> bool:
        """Whether states move, the window gets more slots, or gradients are added up on the GPU."""
        return bool(self.states or self.sums) or self.slots > offer.slots.count

    @property
    def kept(self) -> int:
        """Number of blocks whose activations stay as a whole."""
        return self.filling.whole

    @property
    def mixed(self) -> int:
        """Number of blocks that keep some results."""
        return self.filling.mixed


@dataclass(frozen=True)
class Offer:
    """What is to be shared out.

    `room`: bytes. `states`: in the order of their moves. `step`: the step with nothing kept. `slots`: the window.
    Slots beyond the least give way to states, and go anyway where there are more slots than blocks that pass. More
    slots come where they save fetches that the GPU waits for. `sums`: in the order in which units get sums.
    `memory_rate`: bytes a second of the GPU's memory. `reserve`: bytes of the room that stay free of states that make
    the step no shorter.
    """

    room: float
    states: Sequence[Movable]
    activations: Collection[Keepable]
    step: Step
    slots: Slots = NO_SLOTS
    memory_rate: float = MEMORY_RATE
    reserve: float = 0.0
    sums: Sequence[Summable] = ()

    def without_moves(self) -> Offer:
        """Return the offer where no state can move, the window stays, and no gradient is added up on the GPU."""
        return replace(self, states=(), sums=(), slots=replace(self.slots, grows=False))


def share_out(offer: Offer) -> Choice:
    """Return the choice for an offer. States move where that makes the step shorter by more than its noise. More states
    then fill the room beyond the reserve, and after them more sums, as long as the step becomes no longer than
    `Tolerances.slowdown` allows. The activations in the choice are a prediction: each forward decides by the memory
    that is left in the end."""
    without, best = choose(offer.without_moves()), choose(offer)
    if best.seconds > (1 - TOLERANCES.least_gain) * without.seconds:
        best = without
    slots = replace(offer.slots, count=max(best.slots, offer.slots.count))
    taken = best.filling.nbytes + (slots.count - offer.slots.count) * slots.nbytes
    chosen = [each for each in offer.sums if each.order in best.sums]
    longest, filled = (1 + TOLERANCES.slowdown) * best.seconds, best
    for moved in _moves(offer)[len(best.states) :]:
        sums = _sums(offer.sums, moved, offer.room)
        least = _sums(chosen, moved)[-1]
        count = _slots_beside(moved, slots, offer.room - offer.reserve - taken - least.nbytes)
        if count is None or (moved.orders == best.states and count < best.slots):
            continue
        left = offer.room - offer.reserve - taken - moved.nbytes - (count - slots.count) * slots.nbytes
        # The host's additions are less well hidden than predicted where they take as long as the backwards.
        fitting = [each for each in sums if least.nbytes <= each.nbytes <= left]
        for summed in (least, *fitting[-1:]):
            found = _choice(offer, moved, best.filling, count, summed)
            if found.seconds <= longest:
                filled = found
    return filled


def choose(offer: Offer) -> Choice:
    """Return the shortest step that the room allows; among equal steps, the one with the fewest bytes.

    `states` go in the given order, and activations by their value. So a choice is two numbers, and all pairs of them
    are tried. What they leave becomes slots and sums, as far as these make the step shorter."""
    nothing = Filling(0, 0.0, 0, 0)
    best = Choice(frozenset(), offer.step.after(Change()), offer.slots.count, nothing)
    least = best.seconds, 0
    filled = fillings(offer.activations)
    for moved in _moves(offer):
        sums = _sums(offer.sums, moved, offer.room)
        for filling in filled:
            count = _slots_beside(moved, offer.slots, offer.room - filling.nbytes)
            if count is None:
                break
            found = _choice(offer, moved, filling, count)
            for choice, summed in _completed(offer, moved, sums, found, least[0]):
                nbytes = moved.nbytes + filling.nbytes + summed.nbytes
                nbytes += max(0, choice.slots - offer.slots.count) * offer.slots.nbytes
                if (choice.seconds, nbytes) < least:
                    best, least = choice, (choice.seconds, nbytes)
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
    """Return the prefixes of the states, from none to all."""
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


@dataclass(frozen=True)
class _Sums:
    """The first units that get sums, and sums over them."""

    orders: frozenset[int] = frozenset()
    nbytes: int = 0
    share: float = 0.0
    down_share: float = 0.0
    added: float = 0.0


_NO_SUMS = _Sums()


def _sums(units: Sequence[Summable], moved: _Moved, room: float = math.inf) -> list[_Sums]:
    """Return the prefixes of the units that have not `moved`, from none to all. Units whose sum alone takes more than
    `room` are left out: an outer module may be larger than several blocks."""
    found = [_NO_SUMS]
    for each in units:
        if each.order not in moved.orders and each.nbytes <= room:
            last = found[-1]
            found.append(
                _Sums(
                    last.orders | {each.order},
                    last.nbytes + each.nbytes,
                    last.share + each.share,
                    last.down_share + each.down_share,
                    last.added + each.nbytes * each.additions,
                )
            )
    return found


def _slots_beside(moved: _Moved, slots: Slots, room: float) -> int | None:
    """Return how many slots stay with the states `moved` to the GPU; None where these do not fit. `room`: bytes beside
    `slots`, for the states."""
    if moved.orders:
        return slots.fitting(room - moved.nbytes, moved.streamed)
    return slots.count if room >= 0 else None


def _completed(
    offer: Offer, moved: _Moved, sums: Sequence[_Sums], choice: Choice, least: float
) -> list[tuple[Choice, _Sums]]:
    """Return the choice with more slots and sums, as far as they fit and make the step shorter: a few ways to divide
    what is left, and none that takes longer than `least` seconds."""
    slots = offer.slots
    left = offer.room - choice.filling.nbytes - moved.nbytes + (slots.count - choice.slots) * slots.nbytes
    fitting = sums[: bisect_right(sums, max(left, 0.0), key=lambda each: each.nbytes)]
    every = fitting[-1]

    def most(each: _Sums) -> int:
        return slots.most(left - each.nbytes, moved.streamed, choice.slots)

    def seconds(step: Step, each: _Sums, count: int) -> float:
        """Return the seconds of `step` then, if additions on the GPU take no time."""
        return _choice(replace(offer, step=step), moved, choice.filling, count, replace(each, added=0.0)).seconds

    if seconds(offer.step, every, most(_NO_SUMS)) > least:  # with all slots and all sums that would fit alone
        return []

    def enough(step: Step) -> int:
        """Return the place of the fewest sums at which something else takes longest in `step`."""
        return bisect_left(
            fitting, True, key=lambda each: seconds(step, each, most(each)) <= seconds(step, every, most(each))
        )

    # The more sums, the fewer slots. With too few sums the host's additions and copies take longest, or second passes
    # that a backward waits for. More sums than enough would only take the place of slots.
    one = [replace(offer.step, two=False)] if offer.step.two else []
    found = {enough(step) for step in [offer.step, *one]}
    places = {0} | found | {max(0, place - 1) for place in found}
    divided = [fitting[place] for place in sorted(places)]
    return [(_grown(offer, moved, choice, most(each), each), each) for each in divided]


def _grown(offer: Offer, moved: _Moved, choice: Choice, most: int, sums: _Sums) -> Choice:
    """Return the choice with `sums`, and with the fewest slots that make the step as short as `most` slots do."""

    def with_slots(count: int) -> Choice:
        return _choice(offer, moved, choice.filling, count, sums)

    counts, least = range(choice.slots, most + 1), with_slots(most).seconds
    return with_slots(counts[bisect_left(counts, -least, key=lambda count: -with_slots(count).seconds)])


def _choice(offer: Offer, moved: _Moved, filling: Filling, count: int, sums: _Sums = _NO_SUMS) -> Choice:
    """Return the choice with `count` slots."""
    slots = offer.slots
    fetches = slots.fetches(0, slots.count)
    fetched = slots.fetches(moved.streamed, count) / fetches if fetches else 1.0
    on_gpu = (2 * moved.nbytes + sums.added) / offer.memory_rate
    change = Change(filling.seconds, moved.share, on_gpu, fetched, moved.disk_share, sums.share, sums.down_share)
    return Choice(moved.orders, offer.step.after(change), count, filling, sums.orders)
