"""The trial of recordings whose blocks are all recomputed: whether steps are shorter with them than with kept
activations."""

from __future__ import annotations

from collections import deque

from ds_slide.report.log import log
from ds_slide.runtime.captured.shapes import STEADY

TRIAL = 4
"""Steps of a trial. The first one or two compare recordings with operators."""


class Trial:
    """The trial of one engine, which comes once: recordings that come back need none, since the decision about memory
    behind it would free them."""

    def __init__(self) -> None:
        self.has_failed = False
        """Whether steps were longer with recomputed blocks."""
        self._has_ended = False
        self._latest: deque[float] = deque(maxlen=STEADY)
        """Seconds of the last steps without recordings."""
        self._before: float | None = None
        """Seconds of a step before. None where no block had kept activations, so that recordings only help."""
        self._taken: list[float] | None = None
        """Seconds of the steps so far; None where no trial is under way."""

    def note(self, seconds: float) -> None:
        """Note a step without recordings."""
        self._latest.append(seconds)

    def begin(self, *, compares: bool) -> None:
        """Begin the trial, if it has not been. `compares`: whether the steps before count, in which blocks have kept
        activations."""
        if not self._has_ended:
            self._before, self._taken = (min(self._latest, default=None) if compares else None), []

    def cancel(self) -> None:
        """Forget the steps of a trial that is under way: recordings of blocks that keep activations begin."""
        self._taken = None

    @property
    def is_under_way(self) -> bool:
        return self._taken is not None

    def take(self, seconds: float) -> bool:
        """Note a step of the trial, behind the step that has recorded. -> whether it was the last one."""
        assert self._taken is not None
        self._taken.append(seconds)
        if len(self._taken) < TRIAL:
            return False
        found, self._taken, self._has_ended = min(self._taken), None, True
        if self._before is not None and found > self._before:
            self.has_failed = True
            log.info(
                f"blocks keep activations again: with all recomputed from recordings a step took {found:.3f} s, and "
                f"{self._before:.3f} s before"
            )
        return True
