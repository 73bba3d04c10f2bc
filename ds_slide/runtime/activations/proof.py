"""Whether steps have shown already that batches find as much GPU memory as they are expected to take."""

from __future__ import annotations

CLEAN_STEPS = 2
"""In which torch has found all memory at once. The first one after a decision makes room for what has been decided."""
ALIKE = 1.02
"""Times as many bytes as have been shown count as shown."""


class Proof:
    """Called by the thread that computes."""

    def __init__(self) -> None:
        self._shown = 0.0
        """The most bytes that batches of clean steps were expected to take."""
        self._expected = 0.0
        """The same of the steps that are to show it."""
        self._clean = 0
        self.is_open = False
        """The newest batch takes more than has been shown."""

    def begin(self) -> None:
        """Forget what has been shown: memory was short, or is shared out in another way."""
        self._shown, self._expected, self._clean = 0.0, 0.0, 0

    def covers(self, expected: float) -> bool:
        """Whether a batch that begins, and is expected to take so many bytes, takes no more than has been shown."""
        self.is_open = expected > ALIKE * self._shown
        if self.is_open:
            self._expected = max(self._expected, expected)
        return not self.is_open

    def end_step(self, *, went_well: bool) -> None:
        """A step has ended. `went_well`: torch has found all memory at once."""
        if not went_well:
            self.begin()
        elif self._expected:
            self._clean += 1
            if self._clean >= CLEAN_STEPS:
                self._shown, self._expected, self._clean = max(self._shown, self._expected), 0.0, 0
