"""A head that stays in host memory (`ds_slide.stream_head`): chunks of its rows are streamed through two GPU buffers,
their gradients through two more.

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
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ds_slide.errors import SlideConfigError, SlideError
from ds_slide.model.structure import ModelStructure
from ds_slide.plan.allocations import ROW_BUFFERS
from ds_slide.runtime.core.context import Context
from ds_slide.runtime.core.device import PASSED, Marker
from ds_slide.runtime.core.futures import Future, wait_on_stream
from ds_slide.runtime.core.settings import RuntimeSettings
from ds_slide.runtime.core.unit import Unit
from ds_slide.runtime.gradients.route import Gradients
from ds_slide.runtime.gradients.streamed_gradient import StreamedGradient

if TYPE_CHECKING:
    from ds_slide.runtime.engine import SlideRuntime

CHUNK_NUMEL = 1 << 24
"""The most elements of a chunk: 32 MiB of bf16, 0.6 ms of transfer, 8,192 rows of 2,048."""


def chunk_rows(rows: int, width: int) -> int:
    """Return the rows of a chunk of a matrix [rows, width]: a multiple of 128 where as many fit."""
    fitting = max(1, CHUNK_NUMEL // width)
    return min(rows, fitting // 128 * 128 or fitting)


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
    until the next chunk is requested, then to the d2h lane until its future is complete.
    """

    def __init__(self, buffers: RowBuffers, context: Context, gradients: Gradients, engine: SlideRuntime) -> None:
        self.unit = buffers.unit
        entry = self.unit.layout.entries[0]
        self.shape = torch.Size(entry.shape)
        self.dtype = buffers.weights[0].dtype
        self._buffers = buffers
        self._device, self._failures = context.device, context.failures
        self._h2d, self._d2h = context.lanes.outer_h2d, context.lanes.d2h
        self._gradients, self._engine = gradients, engine
        self._recorder = context.recorder
        self._read: list[Marker] = [PASSED] * len(buffers.weights)
        self._copied = [Future.completed(context.failures) for _ in buffers.gradients]
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
        self._engine.enter_backward(self.unit)
        self._open = gradient = StreamedGradient(self._device, self._d2h.stream, self._failures)
        self._engine.taking.finalize(self.unit, gradient)
        width = self.shape[1]
        try:
            for number, (first, rows) in enumerate(self._pass(updates)):
                turn = number % len(self._copied)
                wait_on_stream(self._copied[turn], self._device, self._recorder)
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
            wait_on_stream(ready[turn], self._device, self._recorder)
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
            ready.complete(end)
            moved = (part.stop - part.start) * buffer.element_size()
            lane.meter.add_interval(start, end, moved, ("rows", self.unit.order))

        lane.submit(job)
        return ready


# ---- which head it is ------------------------------------------------------------------------------------------------

ASKED = "ds_slide.stream_head is true"
WAY_OUT = "set it to false"


@dataclass(frozen=True)
class StreamedHead:
    """The head whose rows are streamed. `path`: the name of the module in `named_modules()`."""

    path: str
    module: nn.Linear


def find_streamed_head(model: nn.Module, world_size: int) -> StreamedHead:
    """Return the head of `model`, a plain linear layer with a weight of its own, that `ds_slide.stream_head` means.
    Raises SlideConfigError for any other head."""
    if world_size > 1:
        raise SlideConfigError(
            f"{ASKED}, but the rows of a head pass through one GPU and there are {world_size} ranks; {WAY_OUT}"
        )
    # The head must be a plain linear layer without a bias.
    head = _output_embeddings(model)
    if head is None:
        raise SlideConfigError(
            f"{ASKED}, but {type(model).__name__} names no head by get_output_embeddings(); {WAY_OUT}"
        )
    path = next(name for name, module in model.named_modules() if module is head)
    if type(head) is not nn.Linear:
        kind = f"{type(head).__module__}.{type(head).__name__}"
        raise SlideConfigError(f"{ASKED}, but the head {path} is a {kind} and not torch's nn.Linear; {WAY_OUT}")
    others = [name for name, _ in head.named_parameters() if name != "weight"]
    if others:
        found = "a bias" if others == ["bias"] else f"a parameter {others[0]}"
        raise SlideConfigError(f"{ASKED}, but the head {path} has {found}, which needs the GPU; {WAY_OUT}")
    # No other module may use its weight, and no hook may need the weight or its gradient as a whole.
    names = [name for name, parameter in model.named_parameters(remove_duplicate=False) if parameter is head.weight]
    if len(names) > 1:
        other = next(name for name in names if name != f"{path}.weight")
        raise SlideConfigError(
            f"{ASKED}, but the head {path} shares its weight with {other}, which needs it on the GPU as a whole; "
            f"{WAY_OUT}, or untie them"
        )
    if "forward" in head.__dict__ or head._forward_hooks or head._forward_pre_hooks:
        raise SlideConfigError(f"{ASKED}, but the head {path} has hooks or a forward of its own; {WAY_OUT}")
    if head.weight._backward_hooks or head.weight._post_accumulate_grad_hooks:
        raise SlideConfigError(
            f"{ASKED}, but the weight of the head {path} has hooks for its gradient, which never exists as a whole; "
            f"{WAY_OUT}"
        )
    return StreamedHead(path, head)


def check_streamed_head(head: StreamedHead, structure: ModelStructure, settings: RuntimeSettings) -> None:
    """Raise SlideConfigError for a head whose rows cannot be streamed as its unit is.

    A head that is, or is in, a block is streamed through the window as a whole. The gradient of any other head is
    copied down as it is made, so it must be in the data type of reduced gradients.
    """
    unit = next(each for each in structure.units if any(p is head.module.weight for _, p in each.parameters))
    if unit.kind == "block":
        raise SlideConfigError(
            f"{ASKED}, but the head {head.path} belongs to the block {unit.name}, which passes through the GPU "
            f"anyway; {WAY_OUT}, or leave the head out of ds_slide.blocks"
        )
    gradient_dtype = settings.gradient_of(unit.precision)
    if head.module.weight.requires_grad and unit.precision.weight != gradient_dtype:
        raise SlideConfigError(
            f"{ASKED}, but the head {head.path} is {head.module.weight.dtype} and gradients are reduced in "
            f"{gradient_dtype} (communication_data_type), while its own goes down as it is made; {WAY_OUT}"
        )


def _output_embeddings(model: nn.Module) -> Any:
    """Return the head that the outermost module with a head names (adapters wrap the model that has it)."""
    for module in model.modules():
        if callable(find := getattr(type(module), "get_output_embeddings", None)):
            head = find(module)
            if head is not None and any(part is head for part in model.modules()):
                return head
    return None
