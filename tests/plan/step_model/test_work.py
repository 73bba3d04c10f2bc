"""Properties of every step that `Work` describes."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_slide.plan.step_model import Updates, Work, all_schedules, mean_backward_s, scheduled
from ds_slide.plan.step_model.schedules import updates_of
from ds_slide.plan.step_model.two_passes import PASS_SHARE

seconds, share = st.floats(0.0, 1.0), st.floats(0.0, 1.0)
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
@given(whole=seconds, left=seconds, reach=seconds)
def test_two_passes_pay_where_they_take_less_than_one(whole: float, left: float, reach: float) -> None:
    one, two = whole + left + reach, PASS_SHARE * whole + max(PASS_SHARE * whole, left + reach)
    if abs(one - two) > 1e-9:
        assert Updates(whole, 0.0, left, reach).second_pass_pays == (two < one)


@settings(deadline=None)
@given(whole=st.floats(0.01, 1.0), left=seconds, reach=seconds)
def test_the_choice_does_not_depend_on_the_passes_that_were_measured(whole: float, left: float, reach: float) -> None:
    one = Updates.measured(whole, whole + left, reach, in_two=False)
    two = Updates.measured(2 * PASS_SHARE * whole, PASS_SHARE * whole + left, reach, in_two=True)
    assert one.whole_s == pytest.approx(two.whole_s) and one.left_s == pytest.approx(two.left_s, abs=1e-9)
    if abs(whole * (2 * PASS_SHARE - 1) - left - reach) > 1e-6:
        assert one.second_pass_pays == two.second_pass_pays


def test_a_backward_is_twice_a_forward() -> None:
    assert mean_backward_s(2.0, 1) == 2.0
    assert mean_backward_s(4 * 2.0 + 3 * 1.0, 4) == pytest.approx(2.0)
