"""An outer module that stays in host memory: chunks of its rows are streamed through two GPU buffers, their gradients
through two more.

    h2d lane        fills a row buffer when its last reader has been submitted and the rows have had their update
    compute stream  reads the rows, and in backward writes the gradient of the same rows
    d2h lane        copies that down while the next one is made (`StreamedGradient`)

So a vocabulary matrix does not need its full size in GPU memory. Two buffers suffice. For 16,384 tokens, a chunk of
8,192 x 2,048 takes 0.55 TFLOP in forward and three times as much in backward: 0.8 and 2.4 ms at 700 TFLOP/s. This hides
the transfers of 34 MB, 0.6 ms each at 55 GB/s.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from ds_slide.errors import SlideError
from ds_slide.plan.allocations import ROW_BUFFERS
from ds_slide.runtime.core.context import Context
from ds_slide.runtime.core.device import PASSED, Marker
from ds_slide.runtime.core.futures import Future
from ds_slide.runtime.core.unit import Unit
from ds_slide.runtime.gradients.route import Gradients
from ds_slide.runtime.gradients.streamed_gradient import StreamedGradient

CHUNK_NUMEL = 1 << 24
"""The most elements of a chunk: 32 MiB of bf16, 0.6 ms of transfer, 8,192 rows of 2,048."""
ROW_MULTIPLE = 128


def chunk_rows(rows: int, width: int) -> int:
    """Return the rows of a chunk of a matrix [rows, width]."""
    fitting = max(1, CHUNK_NUMEL // width)
    return min(rows, fitting // ROW_MULTIPLE * ROW_MULTIPLE or fitting)


class RowEvents(Protocol):
    """The part of the runtime that serves streamed rows."""

    def wait(self, future: Future) -> None: ...
    def enter_backward(self, unit: Unit) -> object: ...
    def begin_streamed_gradient(self, unit: Unit, gradient: StreamedGradient) -> None: ...


@dataclass(frozen=True)
class RowBuffers:
    """The GPU buffers of `unit`, a single matrix, [rows * width] each. A frozen unit has no buffers for gradients."""

    unit: Unit
    rows: int
    weights: Sequence[torch.Tensor]
    gradients: Sequence[torch.Tensor]

    @classmethod
    def of(cls, unit: Unit, weights: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> RowBuffers:
        """Make row buffers of buffers of bytes, `weights` and `gradients`."""
        rows = unit.chunk_rows
        return cls(
            unit, rows, [each.view(unit.dtype) for each in weights], [each.view(unit.dtype) for each in gradients]
        )


class StreamedRows:
    """The weight [v, h] of one unit, chunk by chunk; a WeightRows of `ds_slide.kernels`.

    The compute thread calls all methods. A row buffer belongs to the h2d lane from its request until its future is
    kept, then to the compute stream until the next chunk is requested. A gradient buffer belongs to the compute stream
    until the next chunk is requested, then to the d2h lane until its future is kept.
    """

    def __init__(
        self,
        buffers: RowBuffers,
        context: Context,
        gradients: Gradients,
        events: RowEvents,
    ) -> None:
        self.unit = buffers.unit
        entry = self.unit.layout.entries[0]
        self.shape = torch.Size(entry.shape)
        self.dtype = buffers.weights[0].dtype
        self._buffers = buffers
        self._device, self._failures = context.device, context.failures
        self._h2d, self._d2h = context.lanes.outer_h2d, context.lanes.d2h
        self._gradients, self._events = gradients, events
        self._read: list[Marker] = [PASSED] * len(buffers.weights)
        self._copied = [Future.kept(context.failures) for _ in buffers.gradients]
        self._open: StreamedGradient | None = None
        self._closed = False

    @property
    def requires_grad(self) -> bool:
        """Whether the weight gets a gradient. A parameter that was frozen later has buffers, but gets none."""
        return bool(self._buffers.gradients) and self.unit.parameters[0].requires_grad

    def close(self) -> None:
        """Refuse further passes, and end an open pass so that no lane waits for it."""
        self._closed = True
        if self._open is not None:
            self._open.close()

    def give_up(self) -> None:
        """End the open pass of a backward that an exception has ended: zeros are copied down for the missing rows. The
        exception object may keep the pass alive."""
        if self._open is not None:
            self._open.close()
            self._open = None

    @property
    def version(self) -> int:
        """The version of the weight."""
        return self.unit.version

    def rows(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (first row, chunk [c, h]) for all rows in order. A chunk belongs to the reader until it requests the
        next."""
        return self._pass(self._updates())

    def rows_and_gradients(self) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """Yield the same with a buffer [c, h] for the gradient of these rows in this backward.

        A pass that is given up early leaves zeros for the missing rows.
        """
        updates = self._updates()  # before this gradient opens an update that the rows would wait for
        self._events.enter_backward(self.unit)
        self._open = gradient = StreamedGradient(self._device, self._d2h.stream, self._failures)
        self._events.begin_streamed_gradient(self.unit, gradient)
        width = self.shape[1]
        try:
            for number, (first, rows) in enumerate(self._pass(updates)):
                turn = number % len(self._copied)
                self._events.wait(self._copied[turn])
                flat = self._buffers.gradients[turn][: rows.numel()]
                yield first, rows, flat.view(rows.shape)
                self._gradients.add_square_sum(self.unit, flat)
                self._copied[turn] = gradient.put(first * width, flat)
        finally:
            gradient.close()
            if self._open is gradient:
                self._open = None

    def _updates(self) -> list[tuple[slice, Future]]:
        """Return the updates that the rows wait for, by span."""
        if self._closed:
            raise SlideError("the weight of the streamed head is gone: its engine was destroyed")
        return list(zip(self.unit.spans, self.unit.span_updated, strict=True))

    def _pass(self, updates: Sequence[tuple[slice, Future]]) -> Iterator[tuple[int, torch.Tensor]]:
        height, width = self.shape
        firsts = range(0, height, self._buffers.rows)
        ready = [self._request(number, first, updates) for number, first in enumerate(firsts[:ROW_BUFFERS])]
        for number, first in enumerate(firsts):
            turn, count = number % ROW_BUFFERS, min(self._buffers.rows, height - first)
            self._events.wait(ready[turn])
            try:
                yield first, self._buffers.weights[turn][: count * width].view(count, width)
            finally:
                self._read[turn] = self._device.mark()
            if number + ROW_BUFFERS < len(firsts):
                ready[turn] = self._request(number, firsts[number + ROW_BUFFERS], updates)

    def _request(self, number: int, first: int, updates: Sequence[tuple[slice, Future]]) -> Future:
        turn, width = number % ROW_BUFFERS, self.shape[1]
        part = slice(first * width, min(first + self._buffers.rows, self.shape[0]) * width)
        updated = [future for span, future in updates if span.start < part.stop and part.start < span.stop]
        ready = Future(self._failures, f"rows of {self.unit.name} on the GPU")
        read, buffer = self._read[turn], self._buffers.weights[turn]
        lane, rows = self._h2d, self.unit.state.weights.buffer.read(part)  # a view: outer modules are in memory

        def job() -> None:
            for future in updated:
                future.wait()
            lane.wait(read, f"a buffer for rows of {self.unit.name}")
            start = self._device.mark(lane.stream, timed=True)
            buffer[: part.stop - part.start].copy_(rows, non_blocking=True)
            end = self._device.mark(lane.stream, timed=True)
            ready.keep(end)
            moved = (part.stop - part.start) * buffer.element_size()
            lane.meter.add_interval(start, end, moved, ("rows", self.unit.order))

        lane.submit(job)
        return ready
