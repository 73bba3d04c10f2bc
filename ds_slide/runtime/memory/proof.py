"""Remembers the batches that have found all their GPU memory, so that such batches need no watch."""

from __future__ import annotations

CLEAN_STEPS = 2
"""Steps in which torch has to find all memory at once. The first step after a decision makes room for it."""
ALIKE = 1.02
"""A batch of up to this multiple of the shown bytes counts as shown."""


class Proof:
    """The bytes shown to be enough. The thread that computes calls all methods."""

    def __init__(self) -> None:
        self._shown = 0.0
        """The most bytes that batches of clean steps were expected to take."""
        self._expected = 0.0
        """The most expected bytes of clean steps that are still too few to count as shown."""
        self._clean = 0
        self.is_open = False
        """Whether the newest batch takes more than has been shown."""

    def begin(self) -> None:
        """Forget what has been shown: memory was short, or is shared out in another way."""
        self._shown, self._expected, self._clean = 0.0, 0.0, 0

    def covers(self, expected: float) -> bool:
        """Return whether a batch that begins takes no more bytes than were shown. `expected`: all bytes on the GPU that
        are expected with this batch."""
        self.is_open = expected > ALIKE * self._shown
        if self.is_open:
            self._expected = max(self._expected, expected)
        return not self.is_open

    def end_step(self, *, went_well: bool) -> None:
        """End a step. `went_well`: torch has found all memory at once."""
        if not went_well:
            self.begin()
        elif self._expected:
            self._clean += 1
            if self._clean >= CLEAN_STEPS:
                self._shown, self._expected, self._clean = max(self._shown, self._expected), 0.0, 0
