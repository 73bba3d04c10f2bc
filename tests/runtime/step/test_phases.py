"""The phases of a step: which events each of them refuses, with which sentence, and which phase follows which."""

from __future__ import annotations

import pytest

from ds_slide.errors import SlideError
from ds_slide.runtime.step.accumulation import Accumulation
from ds_slide.runtime.step.phases import REFUSED, Event, Phase, require

EARLY, SECOND = "a forward began after backward", "a backward.. that is not the only one before its engine.step"
LOST_SUM = "parts of its gradients had been added to those of earlier micro-batches"
MIXTURE = "^this call ended with an exception when some blocks had been updated and others had not"
SENTENCES: dict[Phase, dict[Event, str]] = {
    Phase.EMPTY: {},
    Phase.HELD: {},
    Phase.UPDATED: {
        Event.FORWARD: EARLY,
        Event.TRAINING_FORWARD: EARLY,
        Event.BACKWARD: SECOND,
        Event.BLOCK_BACKWARD: SECOND,
        Event.DISCARD: "the gradients cannot be discarded",
    },
    Phase.LOST_BACKWARD: {Event.STEP: "ended with an exception, and of which nothing was kept"},
    Phase.LOST_SUM: dict.fromkeys((Event.TRAINING_FORWARD, Event.BACKWARD, Event.STEP), LOST_SUM),
    Phase.MIXED: dict.fromkeys(set(Event) - {Event.BLOCK_BACKWARD, Event.DISCARD}, MIXTURE),
}
"""What each phase refuses, written out a second time."""


@pytest.mark.parametrize("event", Event)
@pytest.mark.parametrize("phase", Phase)
def test_a_phase_refuses_what_the_table_says_and_nothing_else(phase: Phase, event: Event) -> None:
    words = SENTENCES[phase].get(event)
    assert ((phase, event) in REFUSED) == (words is not None)
    if words is None:
        require(phase, event, what="this call")
        return
    with pytest.raises(SlideError, match=words) as caught:
        require(phase, event, what="this call")
    assert "{what}" not in str(caught.value)


def after(phase: Phase) -> Accumulation:
    """An accumulation that has come to `phase` by what leads there."""
    made = Accumulation()
    match phase:
        case Phase.HELD | Phase.UPDATED:
            backward(made, updates=phase is Phase.UPDATED)
        case Phase.LOST_BACKWARD:
            interrupt(made, taken=False, deferred=True)
        case Phase.LOST_SUM:
            backward(made)
            interrupt(made, taken=True, deferred=True)
        case Phase.MIXED:
            made.interrupt_step()
    assert made.phase is phase
    return made


def backward(accumulation: Accumulation, *, updates: bool = False) -> None:
    accumulation.open(1)
    accumulation.close(at_boundary=True, updates=updates)


def interrupt(accumulation: Accumulation, *, taken: bool, deferred: bool) -> bool:
    """End a backward by an exception. -> whether the gradients from before still count."""
    accumulation.open(1)
    accumulation.backward.has_taken = taken
    return accumulation.interrupt(deferred=deferred)


def test_a_backward_that_ends_makes_good_what_the_last_one_lost_but_no_spoilt_sum() -> None:
    for phase in (Phase.EMPTY, Phase.HELD, Phase.LOST_BACKWARD):
        for updates, then in ((False, Phase.HELD), (True, Phase.UPDATED)):
            backward(made := after(phase), updates=updates)
            assert made.phase is then
    for phase in (Phase.LOST_SUM, Phase.MIXED):
        backward(made := after(phase))
        assert made.phase is phase


@pytest.mark.parametrize(
    ("phase", "taken", "deferred", "then"),
    [
        (Phase.EMPTY, False, True, Phase.LOST_BACKWARD),
        (Phase.EMPTY, False, False, Phase.LOST_BACKWARD),
        (Phase.EMPTY, True, True, Phase.LOST_BACKWARD),
        (Phase.EMPTY, True, False, Phase.MIXED),
        (Phase.HELD, False, True, Phase.LOST_BACKWARD),
        (Phase.HELD, True, True, Phase.LOST_SUM),
        (Phase.UPDATED, False, False, Phase.UPDATED),
        (Phase.UPDATED, True, False, Phase.MIXED),
        (Phase.LOST_BACKWARD, False, True, Phase.LOST_BACKWARD),
        (Phase.LOST_SUM, False, True, Phase.LOST_SUM),
        (Phase.LOST_SUM, True, True, Phase.LOST_SUM),
        (Phase.MIXED, False, True, Phase.MIXED),
        (Phase.MIXED, True, True, Phase.MIXED),
    ],
)
def test_an_exception_in_a_backward(phase: Phase, taken: bool, deferred: bool, then: Phase) -> None:
    made = after(phase)
    assert interrupt(made, taken=taken, deferred=deferred) is not taken
    assert made.phase is then and not made.is_open


def test_a_sum_counts_again_with_the_backward_after_the_lost_one() -> None:
    """Nothing of the lost backward was taken, so the micro-batches before it stay, and the next one joins them."""
    interrupt(made := after(Phase.HELD), taken=False, deferred=True)
    with pytest.raises(SlideError, match="of which nothing was kept"):
        made.require(Event.STEP)
    backward(made)
    made.require(Event.STEP)
    assert made.micro_batches == 2


def test_what_ends_a_phase() -> None:
    for phase in Phase:
        (dropped := after(phase)).clear()
        assert dropped.phase is (Phase.MIXED if phase is Phase.MIXED else Phase.EMPTY)
        assert dropped.micro_batches == 0
        (loaded := after(phase)).reload()
        assert (loaded.phase, loaded.mixed_by, loaded.is_open) == (Phase.EMPTY, None, False)
