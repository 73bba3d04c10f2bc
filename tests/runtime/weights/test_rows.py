"""Rows of an outer module come when they have had their update, and not before."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ds_slide.model.layout import ParameterInfo, build_layout
from ds_slide.report.statistics import StepRecorder
from ds_slide.report.waits import Waits
from ds_slide.runtime.core.device import Device, Marker
from ds_slide.runtime.core.futures import Failures, Future
from ds_slide.runtime.core.lanes import StreamWorker
from ds_slide.runtime.weights.rows import RowBuffers, StreamedRows
from ds_slide.store.in_memory import InMemory, WeightsInMemory

ROWS, WIDTH = 10, 64
CHUNK = 4
SPANS = [slice(0, 3 * WIDTH), slice(3 * WIDTH, 9 * WIDTH), slice(9 * WIDTH, ROWS * WIDTH)]
# The spans that each chunk of rows overlaps.
NEEDS = [{0, 1}, {1}, {1, 2}]


class Asked(Future):
    """A future that tells when somebody waits for it."""

    __slots__ = ("asked",)

    def __init__(self, failures: Failures) -> None:
        super().__init__(failures)
        self.asked = threading.Event()

    def wait(self) -> Marker:
        self.asked.set()
        return super().wait()


@pytest.fixture
def rows(device: Device, failures: Failures, make_worker: Callable[[str], StreamWorker]) -> Any:
    layout = build_layout([ParameterInfo("weight", (ROWS, WIDTH), ROWS * WIDTH, 0)], 1)
    unit: Any = SimpleNamespace(
        name="head",
        order=0,
        layout=layout,
        dtype=torch.float32,
        chunk_rows=CHUNK,
        parameters=[torch.nn.Parameter(torch.empty(0))],
        state=SimpleNamespace(weights=WeightsInMemory(InMemory(torch.zeros(ROWS * WIDTH)))),
        spans=SPANS,
        span_updated=[Future(failures) for _ in SPANS],
    )
    weights, gradients = ([torch.zeros(CHUNK * WIDTH * 4, dtype=torch.uint8) for _ in range(2)] for _ in range(2))
    buffers = RowBuffers.of(unit, weights, gradients)
    lanes = SimpleNamespace(outer_h2d=make_worker("h2d"), d2h=make_worker("d2h"))
    recorder = StepRecorder(device, Waits(device))
    context: Any = SimpleNamespace(device=device, failures=failures, lanes=lanes, recorder=recorder)
    streamed = StreamedRows(buffers, context, None, None)  # type: ignore[arg-type]
    return SimpleNamespace(unit=unit, streamed=streamed)


@pytest.mark.parametrize("chunk", range(3))
def test_a_chunk_waits_for_each_span_that_it_overlaps_and_for_no_other(chunk: int, rows: Any) -> None:
    for missing in sorted(NEEDS[chunk]):
        unit = rows.unit
        unit.span_updated = [Asked(rows.streamed._failures) for _ in SPANS]
        for span in NEEDS[chunk] - {missing}:
            unit.span_updated[span].complete()
        ready = rows.streamed._request(chunk, chunk * CHUNK, rows.streamed._updates())
        assert unit.span_updated[missing].asked.wait(10.0) and not ready.is_complete
        unit.state.weights.buffer.tensor[SPANS[missing]] = 7.0
        unit.span_updated[missing].complete()
        ready.wait()
        assert {span for span, future in enumerate(unit.span_updated) if future.asked.is_set()} == NEEDS[chunk]
        first = chunk * CHUNK * WIDTH
        count = min(CHUNK * WIDTH, ROWS * WIDTH - first)
        found = rows.streamed._buffers.weights[chunk % 2][:count]
        assert torch.equal(found, unit.state.weights.buffer.tensor[first : first + count])
        unit.state.weights.buffer.tensor.zero_()


def test_a_pass_brings_all_rows_in_order(rows: Any) -> None:
    for future in rows.unit.span_updated:
        future.complete()
    rows.unit.state.weights.buffer.tensor.copy_(torch.arange(float(ROWS * WIDTH)))
    seen = [(first, chunk.clone()) for first, chunk in rows.streamed.rows()]
    assert [first for first, _ in seen] == [0, 4, 8]
    assert torch.equal(torch.cat([chunk for _, chunk in seen]).flatten(), rows.unit.state.weights.buffer.tensor)
