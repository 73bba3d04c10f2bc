"""The inputs of recomputed blocks in host memory, from their forward until their backward comes near.

What checkpointing saves of a call, in either of its forms, passes through hooks for saved tensors. Those around the
call of a block whose input moves put a `MovedInput` in its place. Who may touch what, and when:

    on the GPU     the input is the compute stream's. The lane copies it down behind an event of that stream; it is
                   held until the compute stream waits for the end of the copy, when one more block has begun, and is
                   that stream's memory again from then on
    host buffers   the lane's alone, whose stream brings all copies, down and up, into one order. So a buffer that is
                   free can be leased while the last copy from it is still under way
    back again     the compute stream allocates, the lane copies up behind an event of it, and the compute stream waits
                   for the end of the copy before the block is recomputed

A copy up begins when the block that was called behind this one begins its backward: one block ahead. Where nobody has
seen that (a second backward through a graph) it begins when it is needed.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from ds_slide.report.statistics import StepRecorder
from ds_slide.runtime.activations.input_buffers import InputBuffers
from ds_slide.runtime.device import Device
from ds_slide.runtime.transfers.handoff import Failures, Future
from ds_slide.runtime.transfers.pool import Lease
from ds_slide.runtime.transfers.stream_worker import StreamWorker
from ds_slide.runtime.weights.saved_weights import hooks_around, only_hooks_of_block

INPUT_MODIFIED = "the input of a block, needed for gradient computation, has been modified by an inplace operation"


@dataclass(eq=False)
class MovedInput:
    """The input of one call of a block. `on_gpu`: as long as the copy down may need it. `version`: of the tensor when
    it was saved. `followed_by`: the block that was called next."""

    order: int
    shape: torch.Size
    dtype: torch.dtype
    version: int
    leases: list[Lease]
    down: Future
    on_gpu: torch.Tensor | None
    followed_by: int | None = None
    was_modified: bool = False

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


@dataclass(frozen=True)
class _Beside:
    """What the hooks of the block have made of another tensor that is saved."""

    value: Any


def input_of(inputs: Sequence[Any]) -> torch.Tensor | None:
    """What a layer gets from the one before, which transformers hands over first; None where it cannot move."""
    given = next((each for each in inputs if isinstance(each, torch.Tensor)), None)
    if given is None or not given.is_floating_point() or given.layout is not torch.strided or not given.numel():
        return None
    return given if given.is_contiguous() else None


class MovedInputs:
    """All methods are called by the thread that computes: the caller's, and autograd's."""

    def __init__(
        self,
        buffers: InputBuffers,
        make_lane: Callable[[], StreamWorker],
        device: Device,
        failures: Failures,
        recorder: StepRecorder,
    ) -> None:
        """`make_lane`: called once, when the first input moves."""
        self.buffers = buffers
        self.bytes = 0
        """That have moved since `begin`."""
        self.orders: set[int] = set()
        """Of the blocks whose inputs have."""
        self._make_lane = make_lane
        self._made: StreamWorker | None = None
        self._device = device
        self._failures = failures
        self._recorder = recorder
        self._going: deque[MovedInput] = deque()
        self._coming: dict[MovedInput, tuple[torch.Tensor, Future]] = {}
        self._waiting: list[weakref.ref[MovedInput]] = []
        """Whose backward is to come, the next one last. A graph that is dropped takes its own along."""
        self._latest: MovedInput | None = None

    # ---- forward -----------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """A forward of the whole model begins."""
        self.bytes = 0
        self.orders.clear()
        self.end()
        while self._coming:  # of a backward that has been given up: the lane may still be copying
            _, (_, up) = self._coming.popitem()
            self._wait(up)
        self._waiting = [ref for ref in self._waiting if ref() is not None]

    def enter(self, order: int) -> None:
        """A block is called, in forward."""
        if self._latest is None:
            self._settle(0)
            return
        self._latest.followed_by, self._latest = order, None
        self._settle(1)  # its copy has this block's forward to hide in

    def end(self) -> None:
        """The forward of the whole model has ended."""
        self._latest = None
        self._settle(0)

    @contextmanager
    def moving(self, order: int, inputs: Sequence[Any]) -> Iterator[None]:
        """Around the checkpoint of a call: its input moves, if there is a place for it."""
        given, around = input_of(inputs), hooks_around()
        if given is None or around is None or not only_hooks_of_block(around):
            yield
            return
        pack_beside, unpack_beside = around
        place = given.data_ptr(), given.shape
        del given, around

        def pack(tensor: torch.Tensor) -> Any:
            if (tensor.data_ptr(), tensor.shape) == place and (leases := self.buffers.lease(tensor.nbytes)):
                return self._move_down(order, tensor, leases)
            return _Beside(pack_beside(tensor))

        def unpack(saved: Any) -> torch.Tensor:
            return unpack_beside(saved.value) if isinstance(saved, _Beside) else self._take(saved)

        with saved_tensors_hooks(pack, unpack):
            yield

    def _move_down(self, order: int, tensor: torch.Tensor, leases: list[Lease]) -> MovedInput:
        down = Future(self._failures, "an input of a block on its way to host memory")
        # The tensor itself would hold its node, and a graph without a backward would live for ever.
        moved = MovedInput(order, tensor.shape, tensor.dtype, tensor._version, leases, down, tensor.detach())
        lane, made = self._lane, self._device.mark()

        def job() -> None:
            assert moved.on_gpu is not None
            self._copy(moved, moved.on_gpu, made, down, to_gpu=False)

        lane.submit(job)
        self._going.append(moved)
        self._waiting.append(weakref.ref(moved))
        self._latest = moved
        self.bytes += moved.nbytes
        self.orders.add(order)
        return moved

    def _settle(self, left: int) -> None:
        """Take back the GPU memory of all inputs but so many, behind the ends of their copies."""
        while len(self._going) > left:
            moved = self._going.popleft()
            self._wait(moved.down)
            assert moved.on_gpu is not None
            moved.was_modified = moved.on_gpu._version != moved.version
            moved.on_gpu = None

    # ---- backward ----------------------------------------------------------------------------------------------------

    def ahead(self, order: int) -> None:
        """The backward of a block begins: bring the input of the one before, if it has moved."""
        while self._waiting:
            moved = self._waiting[-1]()
            if moved is not None and moved.followed_by != order:
                return
            self._waiting.pop()
            if moved is not None and moved not in self._coming:
                self._coming[moved] = self._bring(moved)

    def _take(self, moved: MovedInput) -> torch.Tensor:
        if moved.on_gpu is not None:
            self._settle(0)
        if moved.was_modified:
            raise RuntimeError(
                f"{INPUT_MODIFIED}: [{list(moved.shape)}] was at version {moved.version} when it was saved"
            )
        tensor, up = self._coming.pop(moved) if moved in self._coming else self._bring(moved)
        self._wait(up)
        return tensor

    def _bring(self, moved: MovedInput) -> tuple[torch.Tensor, Future]:
        tensor = torch.empty(moved.shape, dtype=moved.dtype, device=self._device.torch)
        up, free = Future(self._failures, "the input of a block from host memory"), self._device.mark()
        self._lane.submit(lambda: self._copy(moved, tensor, free, up, to_gpu=True))
        return tensor, up

    # ---- copies ------------------------------------------------------------------------------------------------------

    @property
    def _lane(self) -> StreamWorker:
        if self._made is None:
            self._made = self._make_lane()
        return self._made

    def _copy(self, moved: MovedInput, on_gpu: torch.Tensor, ready: Any, done: Future, *, to_gpu: bool) -> None:
        """By the lane."""
        lane = self._lane
        lane.wait(ready, "the block before it")
        start = self._device.mark(lane.stream, timed=True)
        flat = on_gpu.view(-1).view(torch.uint8)
        for lease, part in zip(moved.leases, flat.split(moved.leases[0].buffer.numel()), strict=True):
            on_host = lease.buffer[: part.numel()]
            target, source = (part, on_host) if to_gpu else (on_host, part)
            target.copy_(source, non_blocking=True)
        end = self._device.mark(lane.stream, timed=True)
        lane.meter.add_interval(start, end, moved.nbytes, ("input", moved.order))
        done.keep(end)

    def _wait(self, future: Future) -> None:
        with self._recorder.stalled(future.what):
            self._device.wait(future.wait())

    def close(self) -> None:
        """End the lane. Harmless when called twice."""
        if self._made is not None:
            self._made.close()
