"""The phases of the coming step, and the events that each phase allows.

EMPTY           no gradient of it has been taken
HELD            the gradients of one or more backwards wait for `step()`
UPDATED         a backward has updated weights, and only `step()` may follow (updates not deferred)
LOST_BACKWARD   the last backward ended with an exception, and nothing of it was kept
LOST_SUM        ... when parts of it had been added to the gradients of earlier backwards
MIXED           ... when some blocks had been updated and others had not

a backward ends             EMPTY, HELD, LOST_BACKWARD -> HELD or UPDATED; LOST_SUM and MIXED stay
a step                      EMPTY, HELD, UPDATED -> EMPTY
gradients are dropped       (`zero_grad`, an overflow) EMPTY, HELD, LOST_BACKWARD, LOST_SUM -> EMPTY
an exception in a backward  that had taken no gradient: EMPTY, HELD -> LOST_BACKWARD; UPDATED stays
  updates deferred          that had: -> LOST_SUM where the sum has earlier backwards, otherwise LOST_BACKWARD
  updates not deferred      that had: -> MIXED
an exception in a step      -> MIXED
states are loaded           (a checkpoint) -> EMPTY

Only dropped gradients or loaded states end LOST_SUM, and only loaded states end MIXED. `engine.zero_grad()` keeps a
sound sum while an accumulation is under way (`drop_all` in `ds_slide.integration.engine_methods`).
"""

from __future__ import annotations

from enum import Enum, auto

from ds_slide.errors import SlideError

DEFER_HINT = (
    'set "ds_slide": {"defer_updates": true}, which keeps gradients in host memory (2 bytes a parameter) until step()'
)


class Phase(Enum):
    """A phase of the coming step."""

    EMPTY = auto()
    HELD = auto()
    UPDATED = auto()
    LOST_BACKWARD = auto()
    LOST_SUM = auto()
    MIXED = auto()


class Event(Enum):
    """An event that a phase may refuse."""

    FORWARD = auto()
    """A forward of the whole model, with or without gradients."""
    TRAINING_FORWARD = auto()
    BACKWARD = auto()
    """A backward that begins at an output of the model."""
    BLOCK_BACKWARD = auto()
    """A backward that comes to a block, however it has begun."""
    STEP = auto()
    DISCARD = auto()
    """All gradients are dropped: other states have been loaded, or numbers have overflowed."""
    ZERO_GRAD = auto()
    READ = auto()
    """Weights and optimizer states are read, to save them for example."""


_LOST_BACKWARD = (
    "engine.step() after a backward() that ended with an exception, and of which nothing was kept; run forward and "
    "backward() once more, of this micro-batch or another one, before engine.step()"
)
_LOST_SUM = (
    "backward() ended with an exception when parts of its gradients had been added to those of earlier micro-batches "
    "of this step, from which nothing takes them out again; call engine.zero_grad() and begin the step anew, with its "
    "first micro-batch"
)
_MIXED = (
    "{what} ended with an exception when some blocks had been updated and others had not, so that weights and "
    "optimizer states are a mixture of two steps; load the last checkpoint with engine.load_checkpoint(), or end this "
    "run and resume from there"
)
_EARLY_FORWARD = (
    "a forward began after backward() at an accumulation boundary and before engine.step(), but the weights are "
    f"being updated under backward; call engine.step() first, or {DEFER_HINT}"
)
_SECOND_BACKWARD = (
    "a backward() that is not the only one before its engine.step() needs held gradients, because with clipping off "
    f"weights are updated under backward; {DEFER_HINT}"
)

REFUSED: dict[tuple[Phase, Event], str] = {
    **{(Phase.MIXED, event): _MIXED for event in Event if event not in (Event.BLOCK_BACKWARD, Event.DISCARD)},
    (Phase.LOST_SUM, Event.TRAINING_FORWARD): _LOST_SUM,
    (Phase.LOST_SUM, Event.BACKWARD): _LOST_SUM,
    (Phase.LOST_SUM, Event.STEP): _LOST_SUM,
    (Phase.LOST_BACKWARD, Event.STEP): _LOST_BACKWARD,
    (Phase.UPDATED, Event.FORWARD): _EARLY_FORWARD,
    (Phase.UPDATED, Event.TRAINING_FORWARD): _EARLY_FORWARD,
    (Phase.UPDATED, Event.BACKWARD): _SECOND_BACKWARD,
    (Phase.UPDATED, Event.BLOCK_BACKWARD): _SECOND_BACKWARD,
    (Phase.UPDATED, Event.DISCARD): f"the gradients cannot be discarded: their updates are under way; {DEFER_HINT}",
}
"""The error messages. The phase allows any other pair. `{what}`: the call that has ended with an exception.

In UPDATED two allowed events are refused for units whose update is under way. `ZERO_GRAD` drops the gradients of all
units, which is a `DISCARD`, or of some (`StateAccess.drop_gradients`). `READ`, like loading a checkpoint, asks
`require_no_update` (`ds_slide.checkpoint.state_buffers`)."""


def require(phase: Phase, event: Event, *, what: str = "") -> None:
    """Raise SlideError where `phase` refuses `event`."""
    if phase is Phase.EMPTY or phase is Phase.HELD:  # every block asks, and a member's hash is a call of Python
        return
    sentence = REFUSED.get((phase, event))
    if sentence is not None:
        raise SlideError(sentence.replace("{what}", what))
