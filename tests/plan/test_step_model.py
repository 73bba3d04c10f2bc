"""The model of a step: properties of every step that `Work` describes, and what a step takes after a change."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_slide.plan.step_model import (
    PASS_SHARE,
    Change,
    Schedule,
    Step,
    UpdateTimes,
    Work,
    all_schedules,
    mean_backward_s,
    scheduled,
    updates_of,
)

# Down to a nanosecond: a part of a second that is rounded to nothing changes what pays.
seconds = share = st.floats(0.0, 1.0).map(lambda value: round(value, 9))
SHARES = ("through_ring", "inputs_share", "outer_last")
SECONDS = [each.name for each in fields(Work) if each.type == "float" and each.name not in SHARES]
MOVED = ("up", "again", "down", "update", "ssd", "inputs_down", "inputs_up", "inputs_ssd")


@st.composite
def works(draw: st.DrawFn) -> Work:
    """Work whose parts are parts of their wholes."""
    found = {name: draw(seconds) for name in SECONDS}
    parts = {"ahead": "update", "outer": "update", "begun": "update", "ssd_ahead": "ssd", "from_first": "forward"}
    parts |= {"reach": "backward", "again": "up", "outer_copies": "up"}
    found |= {part: draw(share) * found[whole] for part, whole in parts.items()}
    found["lead"] = draw(share) * found["reach"]
    found["behind"] = draw(share) * found["from_first"]
    held, micro_batches = draw(st.booleans()), draw(st.integers(1, 4))
    return Work(**found, micro_batches=micro_batches, held=held, through_ring=draw(share), outer_last=draw(share))


@settings(deadline=None)
@given(works())
def test_a_step_is_never_shorter_than_its_busiest_lane(work: Work) -> None:
    for schedule, step in all_schedules(work).items():
        assert step.step_s >= step.bound_s == max(step.lanes.values())
        assert step.schedule == schedule and step.step_s >= step.forward_s + step.backward_s - 1e-9


@settings(deadline=None)
@given(works(), st.sampled_from(MOVED), share)
def test_more_bytes_never_make_a_step_shorter(work: Work, lane: str, more: float) -> None:
    larger = replace(work, **{lane: getattr(work, lane) + more})
    for schedule, step in all_schedules(work).items():
        assert all_schedules(larger)[schedule].step_s >= step.step_s - 1e-9


@settings(deadline=None)
@given(works(), st.floats(1.0, 4.0))
def test_a_faster_machine_never_makes_a_step_longer(work: Work, factor: float) -> None:
    """All of it, or its CPU alone, in each schedule."""
    all_faster = {name: getattr(work, name) / factor for name in SECONDS}
    cpu = {name: getattr(work, name) / factor for name in ("update", "holding", "ahead", "undo", "outer", "begun")}
    for faster in (replace(work, **all_faster), replace(work, **cpu)):
        for schedule, step in all_schedules(work).items():
            assert all_schedules(faster)[schedule].step_s <= step.step_s + 1e-9
    assert all_schedules(replace(work, **all_faster))["deferred"].step_s == pytest.approx(
        all_schedules(work)["deferred"].step_s / factor
    )


@settings(deadline=None)
@given(works(), st.booleans())
def test_the_schedule_is_allowed_and_no_worse(work: Work, below_limit: bool) -> None:
    step, every = scheduled(work, below_limit=below_limit), all_schedules(work)
    assert step.step_s == every[step.schedule].step_s and step.why
    assert (step.schedule == "under backward") == (not work.held)
    if step.schedule == "two passes":
        assert work.two and updates_of(work).two_passes_pay
    if step.schedule == "speculative":
        assert below_limit and work.ahead
    assert scheduled(replace(work, two=False)).schedule != "two passes"
    assert scheduled(replace(work, update=0.0, outer=0.0, ahead=0.0)).schedule in ("under backward", "deferred")


@settings(deadline=None)
@given(whole=seconds, left=seconds, reach=seconds, due=st.floats(0.0, 1.0))
def test_two_passes_pay_where_they_take_less_than_one(whole: float, left: float, reach: float, due: float) -> None:
    one, two = whole + left + reach, PASS_SHARE * whole + max(due * PASS_SHARE * whole, left + reach)
    if abs(one - two) > 1e-9:
        assert UpdateTimes(whole, 0.0, left, reach, due).second_pass_pays == (two < one)


@settings(deadline=None)
@given(
    whole=st.floats(0.01, 1.0), left=seconds, reach=seconds, due=st.floats(0.0, 0.99), holding=seconds, computes=seconds
)
def test_second_passes_that_are_not_due_need_an_idle_lane(
    whole: float, left: float, reach: float, due: float, holding: float, computes: float
) -> None:
    """Whatever the step is bound by, two passes that are chosen make it no longer than one, and the choice does not
    depend on the passes that were measured."""
    first = PASS_SHARE * whole
    forward = {1: whole + left + reach, 2: first + max(due * first, left + reach)}
    one = max(forward[1] + computes, whole + holding)
    two = max(forward[2] + computes, 2 * first + holding)
    measured_one = UpdateTimes.measured(whole, whole + left, reach, in_two=False)
    measured_two = UpdateTimes.measured(2 * first, first + left, reach, in_two=True)
    chosen = measured_one.beside(due, one - whole - holding, in_two=False).second_pass_pays
    if chosen:
        assert two <= one + 1e-9
    if computes + left + reach >= holding + 2 * whole:  # the lane is idle for long, in either case
        assert measured_two.beside(due, two - 2 * first - holding, in_two=True).second_pass_pays == chosen


@settings(deadline=None)
@given(whole=st.floats(0.01, 1.0), left=seconds, reach=seconds, others=st.floats(0.01, 1.0))
def test_hardly_any_sums_take_no_second_pass_away(whole: float, left: float, reach: float, others: float) -> None:
    """The lane needs idle time for the second passes that are not due, and not for all of them."""
    updates = UpdateTimes(whole, 0.0, left, reach, 1.0, left + reach + others)
    if updates.second_pass_pays:
        assert replace(updates, due=0.999).second_pass_pays


@settings(deadline=None)
@given(whole=st.floats(0.01, 1.0), left=seconds, reach=seconds, due=st.floats(0.0, 0.99))
def test_a_lane_that_is_never_idle_goes_back_to_one_pass(whole: float, left: float, reach: float, due: float) -> None:
    measured = UpdateTimes.measured(2 * PASS_SHARE * whole, PASS_SHARE * whole + left, reach, in_two=True)
    assert not measured.beside(due, 0.0, in_two=True).second_pass_pays


@settings(deadline=None)
@given(whole=st.floats(0.01, 1.0), left=seconds, reach=seconds)
def test_the_choice_does_not_depend_on_the_passes_that_were_measured(whole: float, left: float, reach: float) -> None:
    one = UpdateTimes.measured(whole, whole + left, reach, in_two=False)
    two = UpdateTimes.measured(2 * PASS_SHARE * whole, PASS_SHARE * whole + left, reach, in_two=True)
    assert one.whole_s == pytest.approx(two.whole_s) and one.left_s == pytest.approx(two.left_s, abs=1e-9)
    if abs(whole * (2 * PASS_SHARE - 1) - left - reach) > 1e-6:
        assert one.second_pass_pays == two.second_pass_pays


@settings(deadline=None)
@given(
    whole=st.floats(0.01, 2.0),
    forward=st.floats(0.01, 0.3),
    more=st.sampled_from([1, 3, 7]),
    due=st.floats(0.0, 0.99),
    holding=st.floats(0.0, 2.0),
)
def test_passes_settle_and_make_steps_no_longer(
    whole: float, forward: float, more: int, due: float, holding: float
) -> None:
    """Each step is as long as the choice before it makes it, with `more` micro-batches behind the first one."""
    in_two, lengths, backward = False, list[tuple[bool, float]](), 2 * forward
    for _ in range(8):
        first, busy = (PASS_SHARE * whole, 2 * PASS_SHARE * whole) if in_two else (whole, whole)
        waited, second = max(forward, first), due * first if in_two else 0.0
        others = more * (forward + max(backward, holding / more))
        seconds = max(waited + max(backward, second) + others, holding + busy)
        lengths.append((in_two, seconds))
        updates = UpdateTimes.measured(busy, waited, backward, in_two=in_two)
        in_two = updates.beside(due, seconds - holding - busy, in_two=in_two).two_passes_pay
    assert len({two for two, _ in lengths[4:]}) == 1
    assert lengths[-1][1] <= 1.05 * lengths[0][1]


def test_a_backward_is_twice_a_forward() -> None:
    assert mean_backward_s(2.0, 1) == 2.0
    assert mean_backward_s(4 * 2.0 + 3 * 1.0, 4) == pytest.approx(2.0)


# After a change ------------------------------------------------------------


def test_a_forward_waits_for_the_updates_before_it() -> None:
    """14 B, of which 10.7 G parameters are updated by the host in two passes of 1.27 s: each unit that goes to the GPU
    shortens the wait by its part of a pass, and no more is to be had than the wait."""
    busy = {"compute": 2.9, "update": 2.54, "h2d": 0.4}
    step = Step("two passes", 3.46, busy)
    assert (step.stall_s, step.queue_s, step.busiest_s) == (pytest.approx(0.56), 1.27, 2.54)
    assert step.after(Change(moved_share=0.1)) == pytest.approx(3.46 - 0.127)
    assert step.after(Change(moved_share=0.6)) == 2.9
    assert Step("deferred", 3.46, busy).queue_s == Step("under backward", 3.46, busy).queue_s == 2.54


def test_gradients_that_are_added_up_make_no_queue_longer() -> None:
    """3 B, 4 x 4 x 2048: the lane was busy for 0.50 s with 16 units, 0.20 of them for gradients of later micro-batches,
    and the forward waited for 0.125. Four units were expected to end that wait, and ended a half of it."""
    busy = {"compute": 1.208, "update": 0.50}
    step = Step("deferred", 1.333, busy, holding_s=0.20)
    assert (step.queue_s, step.busiest_s) == (pytest.approx(0.30), 0.50)
    assert step.after(Change(moved_share=4 / 16)) == pytest.approx(1.333 - 0.075)
    assert Step("deferred", 1.333, busy).after(Change(moved_share=4 / 16)) == pytest.approx(1.208)
    assert Step("two passes", 1.333, busy, holding_s=0.20).queue_s == pytest.approx(0.15)


def test_what_a_disk_holds_up_gets_shorter_by_what_leaves_the_disk() -> None:
    """Updates that leave host memory help nothing, and those of all states on SSD end the wait for it."""
    step = Step("deferred", 14.4, {"compute": 0.4, "update": 0.8, "ssd": 14.0})
    assert step.busiest_s == 0.8
    assert step.after(Change(moved_share=0.1)) == 14.4
    assert step.after(Change(moved_share=0.1, disk_share=0.25)) == pytest.approx(14.4 - 3.5)
    assert step.after(Change(moved_share=0.5, disk_share=1.0)) == 0.4


def test_fewer_fetches_help_where_copies_take_longest() -> None:
    step = Step("deferred", 1.7, {"compute": 0.6, "update": 0.4, "h2d": 1.6})
    assert step.after(Change(fetches=0.5)) == pytest.approx(0.6 + 1.1 - 0.8)
    assert step.after(Change(fetches=0.1)) == pytest.approx(0.6)
    updating = Step("deferred", 1.7, {"compute": 0.6, "update": 1.6, "h2d": 1.5})
    assert updating.after(Change(fetches=0.5)) == pytest.approx(1.7)


def test_inputs_on_ssd_do_not_leave_with_states() -> None:
    """Two thirds of the disk's time are theirs, so all states take a third of it off the step, and no more."""
    busy = {"compute": 1.0, "update": 0.2, "ssd": 9.0}
    step = Step("deferred", 9.0, busy, inputs_share=2 / 3)
    assert step.after(Change(moved_share=1.0, disk_share=1.0)) == pytest.approx(6.0)
    assert Step("deferred", 9.0, busy).after(Change(moved_share=1.0, disk_share=1.0)) == 1.0


amounts, shares = st.floats(0, 2), st.floats(0, 1)
SCHEDULES: tuple[Schedule, ...] = ("under backward", "deferred", "two passes")


@st.composite
def steps(draw: st.DrawFn) -> Step:
    lanes = {lane: draw(amounts) for lane in ("compute", "update", "h2d", "d2h", "ssd", "products")}
    return Step(draw(st.sampled_from(SCHEDULES)), max(lanes.values()) + draw(amounts), lanes)


@settings(deadline=None)
@given(steps(), shares, shares)
def test_what_leaves_never_makes_a_step_longer(step: Step, less: float, more: float) -> None:
    """Nor shorter than the lanes that stay."""
    less, more = sorted((less, more))
    assert step.after(Change()) == pytest.approx(step.step_s)
    for field in ("moved_share", "disk_share"):
        few, many = (step.after(Change(**{field: part})) for part in (less, more))
        assert many <= few + 1e-9 <= step.step_s + 2e-9
        assert many >= max(step.lanes["compute"], step.lanes["h2d"]) - 1e-9
    assert step.after(Change(kept_s=less)) >= step.step_s - less - 1e-9


@settings(deadline=None)
@given(steps(), amounts)
def test_recomputation_is_time_of_the_gpu(step: Step, seconds: float) -> None:
    more = step.recomputing(seconds)
    assert more.stall_s == pytest.approx(step.stall_s, abs=1e-9)
    assert more.after(Change(kept_s=seconds)) == pytest.approx(step.step_s, abs=1e-9)


def test_a_gpu_that_waits_for_the_host_no_more_shows_the_other_lanes() -> None:
    """3 B in 24 GiB of an H100, 1 x 2,048 x 8: the host launched for 3.1 s what the GPU computes in 0.8."""
    lanes = {"compute": 3.1, "h2d": 0.9, "d2h": 0.95, "update": 1.8}
    step = Step("deferred", 3.6, lanes, holding_s=1.1, down_s=0.95, micro_batches=8)
    faster = step.computing(0.8)
    assert faster.lanes["compute"] == 0.8
    # Forwards take as long as half the fetches, backwards as long as the additions; and the wait for the updates stays.
    assert faster.step_s == pytest.approx(0.45 + 1.1 + 0.5)
    assert step.computing(5.0).step_s == step.step_s
    alone = replace(step, micro_batches=1).computing(0.8)
    assert alone.step_s == pytest.approx(3.6 - 2.3)
