"""The inputs of recomputed blocks in host memory or on SSD, from their forward until their backward comes near.

The tensors that checkpointing saves of a call, in either of its forms, pass through hooks for saved tensors. The hooks
around a block whose input moves save a `MovedInput` instead of the input. Who may touch what, and when:

    on the GPU     the input is the compute stream's. The lane copies it down behind an event of that stream. The input
                   is held until one more block has begun and the compute stream waits for the end of the copy; from
                   then on it is that stream's memory again
    host buffers   the lane's alone: its stream runs all copies, down and up, in one order. So a free buffer can be
                   leased while the last copy from it is still under way. Inputs that go on to SSD pass through other
                   buffers (`input_disk`)
    back again     the compute stream allocates, the lane copies up behind an event of it, and the compute stream waits
                   for the end of the copy before the block is recomputed

A copy up begins when the block that was called after this one begins its backward: one block ahead. A read from SSD
begins earlier. Where that moment has passed unseen (a second backward through a graph), they begin when they are
needed.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from ds_slide.plan.spare import Input, goes_on
from ds_slide.report.statistics import INPUTS
from ds_slide.runtime.activations.input_buffers import InputBuffers
from ds_slide.runtime.activations.input_disk import InputDisk, InputPlace
from ds_slide.runtime.core.context import Context
from ds_slide.runtime.core.device import Marker
from ds_slide.runtime.core.futures import Future, wait_on_stream
from ds_slide.runtime.core.lanes import Delay, StreamWorker
from ds_slide.runtime.core.pool import BufferLease
from ds_slide.runtime.core.running import deferred_interrupt
from ds_slide.runtime.ssd.space import SpaceOnSsd
from ds_slide.runtime.weights.saved_weights import SavedTensor, hooks_around, only_hooks_of_block

INPUT_MODIFIED = "the input of a block, needed for gradient computation, has been modified by an inplace operation"


@dataclass(eq=False)
class MovedInput:
    """The input of one call of a block. `kept`: the host buffers that hold it; none where it has a `place` on SSD.
    `on_gpu`: the tensor, while the copy down may need it. `version`: the tensor's when it was saved. `followed_by`: the
    block that was called next."""

    order: int
    shape: torch.Size
    dtype: torch.dtype
    version: int
    kept: Sequence[BufferLease]
    place: InputPlace | None
    down: Future
    on_gpu: torch.Tensor | None
    followed_by: int | None = None
    was_modified: bool = False

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


@dataclass(frozen=True)
class _Beside:
    """The value that the hooks of the block return for another saved tensor."""

    value: Any


def input_of(inputs: Sequence[Any]) -> torch.Tensor | None:
    """Return a layer's input from the layer before, which transformers passes first; None where it cannot move."""
    given = next((each for each in inputs if isinstance(each, torch.Tensor)), None)
    if given is None or not given.is_floating_point() or given.layout is not torch.strided or not given.numel():
        return None
    return given if given.is_contiguous() else None


class MovedInputs:
    """All methods are called by the thread that computes: the caller's, and autograd's."""

    def __init__(self, context: Context, space: SpaceOnSsd | None = None) -> None:
        """`space`: None where nothing may go on to SSD."""
        self._context = context
        self.buffers = InputBuffers(context, context.settings.slide.host_memory)
        """Host memory where inputs stay, which `ds_slide.host_memory` limits."""
        self.disk = None if space is None else InputDisk(context, space)
        self._to_disk: frozenset[int] = frozenset()
        """Blocks for whose inputs host memory has no room."""
        self.bytes = 0
        """Bytes that have moved since `begin`."""
        self.disk_bytes = 0
        """Moved bytes that have gone on to SSD."""
        self.orders: set[int] = set()
        """Blocks whose inputs have moved since `begin`."""
        self._made: StreamWorker | None = None
        """The lane, from the first input that moves on."""
        self._going: deque[MovedInput] = deque()
        self._coming: dict[MovedInput, tuple[torch.Tensor, Future]] = {}
        self._waiting: list[weakref.ref[MovedInput]] = []
        """Inputs whose backward is to come, the next one last. The inputs of a dropped graph go with it."""
        self._latest: MovedInput | None = None

    # ---- room --------------------------------------------------------------------------------------------------------

    def on_host(self, wanted: int) -> int:
        """Return how many of the `wanted` bytes host memory has room for (`Places`)."""
        return self.buffers.available(wanted)

    def on_ssd(self, wanted: int, input_bytes: int) -> int:
        """Return how many of the `wanted` bytes SSD has room for, in inputs of at most `input_bytes` (`Places`)."""
        return 0 if self.disk is None else self.disk.available(wanted, input_bytes)

    @property
    def statistics(self) -> dict[str, int]:
        """Bytes of the inputs that have moved, and of the host memory where they stay. With SSD: bytes that have gone
        on there, bytes of places there, and bytes of host memory for them."""
        found = {"moved_bytes": self.bytes, "host_bytes": self.buffers.nbytes}
        if self.disk is not None:
            found |= {
                "moved_to_ssd_bytes": self.disk_bytes,
                "ssd_bytes": self.disk.nbytes,
                "ssd_host_bytes": self.disk.host_bytes,
            }
        return found

    def provide(self, moved: Sequence[Input], backward_s: float = 0.0) -> None:
        """Have places for the inputs of these blocks, in the order of their calls, as far as there is room. The last
        blocks get theirs in host memory. `backward_s`: seconds of one block's backward; 0: not known."""
        input_bytes, self._to_disk = max(each.nbytes for each in moved), frozenset()
        rounded = [Input(each.order, self.buffers.rounded(each.nbytes)) for each in moved]
        wanted = sum(each.nbytes for each in rounded)
        if self.disk is not None and self.buffers.available(wanted) < wanted:
            if self.disk.provide_buffers(input_bytes, backward_s):
                self._to_disk = goes_on(rounded, self.buffers.available(wanted))
                self.disk.provide_places(input_bytes, len(self._to_disk))
        if len(moved) > len(self._to_disk):
            self.buffers.provide(input_bytes, len(moved) - len(self._to_disk))

    # ---- forward -----------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin a forward of the whole model."""
        self.bytes = self.disk_bytes = 0
        self.orders.clear()
        self.end()
        while self._coming:  # inputs of a backward that has been given up: the lane may still be copying
            _, (_, up) = self._coming.popitem()
            self._wait(up)
        if self.disk is not None:
            self.disk.give_up()
        self._waiting = [ref for ref in self._waiting if ref() is not None]

    def enter(self, order: int) -> None:
        """Note that a block is called in forward, and take back GPU memory of earlier inputs."""
        if self._latest is None:
            self._settle(0)
            return
        self._latest.followed_by, self._latest = order, None
        self._settle(1)  # its copy runs during this block's forward

    def end(self) -> None:
        """End the forward of the whole model."""
        self._latest = None
        self._settle(0)

    @contextmanager
    def moving(self, order: int, inputs: Sequence[Any]) -> Iterator[None]:
        """Move the input of the call whose checkpoint runs in this context, if there is a place for it."""
        given, around = input_of(inputs), hooks_around()
        # There are no hooks around a block whose weights are on the GPU, nor around the checkpoints of transformers
        # up to 5.22, which call a layer's hooks inside of them.
        if given is None or (around is not None and not only_hooks_of_block(around)):
            yield
            return
        pack_beside, unpack_beside = (SavedTensor.of, SavedTensor.unchanged) if around is None else around
        place = given.data_ptr(), given.shape
        del given, around

        def pack(tensor: torch.Tensor) -> Any:
            if (tensor.data_ptr(), tensor.shape) == place and (home := self._home(order, tensor.nbytes)) is not None:
                return self._move_down(order, tensor, *home)
            return _Beside(pack_beside(tensor))

        def unpack(saved: Any) -> torch.Tensor:
            return unpack_beside(saved.value) if isinstance(saved, _Beside) else self._take(saved)

        with saved_tensors_hooks(pack, unpack):
            yield

    def _home(self, order: int, nbytes: int) -> tuple[Sequence[BufferLease], InputPlace | None] | None:
        """Return host buffers for an input, and its place on SSD if it goes on there; None where there is no room."""
        if order not in self._to_disk and (leases := self.buffers.lease(nbytes)) is not None:
            return leases, None
        if self.disk is None or (place := self.disk.place(order, nbytes)) is None:
            return None
        with self._context.recorder.stalled("a host buffer for an input of a block on its way to SSD"):
            return self.disk.buffers_of(place), place

    def _move_down(
        self, order: int, tensor: torch.Tensor, leases: Sequence[BufferLease], place: InputPlace | None
    ) -> MovedInput:
        down = Future(self._context.failures, "an input of a block on its way to host memory")
        kept = leases if place is None else ()
        # The tensor itself would hold its node, and a graph without a backward would live for ever.
        moved = MovedInput(order, tensor.shape, tensor.dtype, tensor._version, kept, place, down, tensor.detach())
        lane, made = self._lane, self._context.device.mark()

        def job() -> None:
            assert moved.on_gpu is not None
            self._copy(moved, leases, moved.on_gpu, made, down, to_gpu=False)

        with deferred_interrupt():  # otherwise an interrupt could leave buffers that are never given back
            lane.submit(job)
            if self.disk is not None and place is not None:
                self.disk.write(place, leases, down)
                self.disk_bytes += moved.nbytes
        self._going.append(moved)
        self._waiting.append(weakref.ref(moved))
        self._latest = moved
        self.bytes += moved.nbytes
        self.orders.add(order)
        return moved

    def _settle(self, left: int) -> None:
        """Take back the GPU memory of all inputs except the last `left`, after the ends of their copies."""
        while len(self._going) > left:
            moved = self._going.popleft()
            self._wait(moved.down)
            assert moved.on_gpu is not None
            moved.was_modified = moved.on_gpu._version != moved.version
            moved.on_gpu = None

    # ---- backward ----------------------------------------------------------------------------------------------------

    def ahead(self, order: int) -> None:
        """Bring the input of the block before, if it has moved, and read earlier inputs from SSD. Called when the
        backward of a block begins."""
        while self._waiting:
            moved = self._waiting[-1]()
            if moved is not None and moved.followed_by != order:
                break
            self._waiting.pop()
            if moved is not None and moved not in self._coming:
                self._coming[moved] = self._bring(moved)
        if self.disk is not None and self._waiting:
            waiting = (ref() for ref in reversed(self._waiting))
            places = (each.place for each in waiting if each is not None and each.place is not None)
            self.disk.read_ahead(places, self._lane)

    def _take(self, moved: MovedInput) -> torch.Tensor:
        if moved.on_gpu is not None:
            self._settle(0)
        if moved.was_modified:
            raise RuntimeError(
                f"{INPUT_MODIFIED}: [{list(moved.shape)}] was at version {moved.version} when it was saved"
            )
        if self._waiting and self._waiting[-1]() is moved:  # otherwise it would be read ahead once more
            self._waiting.pop()
        tensor, up = self._coming.pop(moved) if moved in self._coming else self._bring(moved)
        self._wait(up)
        return tensor

    def _bring(self, moved: MovedInput) -> tuple[torch.Tensor, Future]:
        tensor = torch.empty(moved.shape, dtype=moved.dtype, device=self._context.device.torch)
        up, free = Future(self._context.failures, "the input of a block from host memory"), self._context.device.mark()
        if self.disk is None or moved.place is None:
            self._lane.submit(lambda: self._copy(moved, moved.kept, tensor, free, up, to_gpu=True))
            return tensor, up
        with deferred_interrupt():
            arriving = self.disk.read(moved.place, self._lane)

            def job() -> None:
                self._copy(moved, arriving.wait(), tensor, free, up, to_gpu=True)
                arriving.release()

            self._lane.submit(job)
        return tensor, up

    # ---- copies ------------------------------------------------------------------------------------------------------

    @property
    def _lane(self) -> StreamWorker:
        if self._made is None:
            context, debug = self._context, self._context.settings.slide.debug
            meter, delay = context.recorder.meters[INPUTS], Delay(debug.lane_delay_ms, debug.seed + 5)
            self._made = StreamWorker(INPUTS, context.device, context.failures, meter, delay)
        return self._made

    def _copy(
        self,
        moved: MovedInput,
        leases: Sequence[BufferLease],
        on_gpu: torch.Tensor,
        ready: Marker,
        done: Future,
        *,
        to_gpu: bool,
    ) -> None:
        """Copy an input down or up on the lane's stream. Called by the lane."""
        lane = self._lane
        lane.wait(ready, "the block before it")
        start = self._context.device.mark(lane.stream, timed=True)
        flat = on_gpu.view(-1).view(torch.uint8)
        for lease, part in zip(leases, flat.split(leases[0].buffer.numel()), strict=True):
            on_host = lease.buffer[: part.numel()]
            target, source = (part, on_host) if to_gpu else (on_host, part)
            target.copy_(source, non_blocking=True)
        end = self._context.device.mark(lane.stream, timed=True, host_waits=moved.place is not None and not to_gpu)
        lane.meter.add_interval(start, end, moved.nbytes, ("input", moved.order))
        done.complete(end)

    def _wait(self, future: Future) -> None:
        wait_on_stream(future, self._context.device, self._context.recorder)

    def close(self) -> None:
        """End the lane, and the hand-over to SSD. Harmless when called twice."""
        if self._made is not None:
            self._made.close()
        if self.disk is not None:
            self.disk.close()
