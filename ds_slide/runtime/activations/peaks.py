"""The most that was on the GPU in spans of time that overlap: torch has one peak, which is reset for each of them."""

from __future__ import annotations

from typing import Protocol


class Peaked(Protocol):
    """Torch's count of the GPU's memory, in bytes."""

    def allocated(self) -> int: ...
    def peak(self) -> int: ...
    def reset_peak(self) -> None: ...


class Peaks:
    """Of one GPU; called by the thread that computes."""

    def __init__(self, gpu: Peaked | None) -> None:
        """`gpu`: None where the accelerator has no memory of its own; all peaks are 0 then."""
        self._gpu = gpu
        self._most: dict[str, int] = {}
        """In each span, until torch's peak was reset last."""

    def begin(self, span: str) -> None:
        """Begin a span, or begin it anew."""
        if self._gpu is None:
            return
        peak = self._gpu.peak()
        self._most = {each: max(most, peak) for each, most in self._most.items()}
        self._gpu.reset_peak()
        self._most[span] = self._gpu.allocated()

    def of(self, span: str) -> int:
        """Bytes; of a span that has not begun, since torch's peak was reset."""
        return 0 if self._gpu is None else max(self._most.get(span, 0), self._gpu.peak())

    def end(self, span: str) -> int:
        """Its bytes."""
        peak = self.of(span)
        self._most.pop(span, None)
        return peak
