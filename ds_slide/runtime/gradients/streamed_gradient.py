"""The source of a gradient that goes down in pieces while backward is still making it."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ds_slide.runtime.core.device import Device, Marker
from ds_slide.runtime.core.futures import Failures, Future


@dataclass(frozen=True)
class _Piece:
    start: int
    flat: torch.Tensor
    made: Marker
    copied: Future


class StreamedGradient:
    """A `GradientSource`. The compute thread puts pieces in the order of the state buffer, without gaps, and
    closes it. The d2h lane takes them. A piece belongs to the d2h lane from `put` until its future is complete.

    Elements that were not put count as zero: the end of a state buffer that is longer than the gradient, or the rest of
    a backward that ended with an exception.
    """

    def __init__(self, device: Device, stream: Any, failures: Failures) -> None:
        """`stream`: the d2h lane's."""
        self._device, self._stream, self._failures = device, stream, failures
        self._pieces: queue.SimpleQueue[_Piece | None] = queue.SimpleQueue()
        self._piece: _Piece | None = None
        self._ended = False

    # The compute thread.

    def put(self, start: int, flat: torch.Tensor) -> Future:
        """Put elements [start, start + numel) of the state buffer, made by the work submitted so far. -> completed when
        copied."""
        copied = Future(self._failures, "the rows of a streamed gradient on their way down")
        self._pieces.put(_Piece(start, flat, self._device.mark(), copied))
        return copied

    def close(self) -> None:
        """Say that no piece comes any more."""
        self._pieces.put(None)

    def square_sum(self) -> torch.Tensor:
        """Return zero: `Gradients.add_square_sum` adds the square sums of later pieces."""
        return torch.zeros((), dtype=torch.float64, device=self._device.torch)

    # The d2h lane.

    def parts(self, span: slice) -> Iterator[slice]:
        at = span.start
        while at < span.stop:
            piece = self._current()
            if piece is None:
                yield slice(at, span.stop)
                return
            end = piece.start + piece.flat.numel()
            self._device.wait(piece.made, self._stream)
            yield slice(at, min(span.stop, end))
            at = min(span.stop, end)
            if at == end:
                piece.copied.complete(self._device.mark(self._stream))
                self._piece = None

    def copy(self, part: slice, target: torch.Tensor) -> None:
        piece = self._piece
        if piece is None:
            target.zero_()
        else:
            start = part.start - piece.start
            target.copy_(piece.flat[start : start + part.stop - part.start], non_blocking=True)

    def release(self, after: Marker) -> None:
        """Do nothing: each piece was handed back when it had been copied."""

    def _current(self) -> _Piece | None:
        while self._piece is None and not self._ended:
            with self._failures.waiting("the next rows of a streamed gradient", lambda: self._pieces.put(None)):
                self._piece = self._pieces.get()
            if self._piece is None:
                self._failures.raise_first()
                self._ended = True
        return self._piece
