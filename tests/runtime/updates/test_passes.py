"""One pass or two, where the times of steps say something else than the model of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import cycle

import pytest

from ds_slide.runtime.updates.passes import LASTING, SAMPLES, PassTimes

ONE, TWO = False, True
BUSY = {ONE: 2.20, TWO: 2.46}
"""Seconds of a step of a mixture whose updates are the bound: a second pass takes memory's time from the copies."""
HIDDEN = {ONE: 1.40, TWO: 1.26}
"""Seconds of a step whose second passes are hidden."""


def steps(times: PassTimes, seconds: dict[bool, float], model: Callable[[bool], bool], number: int) -> list[bool]:
    """Take `number` steps, the first with one pass. -> what was chosen behind each. `model`: what it wants behind a
    step with one pass or two."""
    now, chosen = ONE, []
    for _ in range(number):
        times.note(seconds[now], two=now)
        now = times.choose(now=now, wanted=model(now))
        chosen.append(now)
    return chosen


def contrary(two: bool) -> bool:
    """A model that wants the other choice behind each step."""
    return not two


@pytest.mark.parametrize(("seconds", "best"), [(BUSY, ONE), (HIDDEN, TWO)])
def test_a_model_that_changes_its_mind_in_each_step_ends_with_the_shorter_steps(
    seconds: dict[bool, float], best: bool
) -> None:
    chosen = steps(PassTimes(), seconds, contrary, 4 * SAMPLES)
    assert chosen[2 * SAMPLES :] == [best] * (2 * SAMPLES)


def test_the_other_choice_is_tried_again_when_its_times_are_old() -> None:
    chosen = steps(PassTimes(), BUSY, contrary, 3 * LASTING)
    assert 2 * SAMPLES <= chosen.count(TWO) <= 3 * SAMPLES + 1


def test_a_choice_that_the_model_does_not_want_is_not_tried() -> None:
    assert not any(steps(PassTimes(), HIDDEN, lambda _: ONE, 2 * LASTING))


def test_the_first_change_waits_for_no_times() -> None:
    assert steps(PassTimes(), HIDDEN, lambda _: TWO, 3) == [TWO] * 3


def test_two_slow_steps_of_a_trial_do_not_decide() -> None:
    times = PassTimes()
    slow: Iterator[float] = iter([9.0, 5.0])
    now = ONE
    for _ in range(4 * SAMPLES):
        times.note(next(slow, HIDDEN[TWO]) if now else HIDDEN[ONE], two=now)
        now = times.choose(now=now, wanted=not now)
    assert now is TWO


def test_a_small_difference_changes_nothing() -> None:
    chosen = steps(PassTimes(), {ONE: 1.0, TWO: 0.99}, contrary, 6 * SAMPLES)
    assert len(set(chosen[2 * SAMPLES :])) == 1


def test_batches_that_differ_leave_the_choice_to_the_model() -> None:
    times, lengths = PassTimes(), cycle([0.5, 1.0, 2.0])
    for two in (ONE, TWO):
        for _ in range(SAMPLES):
            times.note(next(lengths) * BUSY[two], two=two)
    assert times.choose(now=ONE, wanted=TWO) is TWO and times.choose(now=TWO, wanted=ONE) is ONE


def test_nothing_is_known_where_memory_is_used_in_another_way() -> None:
    times = PassTimes()
    steps(times, BUSY, contrary, 4 * SAMPLES)
    assert times.choose(now=ONE, wanted=TWO) is ONE
    times.forget()
    assert times.choose(now=ONE, wanted=TWO) is TWO
