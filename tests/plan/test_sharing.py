"""How spare GPU memory is shared out."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from keepable_blocks import keepables, movables, summables, windows

from ds_slide.plan import sharing
from ds_slide.plan.keeping import Keepable, fillings
from ds_slide.plan.sharing import TOLERANCES, Choice, Offer, choose, share_out
from ds_slide.plan.spare import Movable, Slots, Summable
from ds_slide.plan.step_model import PASS_SHARE, Change, Step

GB = 10**9
BLOCKS = 36

# A 3 B model, 8 x 2048 tokens, on an H200 (docs/results): 77 M parameters a block.
ACTIVATIONS = [Keepable(order, int(1.32 * GB), 0.0033) for order in range(1, BLOCKS + 1)]
STATES = [Movable(order, int(1.2 * GB), 1 / BLOCKS) for order in range(1, BLOCKS + 1)]


def waiting(compute: float, stall: float, update: float, fetch: float = 0.0, disk: float = 0.0) -> Step:
    """A step with deferred updates, in which the GPU waits for `stall` seconds."""
    return Step("deferred", compute + stall, {"compute": compute, "update": update, "h2d": fetch, "ssd": disk})


CLIPPED = waiting(compute=0.69, stall=0.31, update=0.31)
HIDDEN = waiting(compute=0.70, stall=0.0, update=0.45)


def test_what_waits_for_updates_gets_states_first() -> None:
    choice = choose(Offer(10 * GB, STATES, ACTIVATIONS, CLIPPED))
    assert choice.states == frozenset(range(1, 9)) and choice.kept == 0
    everything = choose(Offer(200 * GB, STATES, ACTIVATIONS, CLIPPED))
    assert len(everything.states) == BLOCKS and everything.kept == BLOCKS
    assert everything.seconds == pytest.approx(0.69 - BLOCKS * 0.0033 + BLOCKS * 2.4e-3)


def test_where_updates_are_hidden_activations_go_first() -> None:
    choice = choose(Offer(20 * GB, STATES, ACTIVATIONS, HIDDEN))
    assert choice.states == frozenset() and choice.kept == 15


def test_when_the_hidden_lane_comes_out_states_follow() -> None:
    """Keeping shortens the step until the update is the bound; then only both together shorten it further."""
    times = waiting(compute=0.70, stall=0.0, update=0.69)
    choice = choose(Offer(60 * GB, STATES, ACTIVATIONS, times))
    assert choice.states and choice.kept
    assert choice.seconds < choose(Offer(60 * GB, (), ACTIVATIONS, times)).seconds


def test_what_leaves_a_queue_shortens_the_wait_for_its_end() -> None:
    """7.6 B without clipping: updates of 1.3 s, of which 0.32 come after the backward."""
    times = waiting(compute=1.18, stall=0.32, update=1.3)
    states = [Movable(order, int(3.3 * GB), 1 / 28) for order in range(28)]
    choice = choose(Offer(100 * GB, states, (), times))
    assert choice.states == frozenset(range(7))
    assert choice.seconds == pytest.approx(1.18 + 7 * 6.6e-3)


def test_spare_memory_goes_to_states_on_ssd_before_activations() -> None:
    """The disk takes 4 s for three units, and the recomputation of all blocks 0.1."""
    times = waiting(compute=0.5, stall=3.6, update=0.3, disk=4.0)
    states = [Movable(order, GB, 0.2, disk_share=1 / 3) for order in range(3)]
    blocks = [Keepable(order, GB, 0.05) for order in range(4, 6)]
    choice = choose(Offer(3.5 * GB, states, blocks, times))
    assert len(choice.states) == 3 and choice.seconds < 0.51


def test_updates_on_a_gpu_take_as_long_as_its_memory_does() -> None:
    """3.85 GB of a block of 14 B for a wait of 2 ms: 8 ms by a card of the middle class, 1.8 ms by an H200."""
    states, times = [Movable(1, 3_850_000_000, 0.1)], waiting(compute=1.0, stall=0.02, update=0.02)
    assert not choose(Offer(10 * GB, states, (), times)).states
    assert choose(Offer(10 * GB, states, (), times, memory_rate=4.2e12)).states


SLOTS = Slots(count=19, least=4, nbytes=154 * 10**6, blocks=BLOCKS)


def test_products_of_updates_stay_with_the_gpu() -> None:
    """Muon of 3 B: states move until what is left of the wait hides behind the products, and activations get the
    rest. The GPU waits for 0.34 of the 0.6 s of updates, and makes that share of their products meanwhile."""
    stalled = Step("deferred", 1.09, {"compute": 0.59 + 0.16, "update": 0.6, "products": 0.19})
    states = [replace(each, nbytes=int(0.62 * GB)) for each in STATES]
    activations = [replace(each, nbytes=int(1.43 * GB), seconds=0.0045) for each in ACTIVATIONS]
    with_products = choose(Offer(60 * GB, states, activations, stalled))
    without = choose(Offer(60 * GB, states, activations, replace(stalled, lanes={**stalled.lanes, "products": 0.0})))
    assert len(with_products.states) < len(without.states)
    assert with_products.kept > without.kept
    assert with_products.seconds > 0.59 + 0.19 * 0.34 / 0.6


def test_products_beside_the_model_keep_no_states_in_host_memory() -> None:
    """3 B in 24 GiB, without clipping: the products ran all the time, beside 0.69 s of the GPU's own work and in 0.37 s
    of waiting. With the states of nothing on the GPU and 9 blocks kept the step took 1.02 s, and the link was the
    bound."""
    busy = {"compute": 0.69, "update": 0.98, "products": 0.25, "h2d": 0.18, "d2h": 0.12}
    measured = Step("under backward", 1.06, busy)
    states = [replace(each, nbytes=int(0.8 * GB)) for each in STATES]
    activations = [replace(each, nbytes=int(1.43 * GB), seconds=0.0045) for each in ACTIVATIONS]
    choice = choose(Offer(13.4 * GB, states, activations, measured))
    assert len(choice.states) > 8 and choice.seconds < 0.9


def test_slots_that_hide_no_fetch_give_way() -> None:
    assert len(choose(Offer(10 * GB, STATES, ACTIVATIONS, CLIPPED)).states) == 8
    choice = choose(Offer(10 * GB, STATES, ACTIVATIONS, CLIPPED, SLOTS))
    assert len(choice.states) == 10 and choice.slots == 6
    everything = choose(Offer(200 * GB, STATES, ACTIVATIONS, CLIPPED, SLOTS))
    assert len(everything.states) == BLOCKS and everything.slots == 0


def test_slots_stay_where_fetches_are_what_takes_time() -> None:
    """A slow bus, and fetches of 4 micro-batches."""
    times = waiting(compute=0.69, stall=0.31, update=1.0, fetch=1.0)
    slots = Slots(count=19, least=4, nbytes=154 * 10**6, blocks=BLOCKS, passes=8)
    choice = choose(Offer(1.3 * GB, STATES, (), times, slots))
    assert choice.slots == 19 and len(choice.states) == 1
    assert choose(Offer(1.3 * GB, STATES, (), CLIPPED, slots)).slots < 19


def test_slots_come_where_the_gpu_waits_for_fetches() -> None:
    """3 B in 24 GiB, 8 micro-batches of one sequence: 16 fetches of 5.5 GB take 1.6 s, and all products 0.6 s."""
    step = waiting(compute=0.6, stall=1.0, update=0.4, fetch=1.6)
    slots = Slots(count=6, least=4, nbytes=154 * 10**6, blocks=BLOCKS, passes=16, grows=True)
    enough = choose(Offer(10 * GB, STATES, (), step, slots))
    assert (enough.slots, enough.states) == (27, frozenset()) and enough.seconds == pytest.approx(0.6)
    some = choose(Offer(10 * slots.nbytes + 1, (), (), step, slots))
    assert some.slots == 16
    assert some.seconds == pytest.approx(1.6 * slots.fetches(0, 16) / slots.fetches(0, 6))
    assert choose(Offer(10 * GB, (), (), step, replace(slots, grows=False))).slots == 6


def test_no_more_slots_come_than_save_something() -> None:
    """Fetches that products hide take no memory."""
    slots = Slots(count=6, least=4, nbytes=154 * 10**6, blocks=BLOCKS, passes=16, grows=True)
    assert choose(Offer(10 * GB, (), (), waiting(compute=1.0, stall=0.0, update=0.2, fetch=0.9), slots)).slots == 6
    choice = choose(Offer(10 * GB, (), (), waiting(compute=1.0, stall=0.2, update=0.2, fetch=1.2), slots))
    assert 6 < choice.slots < 16 and choice.seconds == pytest.approx(1.0)


def test_states_that_fill_memory_leave_the_slots() -> None:
    step = waiting(compute=0.6, stall=1.0, update=0.4, fetch=1.6)
    slots = Slots(count=6, least=4, nbytes=154 * 10**6, blocks=BLOCKS, passes=16, grows=True)
    filled = share_out(Offer(40 * GB, STATES, (), step, slots, memory_rate=4.2e12))
    assert filled.states and filled.slots == BLOCKS - len(filled.states)


def holding(compute: float, stall: float, update: float, fetch: float, down: float) -> Step:
    """The same with accumulation: three quarters of `update` add gradients up, and their copies take `down`."""
    step = waiting(compute, stall, update, fetch)
    lanes = {**step.lanes, "d2h": down}
    return replace(step, lanes=lanes, holding_s=0.75 * update, down_s=down, micro_batches=8)


SUMS = [Summable(order, 154 * 10**6, 1 / BLOCKS, 7 / 8 / BLOCKS, 7) for order in range(BLOCKS, 0, -1)]


def test_sums_come_where_the_host_adds_and_copies_longest() -> None:
    offer = Offer(3 * GB, (), (), holding(1.0, 2.0, 3.0, 0.5, 2.0), sums=SUMS)
    choice = choose(offer)
    assert choice.sums == {each.order for each in SUMS[:19]}  # as many as fit
    assert choice.seconds == pytest.approx(3.0 - 19 / BLOCKS * 2.25, rel=0.02)
    everything = choose(replace(offer, room=10 * GB))
    assert everything.seconds == pytest.approx(3.0 + 1.0 - (1 / 3 + 2.25), rel=0.04)  # the wait for updates stays
    assert 26 < len(everything.sums) < BLOCKS  # no more than save time
    assert not choose(replace(offer, step=holding(3.0, 0.0, 2.5, 0.5, 2.0))).sums  # the GPU hides it all


def test_sums_and_slots_divide_what_is_left() -> None:
    """Fetches and additions take equally long: memory for one of them alone would save nothing."""
    slots = Slots(count=4, least=4, nbytes=154 * 10**6, blocks=BLOCKS, passes=16, grows=True)
    offer = Offer(5 * GB, (), (), holding(0.6, 2.4, 3.0, 3.0, 2.0), slots, sums=SUMS)
    choice = choose(offer)
    assert choice.slots > 10 and len(choice.sums) > 10
    alone = choose(replace(offer, sums=())), choose(replace(offer, slots=replace(slots, grows=False)))
    assert choice.seconds < 0.9 * min(each.seconds for each in alone)


def test_a_sum_that_does_not_fit_keeps_no_other_out() -> None:
    """That of an outer module comes first, and may be larger than several blocks."""
    outer = Summable(0, 4 * GB, 0.1, 0.1, 7)
    offer = Offer(3 * GB, (), (), holding(1.0, 2.0, 3.0, 0.5, 2.0), sums=[outer, *SUMS])
    assert choose(offer).sums == {each.order for each in SUMS[:19]}
    assert 0 in choose(replace(offer, room=5 * GB)).sums


def test_states_that_fill_memory_take_no_second_place() -> None:
    """A unit on the GPU needs no sum."""
    offer = Offer(200 * GB, STATES, (), holding(1.0, 2.0, 3.0, 0.5, 2.0), sums=SUMS, memory_rate=4.2e12)
    filled = share_out(offer)
    assert len(filled.states) == BLOCKS and not filled.sums
    some = share_out(replace(offer, room=20 * GB))
    assert some.states and some.sums and not some.states & some.sums


def test_sums_that_make_room_for_second_passes_are_worth_more() -> None:
    """3 B, 1 x 2048 x 8, in 24 GiB: additions of 1.3 s, and updates of 0.61 s that the next forward waits for."""
    step = waiting(0.84, 1.47, 1.91, fetch=0.81)
    step = replace(step, lanes={**step.lanes, "d2h": 0.81}, holding_s=1.3, down_s=0.81, micro_batches=8)
    offer = Offer(15.9 * GB, STATES, (), step, sums=SUMS, memory_rate=2.4e12)
    one, two = choose(offer), choose(replace(offer, step=replace(step, two=True)))
    assert len(two.sums) > len(one.sums) + 5 and two.seconds < 0.95 * one.seconds
    hardly = replace(step, lanes={**step.lanes, "update": 1.31})  # updates that a forward hides gain nothing
    assert choose(replace(offer, step=replace(hardly, two=True))).seconds <= choose(replace(offer, step=hardly)).seconds


def test_sums_fill_what_nothing_else_needs() -> None:
    """Up to the reserve, and in the order in which units get them."""
    offer = Offer(3 * GB, (), (), holding(3.0, 0.0, 2.5, 0.5, 2.0), sums=SUMS, memory_rate=4.2e12)
    assert not choose(offer).sums
    assert share_out(offer).sums == {each.order for each in SUMS[:19]}
    assert share_out(replace(offer, reserve=2 * GB)).sums == {each.order for each in SUMS[:6]}
    assert not share_out(replace(offer, reserve=3 * GB)).sums
    slow = replace(offer, memory_rate=1e10)  # additions on the GPU take long
    assert not share_out(slow).sums


amounts = st.floats(0, 2, allow_nan=False)
holdings = st.builds(holding, amounts, amounts, amounts, amounts, amounts)


def every_choice(offer: Offer) -> list[Choice]:
    """All choices that fit."""
    found = [Choice(frozenset(), offer.step.after(Change()), offer.slots.count, fillings(())[0])]
    for moved in sharing._moves(offer):
        for filling in fillings(offer.activations):
            for sums in sharing._sums(offer.sums, moved, offer.room):
                room, slots = offer.room - filling.nbytes - sums.nbytes, offer.slots
                least = sharing._slots_beside(moved, slots, offer.room - filling.nbytes)
                if least is None:
                    continue
                left = room - moved.nbytes + (slots.count - least) * slots.nbytes
                counts = range(least, slots.most(left, moved.streamed, least) + 1) if left >= 0 else ()
                found += [sharing._choice(offer, moved, filling, count, sums) for count in counts]
    return found


@settings(deadline=None)
@given(st.integers(-10, 200), movables, keepables, holdings, windows, summables)
def test_no_other_choice_is_shorter(
    room: int,
    states: list[Movable],
    activations: list[Keepable],
    measured: Step,
    slots: Slots,
    sums: list[Summable],
) -> None:
    offer = Offer(room, states, activations[:2], measured, slots, sums=sums)
    choice = choose(offer)
    assert choice.seconds <= min(each.seconds for each in every_choice(offer)) + 1e-9
    assert not choice.sums & choice.states
    in_two = replace(offer, step=replace(measured, two=True))  # few ways to divide the memory are tried
    assert choose(in_two).seconds <= 1.1 * min(each.seconds for each in every_choice(in_two)) + 1e-9
    slow = replace(offer, memory_rate=50.0)  # additions on the GPU take long
    assert choose(slow).seconds <= choose(replace(slow, sums=())).seconds


times = st.builds(waiting, amounts, amounts, amounts, amounts, amounts)


@settings(deadline=None)
@given(st.integers(-10, 200), movables, keepables, times, windows)
def test_a_choice_fits_and_harms_nothing(
    room: int, states: list[Movable], activations: list[Keepable], measured: Step, slots: Slots
) -> None:
    choice = choose(Offer(room, states, activations, measured, slots))
    moved = [each for each in states if each.order in choice.states]
    assert moved == states[: len(moved)]
    least = sorted(each.nbytes for each in activations)[: choice.kept]
    mixed = sorted(each.mixtures[0].nbytes for each in activations if each.mixtures)[: choice.mixed]
    smallest = max(sum(least), sum(mixed))
    taken = sum(each.nbytes for each in moved) + smallest - (slots.count - choice.slots) * slots.nbytes
    assert not (moved or choice.kept or choice.mixed or choice.slots > slots.count) or taken <= room
    most = max(slots.count, slots.blocks - len(moved)) if slots.grows else slots.count
    assert min(slots.least, slots.count, slots.blocks - len(moved)) <= choice.slots <= most
    assert choice.seconds <= measured.after(Change())
    assert choose(Offer(room + 10, states, activations, measured, slots)).seconds <= choice.seconds
    whole = [replace(each, mixtures=()) for each in activations]
    assert choice.seconds <= choose(Offer(room, states, whole, measured, slots)).seconds


# 1.5 B without clipping: 21 of 28 blocks have their states in host memory, and updates seem to be hidden.
UPDATES_BESIDE = waiting(compute=0.359, stall=0.0, update=0.28)
OF_28 = [Movable(order, int(0.65 * GB), 0.036) for order in range(8, 29)]
KEPT_28 = [Keepable(order, int(1.15 * GB), 0.0027) for order in range(1, 29)]


def test_states_fill_what_nothing_else_needs() -> None:
    """Where updating them takes little, and up to the reserve."""
    offer = Offer(130 * GB, OF_28, KEPT_28, UPDATES_BESIDE, memory_rate=4.2e12)
    assert not choose(offer).states
    filled = share_out(offer)
    assert len(filled.states) == 21 and filled.kept == 28
    kept = sum(each.nbytes for each in KEPT_28)
    some = share_out(replace(offer, reserve=130 * GB - kept - 5.5 * 0.65 * GB))
    assert len(some.states) == 5 and some.kept == 28
    assert not share_out(replace(offer, reserve=130 * GB)).states


def test_states_stay_where_updating_them_takes_long() -> None:
    """A GPU of 1 TB/s takes 27 ms for those that seem to cost nothing in host memory: a tenth of the step."""
    filled = share_out(Offer(130 * GB, OF_28, KEPT_28, UPDATES_BESIDE))
    assert 0 < len(filled.states) < 8


@settings(deadline=None)
@given(st.integers(-10, 200), st.integers(0, 50), movables, keepables, st.one_of(times, holdings), windows, summables)
def test_memory_is_filled_and_harms_little(
    room: int,
    reserve: int,
    states: list[Movable],
    activations: list[Keepable],
    measured: Step,
    slots: Slots,
    sums: list[Summable],
) -> None:
    offer = Offer(room, states, activations, measured, slots, reserve=reserve, sums=sums)
    best, choice = choose(offer), share_out(offer)
    assert choice.seconds <= (1 + TOLERANCES.slowdown) / (1 - TOLERANCES.least_gain) * best.seconds + 1e-9
    moved = [each for each in states if each.order in choice.states]
    assert moved == states[: len(moved)]
    taken = sum(each.nbytes for each in moved) + choice.filling.nbytes - (slots.count - choice.slots) * slots.nbytes
    taken += sum(each.nbytes for each in sums if each.order in choice.sums)
    assert not choice.sums & choice.states
    assert not (moved or choice.kept or choice.mixed or choice.sums) or taken <= room
    assert taken <= room - reserve or choice in (best, choose(offer.without_moves()))


def test_sums_make_no_room_for_second_passes_that_there_are() -> None:
    """The host's additions make each backward longer than the second passes of all units, which are chosen already."""
    whole, additions = 0.6, 2.0
    step = waiting(1.2, 1.56, 2 * PASS_SHARE * whole + additions)
    step = replace(step, schedule="two passes", holding_s=additions, micro_batches=4)
    sums = Change(summed_share=0.7)
    assert replace(step, two=True).after(sums) == pytest.approx(step.after(sums), abs=0.02)
