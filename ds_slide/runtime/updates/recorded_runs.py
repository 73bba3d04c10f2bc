"""Recorded products of Muon, of matrices that are updated by themselves (CUDA graphs).

The products of one matrix are about 25 operators. The lane of products launches them while the forward and the backward
launch theirs, and Python runs one thread at a time: the products of 3 B took 0.63 s of that lane in a step, where the
GPU needs 0.16 s (benchmarks/results/2026-11-28_nvidia-h200_muon_3.md). A replay is one launch, of the same kernels.

A capture tells torch's generator of random numbers that it is recorded, and a dropout on another thread would fail
meanwhile. So the thread that computes records (`prepare`), and the owner of the runs replays. That is the lane, for
states that stream, or the thread that computes.

All recordings of an owner use the same memory, since they run one after the other on one stream: the update that is
written into `update`, what the operators allocate, and the result, which is read before the next replay.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from ds_slide.optim.muon import Method, orthogonal
from ds_slide.optim.muon_batch import orthogonal_together
from ds_slide.optim.muon_groups import Shape
from ds_slide.report.log import log
from ds_slide.runtime.captured.graphs import Graph, Memory
from ds_slide.runtime.core.device import Device

MEASURED = 3
"""Replays of which the shortest counts. Updates of the first step may run beside the others."""


@dataclass(frozen=True)
class Products:
    """All that the operators of a run depend on. `by_kernel`: symmetric products are made by our kernel."""

    shape: Shape
    method: Method
    dtype: torch.dtype
    by_kernel: bool

    def of(self, update: torch.Tensor) -> torch.Tensor:
        """Return the orthogonal update of `update`. Both are flat; `update` is in fp32, the result in `dtype`."""
        if self.by_kernel:
            [found] = orthogonal_together([self.shape], iter([update]), self.method, self.dtype, update.device)
            return found
        return orthogonal(update.view(self.shape), self.method, self.dtype).reshape(-1)


class RecordedRun:
    """The recording of one `Products`."""

    def __init__(self, products: Products, update: torch.Tensor, memory: Memory) -> None:
        """Record. `update`: the place of the input. Raises what the operators raise, or the capture."""
        self.update = update
        # Before the capture, Triton compiles kernels, and cuBLAS makes its workspace.
        memory.aside(lambda: products.of(update))
        self._graph = Graph(memory, memory.forwards)
        with memory.counted():
            [result] = self._graph.record(lambda: [products.of(update)])
        self._graph.expect_inputs()
        # Later recordings may use the memory of the result, too.
        self._result = memory.place_of(result)
        self.seconds: float | None = None
        """Of a replay with nothing beside it, where it was measured."""

    def replay(self) -> torch.Tensor:
        """Return the orthogonal update of `update`, which the next replay overwrites."""
        self._graph.replay()
        assert self._result is not None
        return self._result

    def measure(self, device: Device, stream: Any) -> None:
        """Set `seconds`: the least of a few replays on `stream`. Waits for them. Nobody else replays meanwhile."""
        found = []
        with device.on(stream):
            for _ in range(MEASURED):
                begin = device.mark(timed=True)
                self._graph.replay()
                end = device.mark(timed=True, host_waits=True)
                end.synchronize()
                found.append(begin.seconds_until(end))
        self.seconds = min(found)


class RecordedRuns:
    """The recordings of one owner. `prepare` and `close` are called by the thread that computes."""

    def __init__(self, device: Device, most: int, *, first: bool) -> None:
        """`most`: elements of the largest run. `first`: the kernels run before those of other streams."""
        self._device = device
        self._most = most
        self._first = first
        self._memory: Memory | None = None
        """None before the first recording."""
        self._update: torch.Tensor | None = None
        self._recorded: dict[Products, RecordedRun] = {}
        """The owner reads an entry only when the recording is whole."""
        self._may_record = True

    def __len__(self) -> int:
        return len(self._recorded)

    def prepare(self, wanted: Iterable[Products], *, measures: bool = False) -> None:
        """Record what has no recording yet. `measures`: set the seconds of the recordings, if these are the first.
        Waits for the GPU where it records. Without memory for a recording the log says so once, and what has been
        recorded stays."""
        missing = [products for products in dict.fromkeys(wanted) if products not in self._recorded]
        if not (missing and self._may_record):
            return
        made: dict[Products, RecordedRun] = {}
        try:
            memory, update = self._memory_and_update()
            for products in missing:
                made[products] = RecordedRun(products, update[: math.prod(products.shape)], memory)
            for run in made.values() if measures and not self._recorded else ():
                run.measure(self._device, memory.stream)
            # The libraries' workspace on that stream is in all recordings: nothing may use it beside a replay.
            self._device.mark(memory.stream, host_waits=True).synchronize()
        except Exception as error:
            warn_of_no_recording(error)
            self._may_record = False
        self._recorded.update(made)

    def get(self, products: Products) -> RecordedRun | None:
        """Return the recording; None where the operators are to be called."""
        return self._recorded.get(products)

    def close(self) -> None:
        """Free the recordings. No replay runs any more, and later updates run as written."""
        self._may_record = False
        self._recorded.clear()
        self._update = None
        if self._memory is not None:
            self._memory.close()
            self._memory = None

    def _memory_and_update(self) -> tuple[Memory, torch.Tensor]:
        if self._update is None:
            self._update = torch.zeros(self._most, dtype=torch.float32, device=self._device.torch)
        if self._memory is None:
            self._memory = Memory(self._device, self._device.stream(first=self._first))
        return self._memory, self._update


def warn_of_no_recording(error: BaseException | None) -> None:
    log.warning(f"the products of Muon cannot be recorded (CUDA graph) and run one by one: {error}")
