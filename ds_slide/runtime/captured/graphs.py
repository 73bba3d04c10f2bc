"""Recordings of operators on tensors that stay in their places: CUDA graphs, and their memory.

All forwards share one pool of memory, and all backwards another. Within a pool a recording may use memory that earlier
recordings have freed again, as torch's allocator counts it:

    forwards    Tensors saved for backward are never freed. The other tensors of a forward lie in memory that later
                recordings use, for saved tensors, too. So a forward must not run while a block that was recorded later
                still waits for its backward (`Stack`).
    backwards   Nothing stays. The gradients of a backward are read before the next backward runs (`Lent`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import torch
from torch import nn

from ds_slide.runtime.core.context import AS_THEY_ARE
from ds_slide.runtime.core.device import Device

T = TypeVar("T")
_INVALID: list[Any] = []
"""Recordings that have failed. torch's allocator of host memory asks them later whether they are under way."""


class Graph:
    """One recording. On the CPU accelerator it runs the function again, and puts the results where the first ones
    were."""

    def __init__(self, memory: Memory, pool: Any) -> None:
        """`pool`: of `memory`."""
        self._memory = memory
        self._pool = pool
        self._graph: Any = None
        self._again: Callable[[], None] | None = None
        self._has_run = False
        """Whether the recording itself has computed the results of the coming replay."""

    def record(self, function: Callable[[], list[torch.Tensor | None]]) -> list[torch.Tensor | None]:
        """Record what `function` does, and return its results. On CUDA nothing is computed until `replay`. An error of
        `function` ends the recording."""
        if not self._memory.device.is_cuda:
            results = function()

            def again() -> None:
                with torch.no_grad():
                    for place, new in zip(results, function(), strict=True):
                        if place is not None and new is not None:
                            place.detach().copy_(new.detach())

            self._again, self._has_run = again, True
            return results
        graph, stream = torch.cuda.CUDAGraph(), self._memory.stream
        stream.wait_stream(torch.cuda.current_stream(self._memory.device.torch))
        with torch.cuda.stream(stream):
            # Other threads (lanes) go on to call CUDA meanwhile.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                results = function()
            except BaseException:
                self._abandon(graph)
                raise
            graph.capture_end()
        self._graph = graph
        return results

    def _abandon(self, graph: Any) -> None:
        """End a recording that has failed. Where it is invalid, torch (2.13) leaves its allocator recording for ever,
        which then frees no memory, and counts the pool as used."""
        try:
            graph.capture_end()
        except RuntimeError:
            with suppress(RuntimeError):  # it had ended before the error
                torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self._pool)
            torch._C._cuda_releasePool(torch.cuda.current_device(), self._pool)
            graph.reset()
            _INVALID.append(graph)

    def replay(self) -> None:
        """Run the recorded operators on the stream that is current."""
        if self._graph is not None:
            self._graph.replay()
        elif self._again is not None and not self._has_run:
            self._again()
        self._has_run = False


class Memory:
    """The two pools, the stream of recordings, and who may use the pools."""

    def __init__(self, device: Device, stream: Any) -> None:
        """`stream`: of all recordings. Libraries keep a workspace for it, in the memory of the first one."""
        self.device = device
        self.stream = stream
        self.forwards: Any = torch.cuda.graph_pool_handle() if device.is_cuda else None
        self.backwards: Any = torch.cuda.graph_pool_handle() if device.is_cuda else None
        self.stack = Stack()
        self.lent = Lent()
        self._gradient_places: dict[Any, torch.Tensor] = {}

    def gradient_places(self, results: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the places where backwards read the gradients of `results`. Blocks with results alike share them."""
        found = []
        for number, each in enumerate(results):
            key = number, each.shape, each.dtype
            if key not in self._gradient_places:
                self._gradient_places[key] = torch.empty(each.shape, dtype=each.dtype, device=each.device)
            found.append(self._gradient_places[key])
        return found

    def aside(self, function: Callable[[], T]) -> T:
        """Run `function`, which computes a recorded graph, on the stream of recordings."""
        if not self.device.is_cuda:
            return function()
        current = torch.cuda.current_stream(self.device.torch)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            result = function()
        current.wait_stream(self.stream)
        return result

    def place_of(self, tensor: torch.Tensor | None) -> torch.Tensor | None:
        """Return a tensor on the memory of `tensor` that does not keep this memory from later recordings."""
        if tensor is None or not self.device.is_cuda:
            return tensor
        storage = tensor.untyped_storage()
        whole = torch.as_tensor(_Bytes(storage.data_ptr(), storage.nbytes()), device=tensor.device)
        return whole.view(tensor.dtype).as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())


class _Bytes:
    """Bytes on the GPU, as torch takes them from other libraries (version 3 of the CUDA array interface)."""

    def __init__(self, pointer: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (pointer, False), "version": 3,
        }  # fmt: skip


class Token:
    """A forward that has run, and whose graph may have its backward. The graph holds the object, and lets go of it when
    it frees its saved tensors."""

    __slots__ = ("__weakref__", "index")

    def __init__(self, index: int) -> None:
        self.index = index


class Stack:
    """The forwards that wait for their backward, in the order of their recordings."""

    def __init__(self) -> None:
        self._tokens: list[weakref.ref[Token]] = []
        self.pushed = 0
        """The number of forwards that have begun."""

    def push(self, index: int) -> Token | None:
        """Begin a forward of the recording `index`; None where it would overwrite the tensors of one that waits."""
        latest = self._latest()
        if latest is not None and latest.index >= index:
            return None
        token = Token(index)
        self._tokens.append(weakref.ref(token))
        self.pushed += 1
        return token

    @property
    def is_empty(self) -> bool:
        return self._latest() is None

    def _latest(self) -> Token | None:
        while self._tokens:
            if (token := self._tokens[-1]()) is not None:
                return token
            self._tokens.pop()
        return None


class Lent:
    """The gradients of the backward that has run last, which parameters may still hold."""

    def __init__(self) -> None:
        self._given: Sequence[tuple[nn.Parameter, torch.Tensor]] = ()

    def give(self, gradients: Iterable[tuple[nn.Parameter, torch.Tensor]], *, copies: bool) -> None:
        """Add gradients to those of parameters. `copies`: the receiver may keep them beyond the next backward."""
        given = []
        with AS_THEY_ARE():
            for parameter, gradient in gradients:
                if parameter.grad is not None:
                    parameter.grad = parameter.grad + gradient
                elif copies:
                    parameter.grad = gradient.clone()
                else:
                    parameter.grad = gradient
                    given.append((parameter, gradient))
        self._given = given

    def take_back(self) -> None:
        """Give parameters that still hold a gradient a copy of it, before another backward overwrites it."""
        given, self._given = self._given, ()
        with AS_THEY_ARE():
            for parameter, gradient in given:
                if parameter.grad is gradient:
                    parameter.grad = gradient.clone()
