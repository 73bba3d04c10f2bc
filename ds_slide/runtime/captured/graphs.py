"""Recordings of operators on tensors that stay in their places: CUDA graphs, and their memory.

All forwards share one pool of memory, and all backwards another. Within a pool a recording may use memory that earlier
recordings have freed again, as torch's allocator counts it:

    forwards    Tensors saved for backward are freed when a batch has recorded all blocks, forward and backward. The
                recordings of another shape then use the same memory. So no forward runs while a graph of another shape
                waits for its backward. The other tensors of a forward lie in memory that later recordings of its own
                shape use, for saved tensors, too. So a forward must not run while a block that was recorded later
                still waits (`Stack`).
    backwards   Nothing stays. The gradients of a backward are read before the next backward runs (`Lent`).

A recording knows its tensors by their addresses alone, so it needs no tensor of torch's to be alive. The pools stay
until the last recording is freed, and torch gives their memory to nothing else.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import torch
from torch import nn

from ds_slide.runtime.core.context import AS_THEY_ARE
from ds_slide.runtime.core.device import Device

T = TypeVar("T")
_INVALID: list[Any] = []
"""Recordings that have failed. torch's allocator of host memory asks them later whether they are under way."""


class Pool:
    """Memory for recordings. torch (2.13) records nothing more into a pool whose last recording has gone: another one
    takes its place."""

    def __init__(self, *, is_cuda: bool) -> None:
        self.handle: Any = torch.cuda.graph_pool_handle() if is_cuda else None
        self._recordings: weakref.WeakSet[Any] = weakref.WeakSet()
        self._is_new = True

    def to_record(self) -> Any:
        """Return torch's name of the pool for a new recording."""
        if not (self._is_new or self._recordings):
            self.handle = torch.cuda.graph_pool_handle()
        self._is_new = False
        return self.handle

    def add(self, recording: Any) -> None:
        self._recordings.add(recording)


class Graph:
    """One recording. On the CPU accelerator it runs the function again, and puts the results where the first ones
    were."""

    def __init__(self, memory: Memory, pool: Pool) -> None:
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
            graph.capture_begin(pool=self._pool.to_record(), capture_error_mode="thread_local")
            try:
                results = function()
            except BaseException:
                self._abandon(graph)
                raise
            graph.capture_end()
        self._pool.add(graph)
        self._graph = graph
        return results

    def _abandon(self, graph: Any) -> None:
        """End a recording that has failed. Where it is invalid, torch (2.13) leaves its allocator recording for ever,
        which then frees no memory, and counts the pool as used."""
        try:
            graph.capture_end()
        except RuntimeError:
            with suppress(RuntimeError):  # it had ended before the error
                torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self._pool.handle)
            torch._C._cuda_releasePool(torch.cuda.current_device(), self._pool.handle)
            graph.reset()
            _INVALID.append(graph)
            # The generator of random numbers still takes itself to be recorded. An empty recording ends that.
            empty = torch.cuda.CUDAGraph()
            empty.capture_begin(capture_error_mode="thread_local")
            empty.capture_end()

    def expect_inputs(self) -> None:
        """Have the next replay compute, whose inputs are written after the recording."""
        self._has_run = False

    def replay(self) -> None:
        """Run the recorded operators on the stream that is current."""
        if self._graph is not None:
            self._graph.replay()
        elif self._again is not None and not self._has_run:
            self._again()
        self._has_run = False


class Memory:
    """The two pools, the stream of recordings, and who may use the pools."""

    def __init__(self, device: Device, stream: Any, *, several_ranks: bool = False) -> None:
        """`stream`: of all recordings. Libraries keep a workspace for it, in the memory of the first one.
        `several_ranks`: blocks may communicate."""
        self.device = device
        self.stream = stream
        self.several_ranks = several_ranks
        self.forwards, self.backwards = Pool(is_cuda=device.is_cuda), Pool(is_cuda=device.is_cuda)
        self.stack = Stack()
        self.lent = Lent()
        self.inputs = InputMemory()
        self.recorded_shapes = 0
        """The number of shapes that have been recorded, now and then."""
        self.running = 0
        """Replays of recomputed blocks that are under way, until their results have been copied."""
        self.has_erred = False
        """Whether a replay has given other numbers than the operators."""
        self.nbytes = 0
        """Bytes of the two pools; 0 on the CPU accelerator."""
        self._held = 0
        """The bytes among them that torch counts as free."""

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Keep the recordings for a replay. Operators of a block need none: these may be freed for them."""
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count what recordings take of the GPU for the pools, and what they leave there to later recordings."""
        if not self.device.is_cuda:
            yield
            return
        reserved, allocated = self.device.reserved(), self.device.allocated()
        try:
            yield
        finally:
            # What grows meanwhile are the pools: nothing else takes memory but the lanes, whose buffers are there.
            grown = max(0, self.device.reserved() - reserved)
            self.nbytes += grown
            self._hold(grown - (self.device.allocated() - allocated))

    def _hold(self, more: int) -> None:
        self._held += more
        self.device.hold(more)

    def close(self) -> None:
        """Count nothing more: all recordings are freed."""
        if self.device.is_cuda:
            self._hold(-self._held)
            self.nbytes = 0

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
        if tensor is None:
            return None
        storage = tensor.untyped_storage()
        if not self.device.is_cuda or not storage.nbytes():
            return tensor.detach()
        whole = torch.as_tensor(_Bytes(storage.data_ptr(), storage.nbytes()), device=tensor.device)
        return whole.view(tensor.dtype).as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())


class InputMemory:
    """The memory of the inputs of blocks that need a gradient. Calls with all shapes use the same bytes, since no two
    shapes wait for their backward at once."""

    def __init__(self) -> None:
        self._bytes: dict[Any, torch.Tensor] = {}

    def like(self, key: Any, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor for an input like `tensor`. `key`: tells it from the other inputs of its shape."""
        wanted = torch.empty_like(tensor, device="meta")  # its strides, unless elements share their memory
        nbytes = wanted.untyped_storage().nbytes()
        with torch.no_grad():
            if (found := self._bytes.get(key)) is None or found.nbytes < nbytes:
                # Tensors of earlier, shorter calls keep the memory that they have.
                self._bytes[key] = found = torch.empty(nbytes, dtype=torch.uint8, device=tensor.device)
            return found[:nbytes].view(wanted.dtype).as_strided(wanted.size(), wanted.stride()).detach()


class _Bytes:
    """Bytes on the GPU, as torch takes them from other libraries (version 3 of the CUDA array interface)."""

    def __init__(self, pointer: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (pointer, False), "version": 3,
        }  # fmt: skip


class Token:
    """A forward that has run, and whose graph may have its backward. The graph holds the object, and lets go of it when
    it frees its saved tensors."""

    __slots__ = ("__weakref__", "index", "shape")

    def __init__(self, shape: int, index: int) -> None:
        self.shape = shape
        self.index = index


class Stack:
    """The forwards that wait for their backward, all of one shape, in the order of their recordings."""

    def __init__(self) -> None:
        self._tokens: list[weakref.ref[Token]] = []
        self.pushed = 0
        """The number of forwards that have begun."""

    def push(self, shape: int, index: int) -> Token | None:
        """Begin a forward of the recording `index` of a shape; None where it would overwrite the tensors of one that
        waits."""
        latest = self._latest()
        if latest is not None and (latest.shape != shape or latest.index >= index):
            return None
        token = Token(shape, index)
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

    def give(self, gradients: Iterable[tuple[nn.Parameter, torch.Tensor]]) -> None:
        """Add gradients to the gradients that parameters have."""
        self._given = given = []  # at once: an addition may find no memory
        with AS_THEY_ARE():
            for parameter, gradient in gradients:
                if parameter.grad is not None:
                    parameter.grad = parameter.grad + gradient
                else:
                    parameter.grad = gradient
                    given.append((parameter, gradient))

    @property
    def are_held(self) -> bool:
        """Whether parameters still hold some of these gradients."""
        with AS_THEY_ARE():
            return any(parameter.grad is gradient for parameter, gradient in self._given)

    def take_back(self) -> None:
        """Give parameters that still hold a gradient a copy of it, before another backward overwrites it, or where a
        receiver keeps it longer."""
        with AS_THEY_ARE():
            for parameter, gradient in self._given:
                if parameter.grad is gradient:
                    copied = gradient.clone()  # first: it may find no memory, and a search for some may move weights
                    # The weights of a block that streams have left, and torch compares the sizes of the two.
                    weights, parameter.data = parameter.data, gradient
                    parameter.grad = copied
                    parameter.data = weights
        self._given = ()
