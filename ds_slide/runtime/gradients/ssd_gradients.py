"""Held gradients on SSD, of blocks whose gradients have no room in host memory.

    d2h lane         one contiguous copy into a ring buffer of whole pages
    update lane      writes that buffer to the state file; later micro-batches: reads the sum, adds, writes it back
    step             every update reads its part of the sum first

Rare and simple: the update lane waits for these transfers, which go before all that are not urgent.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ds_slide.report.statistics import LaneMeter
from ds_slide.runtime.unit import Unit


class SsdGradients:
    """All methods are called by the update lane, and what they return is valid until its next call of one.

    buffer: uint8, whole pages for the largest of these gradients. meter: of the update lane.
    """

    def __init__(self, buffer: torch.Tensor, meter: LaneMeter) -> None:
        self._buffer = buffer
        self._meter = meter

    def load(self, unit: Unit, span: slice) -> torch.Tensor:
        """The elements `span` of the unit's gradient, flat, read from SSD. SlideError when the disk fails."""
        assert unit.state.ssd is not None
        with self._disk_works():
            unit.state.ssd.read_gradient_now(span, self._buffer)
        return self._view(unit, span.stop - span.start)

    def zeros(self, unit: Unit) -> torch.Tensor:
        """A gradient of zeros that `store` may follow."""
        return self._view(unit, unit.codec.numel).zero_()

    def store(self, unit: Unit, buffer: torch.Tensor | None = None) -> None:
        """Write the unit's gradient from the beginning of `buffer` (page aligned, whole pages), None for what `load` or
        `zeros` has returned. SlideError when the disk fails."""
        assert unit.state.ssd is not None
        whole = slice(0, unit.codec.numel)
        with self._disk_works():
            unit.state.ssd.write_gradient_now(whole, self._buffer if buffer is None else buffer)

    def _view(self, unit: Unit, numel: int) -> torch.Tensor:
        dtype = unit.state.dtype_of("gradient")
        return self._buffer[: numel * dtype.itemsize].view(dtype)

    @contextmanager
    def _disk_works(self) -> Iterator[None]:
        """What the lane waits for counts as the disk's time, which the store measures, and not as its own."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self._meter.add_pause(started, time.perf_counter())
