"""Peaks of the GPU's memory in spans of time that overlap. Torch has one peak, which is reset for each span."""

from __future__ import annotations

from typing import Protocol


class Peaked(Protocol):
    """Torch's count of the GPU's memory, in bytes."""

    def allocated(self) -> int: ...
    def peak(self) -> int: ...
    def reset_peak(self) -> None: ...


class Peaks:
    """The peaks of one GPU. The thread that computes calls all methods."""

    def __init__(self, gpu: Peaked | None) -> None:
        """`gpu`: None where the accelerator has no memory of its own; all peaks are 0 then."""
        self._gpu = gpu
        self._most: dict[str, int] = {}
        """The peak of each open span, as it was when torch's own was reset last."""

    def begin(self, span: str) -> None:
        """Begin a span, or begin it anew."""
        if self._gpu is None:
            return
        peak = self._gpu.peak()
        self._most = {each: max(most, peak) for each, most in self._most.items()}
        self._gpu.reset_peak()
        self._most[span] = self._gpu.allocated()

    def of(self, span: str) -> int:
        """Return the peak of a span in bytes. A span that has not begun has torch's own peak."""
        return 0 if self._gpu is None else max(self._most.get(span, 0), self._gpu.peak())

    def end(self, span: str) -> int:
        """End a span and return its peak in bytes."""
        peak = self.of(span)
        self._most.pop(span, None)
        return peak
