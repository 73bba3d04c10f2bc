"""Recorded iterations of Muon (CUDA graphs): a batch of matrices costs the host one launch instead of about 100.

The first batch of its shapes runs on the stream of recordings as it is written: Triton compiles its kernels, and cuBLAS
makes its workspace. The second one is recorded and replayed, and so are all later ones. A replay launches the same
kernels, so no bit changes.

All batches use one piece of memory, since they run one after the other on one stream. Recordings allocate nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch

from ds_slide.optim.muon import Method
from ds_slide.optim.muon_batch import Batch, orthogonal_together
from ds_slide.optim.muon_groups import Shape, numel_of
from ds_slide.runtime.captured.graphs import Graph, Memory
from ds_slide.runtime.core.device import Device
from ds_slide.runtime.updates.recorded_runs import warn_of_no_recording

Key = tuple[tuple[Shape, ...], Method, torch.dtype]


class Iterations:
    """The batches of one stream. One thread calls at a time."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._memory: Memory | None = None
        """Of recordings; None before the first batch, and when all are freed."""
        self._bytes: torch.Tensor | None = None
        self._recorded: dict[Key, Recorded] = {}
        self._may_record = True

    def orthogonal(
        self, shapes: Sequence[Shape], updates: Iterator[torch.Tensor], method: Method, dtype: torch.dtype
    ) -> Iterator[torch.Tensor]:
        """Yield what `orthogonal_together` yields. The next call overwrites it, behind what this stream does before."""
        if not self._may_record:
            yield from orthogonal_together(shapes, updates, method, dtype, self._device.torch)
            return
        key = (tuple(shapes), method, dtype)
        recorded = self._recorded.get(key)
        if recorded is None:
            memory = self._room(numel_of(shapes) * dtype.itemsize).view(dtype)
            if self._memory is None:
                self._memory = Memory(self._device, self._device.stream())
            recorded = self._recorded[key] = Recorded(Batch(shapes, method, memory), self._memory)
        recorded.batch.fill(updates)
        try:
            results = recorded.run()
        except RecordingFailed as error:
            warn_of_no_recording(error.__cause__)
            results = recorded.batch.iterate()
            self.close()
        yield from results

    @property
    def batches(self) -> Collection[Recorded]:
        return self._recorded.values()

    def close(self) -> None:
        """Free the recordings and their memory. Later batches run as written."""
        self._may_record = False
        self._recorded.clear()
        self._bytes = None
        if self._memory is not None:
            self._memory.close()
            self._memory = None

    def _room(self, nbytes: int) -> torch.Tensor:
        """Return memory for a batch. More of it ends the recordings in the old one, which come again."""
        if self._bytes is None or self._bytes.numel() < nbytes:
            self._recorded.clear()
            self._bytes = None  # before the new one is made
            self._bytes = torch.empty(nbytes, dtype=torch.uint8, device=self._device.torch)
        return self._bytes[:nbytes]


class RecordingFailed(Exception):
    """A batch could not be recorded. Its matrices are as they were filled."""


class Recorded:
    """A batch, and the recording of its iterations once it has run."""

    def __init__(self, batch: Batch, memory: Memory) -> None:
        self.batch = batch
        self._memory = memory
        self._graph: Graph | None = None
        self._results: Sequence[torch.Tensor] = ()
        self._has_run = False

    @property
    def is_recorded(self) -> bool:
        return self._graph is not None

    def run(self) -> Sequence[torch.Tensor]:
        """Iterate on what `batch` has been filled with. Raises RecordingFailed."""
        if not self._has_run:
            self._has_run = True
            return self._memory.aside(self.batch.iterate)
        if self._graph is None:
            self._record()
        assert self._graph is not None
        self._graph.replay()
        return self._results

    def _record(self) -> None:
        graph = Graph(self._memory, self._memory.forwards)
        try:
            with self._memory.counted():
                found = graph.record(lambda: [*self.batch.iterate()])
        except Exception as error:
            raise RecordingFailed from error
        self._results = [each for each in found if each is not None]
        self._graph = graph
