"""The pool of forwards as CUDA graphs have it, for recordings on the CPU accelerator.

Tensors saved for backward lie in one array, at addresses that a recording gets once. Each replay writes them there, and
a backward reads them from there. Memory of graphs that were dropped is given to later recordings. Behind its saved
tensors a replay also writes temporary tensors: NaN, over what later recordings have there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from ds_slide.runtime.captured.block import CapturedBlock
from ds_slide.runtime.captured.graphs import Graph
from ds_slide.runtime.core.calls import in_backward

POOL_BYTES, TEMPORARY_BYTES, ALIGNMENT = 1 << 26, 512, 64


class Pool:
    def __init__(self) -> None:
        self.memory = torch.zeros(POOL_BYTES, dtype=torch.uint8)
        self.ends: dict[Graph, int] = {}
        """Where the tensors of each forward end that torch's allocator would have alive."""
        self.most = 0

    def end(self) -> int:
        return max(self.ends.values(), default=0)


class Saved:
    """The tensors that one forward saves."""

    def __init__(self, pool: Pool, graph: Graph) -> None:
        self._pool = pool
        self._graph = graph
        self._places: list[torch.Tensor] = []
        self._count = 0
        self._end = pool.end()

    def __call__(self, function: Callable[[], Any]) -> Any:
        self._count = 0
        with saved_tensors_hooks(self._pack, lambda number: self._places[number]):
            result = function()
        self._pool.memory[self._end : self._end + TEMPORARY_BYTES].fill_(0xFF)  # NaN in all formats
        return result

    def _pack(self, tensor: torch.Tensor) -> int:
        if self._count == len(self._places):
            self._places.append(self._allocated(tensor))
        with torch.no_grad():
            self._places[self._count].copy_(tensor)
        self._count += 1
        return self._count - 1

    def _allocated(self, like: torch.Tensor) -> torch.Tensor:
        elements = 1 + sum((size - 1) * stride for size, stride in zip(like.shape, like.stride(), strict=True))
        nbytes = elements * like.element_size()
        start, self._end = self._end, self._end + -(-nbytes // ALIGNMENT) * ALIGNMENT
        self._pool.ends[self._graph] = self._end
        self._pool.most = max(self._pool.most, self._end)
        return self._pool.memory[start : start + nbytes].view(like.dtype).as_strided(like.shape, like.stride()).data


@contextmanager
def graph_pool() -> Iterator[Pool]:
    """Let recordings have their saved tensors in a pool."""
    pool, record = Pool(), Graph.record
    release, end = CapturedBlock.release, CapturedBlock.end

    def recorded(self: Graph, function: Callable[[], Any]) -> Any:
        if in_backward():
            return record(self, function)
        saved = Saved(pool, self)
        return record(self, lambda: saved(function))

    def freed(method: Callable[[CapturedBlock], None]) -> Callable[[CapturedBlock], None]:
        def measured(self: CapturedBlock) -> None:
            graph = None if self.recording is None else self.recording.forward
            method(self)
            if graph is not None and (self.recording is None or not self.recording.made):
                pool.ends.pop(graph, None)

        return measured

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Graph, "record", recorded)
        patch.setattr(CapturedBlock, "release", freed(release))
        patch.setattr(CapturedBlock, "end", freed(end))
        yield pool
