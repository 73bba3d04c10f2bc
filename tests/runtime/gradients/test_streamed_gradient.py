"""A gradient in pieces arrives whole, whatever the pieces and the spans in which it is taken."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_slide.errors import SlideError
from ds_slide.report.statistics import LaneMeter
from ds_slide.runtime.core.device import Device
from ds_slide.runtime.core.futures import Failures, Future
from ds_slide.runtime.core.lanes import Delay, StreamWorker
from ds_slide.runtime.gradients.streamed_gradient import StreamedGradient

cuts = st.lists(st.integers(1, 30), min_size=1, max_size=6)


def test_errors_reach_the_lane_that_waits_for_a_piece() -> None:
    failures = Failures()
    gradient = StreamedGradient(Device(torch.device("cpu")), None, failures)
    failures.record("update", ValueError("no"))
    with pytest.raises(SlideError, match="the update lane stopped with ValueError: no"):
        next(gradient.parts(slice(0, 3)))


@settings(max_examples=60, deadline=None)
@given(pieces=cuts, spans=cuts, seed=st.integers(0, 3))
def test_every_element_arrives_and_what_was_not_put_is_zero(pieces: list[int], spans: list[int], seed: int) -> None:
    device, failures = Device(torch.device("cpu")), Failures()
    lane = StreamWorker("d2h", device, failures, LaneMeter(), Delay(0.0, seed))
    made, taken = sum(pieces), sum(spans)
    expected = torch.arange(1.0, made + 1)
    target = torch.full((taken,), torch.nan)
    done = Future(failures)
    gradient = StreamedGradient(device, None, failures)

    def job() -> None:
        start = 0
        for size in spans:
            for part in gradient.parts(slice(start, start + size)):
                gradient.copy(part, target[part])
            start += size
        done.complete()

    lane.submit(job)
    buffers = [torch.full((max(pieces),), torch.nan) for _ in range(2)]
    copied = [Future.completed(failures) for _ in buffers]
    start = 0
    for number, size in enumerate(pieces):
        if start >= taken:
            break  # nobody takes what lies beyond the state buffer
        copied[number % 2].wait()
        # As on the GPU: a buffer is written again as soon as its future is complete.
        buffers[number % 2][:size] = expected[start : start + size]
        copied[number % 2] = gradient.put(start, buffers[number % 2][:size])
        start += size
    gradient.close()
    done.wait()
    lane.close()
    whole = torch.zeros(taken)
    whole[: min(made, taken)] = expected[: min(made, taken)]
    assert torch.equal(target, whole)
