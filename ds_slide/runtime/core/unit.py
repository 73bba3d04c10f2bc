"""A unit at run time: one block or outer module with its states, its place on the GPU and its pending update."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import nn

from ds_slide.compression.codec import GradientCodec
from ds_slide.model.layout import UnitLayout
from ds_slide.model.structure import UnitSpec
from ds_slide.runtime.core.futures import Failures, Future
from ds_slide.runtime.core.trained import Trained
from ds_slide.store.spare_buffers import WayBack
from ds_slide.store.state import UnitState


def _nothing(_version: int) -> None:
    """Do nothing, for weights that no other rank reads."""


@dataclass
class SquareSum:
    """The square sum of one held gradient. Each gradient has its own object: the update lane may add late to the sum of
    a gradient that `zero_grad` has dropped, and the next gradient must not count that."""

    place: Literal["device", "host"] | None = None
    """The place of the sum; None: it has not been computed yet."""
    on_host: float = 0.0


class PackedGradient(Protocol):
    """A GPU buffer with the gradients of a unit (`ds_slide.runtime.gradients.sources.Staging`)."""

    packed: torch.Tensor
    own: torch.Tensor
    free: Future


class Update:
    """The futures of one update of a unit. There is one for each span, kept when the span has its new weights; `done`
    is kept with the last of them. `completed` is kept when every span has its new states, too. An update in two passes
    writes the states in the second pass, and needs the held gradient until then."""

    def __init__(
        self,
        name: str,
        num_spans: int,
        failures: Failures,
        bring_forward: Callable[[], None],
        publish: Callable[[], None] = lambda: None,
        *,
        two_passes: bool = False,
    ) -> None:
        """Open the futures. `name`: the name of the unit. `bring_forward`: called when a thread begins to wait for the
        update. `publish`: tells the other ranks that this rank's part of the new weights is complete."""
        self.is_pressed = False
        """Whether a thread waits for the update, or has waited."""
        self._bring_forward = bring_forward
        self._publish = publish
        self.spans = [
            Future(failures, f"part {index + 1} of {num_spans} of the update of {name}", self.press)
            for index in range(num_spans)
        ]
        self.done = Future(failures, f"the update of {name}", self.press)
        self.two_passes = two_passes
        self.completed = Future(failures, f"the states of {name}") if two_passes else self.done
        self._left = self._left_states = num_spans
        self._lock = threading.Lock()

    def press(self) -> None:
        """Mark the update as urgent. Called when a wait begins: from then on less urgent work must not delay it."""
        self.is_pressed = True
        self._bring_forward()

    def finish(self, index: int) -> None:
        """Record that span `index` has its new weights."""
        self.spans[index].keep()
        with self._lock:
            self._left -= 1
            last = not self._left
        if last:
            self._publish()
            self.done.keep()

    def finish_states(self) -> None:
        """Record that the second pass has written the states of one more span. Called by the update lane alone."""
        self._left_states -= 1
        if not self._left_states:
            self.completed.keep()


class Unit:
    """One block or outer module. Ownership of its parts, in the order of a step:

    * the compute thread (forward: the caller's; backward: autograd's) owns the counters and the binding
      of the parameters to GPU memory;
    * the held gradient (`state.gradient`) belongs to the d2h lane, and to the update lane for the tasks that the d2h
      lane submits, from `finalize` until `arrived` is kept. Then it belongs to the update lane until `completed` is
      kept, and to the compute thread otherwise;
    * the other state buffers of `state` belong to the update lane from the moment `updated` and `completed` are
      replaced by open futures until these are kept: the weights and what completes them to the masters until `updated`,
      the states of the update rule until `completed` (the same future, but for updates in two passes). The update
      leases them (`UnitState.lease`), span by span, and puts them back. Any other thread waits for the update before it
      reads or writes them, and for state buffers on SSD also until they are written (`SlideRuntime.settle`). States on
      the GPU belong to the compute stream.
    * they also belong to the update lane while the unit has a speculative update (`Speculating.of`). Other threads take
      that update back before they read or write them (`SlideRuntime.take_back`).
    * spare state buffers in `way_back` always belong to the update lane. It exchanges them with the buffers of `state`
      while it owns both. So another thread must not keep a view of a state buffer after its ownership ends, except a
      view that follows the exchange (`StateBuffer.view`).
    """

    def __init__(
        self,
        spec: UnitSpec,
        layout: UnitLayout,
        parameters: Sequence[nn.Parameter],
        state: UnitState,
        order: int,
        updated: Future,
        codec: GradientCodec,
        held_dtype: torch.dtype | None = None,
    ) -> None:
        """Make a unit without uses. `codec`: the codec of its gradient. `held_dtype`: the data type of its held
        gradient in host memory or on SSD; None where it is not held."""
        self.spec = spec
        self.dtype = state.dtype_of("weight")
        self.converts_gradient = held_dtype not in (None, codec.dtype)
        """Whether the held gradient's buffer has another data type, so that the CPU converts even the first
        micro-batch."""
        self.parts: list[Unit] = []
        """The parts of a block with parameters in other data types. They are always on the GPU, like an outer module;
        their gradients leave with the block's."""
        self.order = order
        """The index in the order of the next forward: the deadline of this unit's update. Outer modules come first."""
        self.updated = self.completed = updated
        self.arrived = updated
        self.applied = updated
        """The last update that has reached the weights on the GPU, for a unit that is always there."""
        self.version = 0
        """The version of the weights; a slot with an older version has to be filled again. It is the same on all ranks,
        because every change of weights is called on all of them."""
        self.publish: Callable[[int], None] = _nothing
        """For shared weights: tells the other ranks that this rank's part of a version is complete."""
        self.await_others: Callable[[int], None] = _nothing
        """For shared weights: waits, on a lane, for the other ranks' parts of a version."""
        self.home: UnitState | None = None
        """For a unit that is promoted to the GPU: the state buffers that it returns to, with older content."""
        self.is_gathered = False
        """Whether the compute thread gathers its weights from the ranks each time it binds them."""
        self.uses = 0
        self.uses_done = 0
        self.counting = 0
        """How often the counts of uses were reset: graphs from before a reset no longer count."""
        self.left_out = 0
        """The number of backwards that gave no parameter of the model a gradient."""
        self.in_backward = False
        self.computing = 0
        """The number of its forwards under way."""
        self.raw = 0
        """The number of recomputations that have saved its weights as they are, and whose backward has not ended."""
        self.finalized = False
        """Whether this backward's gradient has left the parameters."""
        self.taken: list[torch.Tensor | None] | None = None
        """Gradients to average that are not, or no longer, the gradients of the parameters."""
        self.packed: PackedGradient | None = None
        """The buffer with the packed gradients, if they are packed."""
        self.is_postponed = False
        """Whether the gradients of its last backward wait for the other ranks' gradients."""
        self.gradient_ready = False
        """Whether the held gradient is the sum of the micro-batches so far."""
        self.resident: torch.Tensor | None = None
        """The GPU buffer of a unit that is always on the GPU (outer modules, GPU-tier blocks), in slot layout."""
        self.chunk_rows = 0
        """Rows of a chunk of an outer module (one matrix) that is streamed through the GPU
        (`ds_slide.runtime.weights.rows`)."""
        self.way_back: WayBack | None = None
        """The way back from speculative updates; None where there is none."""
        self.square_sum = SquareSum()
        """The square sum of the current gradient."""
        self.lay_out(layout, parameters, state, codec)

    def lay_out(
        self, layout: UnitLayout, parameters: Sequence[nn.Parameter], state: UnitState, codec: GradientCodec
    ) -> None:
        """Set what depends on which parameters are trainable: at the start, and when more become trainable. No update
        is pending."""
        self.layout = layout
        self.parameters = list(parameters)
        self.state = state
        self.codec = codec
        self.spans = state.optimizer.spans(_spans(codec.numel, self.spec.kind, layout.world_size))
        """Spans of the trainable state buffers. They are copied down, updated and copied up again one after the
        other."""
        self.span_updated = [self.updated] * len(self.spans)
        self.trainable = [
            (parameter, entry)
            for parameter, entry in zip(self.parameters, layout.entries, strict=True)
            if entry.group is not None
        ]
        self.trained = Trained([parameter for parameter, _ in self.trainable], codec.entries, codec.segments)

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def parameter_dtype(self) -> torch.dtype:
        """The data type of its parameters that a script sees outside of a forward."""
        return self.spec.precision.parameter

    @property
    def is_uploaded(self) -> bool:
        """Whether the result of its updates is uploaded from host memory or SSD. Otherwise the updates run on the
        GPU."""
        return self.state.written.buffer.tier != "gpu"

    @property
    def remainder_on_gpu(self) -> torch.Tensor | None:
        """The remainders that complete weights to masters on the GPU, for a unit with compressed gradients; None
        without."""
        remainder = self.state.masters.get("remainder")
        return None if remainder is None else remainder.tensor

    @property
    def is_streamed(self) -> bool:
        """Whether its weights are streamed through the window."""
        return self.resident is None and self.spec.kind == "block"

    @property
    def trains(self) -> bool:
        """Whether a parameter of the unit, or of one of its parts, has states and requires a gradient now."""
        return not self.trained.is_off or any(not part.trained.is_off for part in self.parts)

    @property
    def awaits_backward(self) -> bool:
        return self.uses > self.uses_done

    @property
    def can_give_up_slot(self) -> bool:
        """Whether its backward has begun, and the weights that it needs can be bound again."""
        return self.in_backward and not self.computing and not self.raw

    def count_uses_anew(self) -> None:
        """Reset the counts of uses, because a backward has ended, or never will."""
        self.uses = self.uses_done = self.computing = self.raw = 0
        self.counting += 1

    def expect_backward_again(self) -> None:
        """Keep the uses after a backward that gave no parameter a gradient. A graph that the script keeps may have
        another backward; a dropped graph takes its uses back (`UseToken`)."""
        self.uses_done = 0
        self.left_out += 1

    def open_update(self, failures: Failures, *, two_passes: bool = False) -> Update:
        """Open the futures of an update, because the weights are about to change."""
        self.version += 1
        self.mark_changed()
        publish, press = functools.partial(self.publish, self.version), self.state.written.press
        update = Update(self.name, len(self.spans), failures, press, publish, two_passes=two_passes)
        self.span_updated, self.updated, self.completed = update.spans, update.done, update.completed
        return update

    @property
    def has_gradient(self) -> bool:
        """Whether a parameter has a gradient from autograd, or a gradient was taken out of the parameters."""
        if self.taken is not None or self.packed is not None:
            return self.packed is not None or any(gradient is not None for gradient in self.gradients())
        return any(parameter.grad is not None for parameter, _ in self.trainable)

    def mark_changed(self) -> None:
        """Tell autograd that an update changes the weights: a graph that has saved them then raises, as in plain
        torch."""
        changed = [parameter for parameter, _ in self.trainable if parameter.requires_grad]
        torch.autograd.graph.increment_version(changed)

    def gradients(self) -> list[torch.Tensor | None]:
        """Return the gradients of the trainable parameters, or the gradients taken out of them; None for a parameter
        without one. Sparse gradients (of embeddings) become dense. Gradients of a backward with `create_graph` are
        detached."""
        if self.taken is not None:
            return self.taken
        return [None if parameter.grad is None else _dense(parameter.grad) for parameter, _ in self.trainable]

    def take_gradients(self) -> list[torch.Tensor | None]:
        """Take the gradients out of the parameters."""
        gradients = self.gradients()
        for parameter, _ in self.trainable:
            parameter.grad = None
        return gradients

    def drop_gradients(self) -> None:
        """Drop what `gradients` returns: its copy is under way."""
        if self.taken is None:
            self.take_gradients()
        self.taken = None

    def slot_views(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """Return one view per parameter, in its own shape, of a buffer in slot layout (at least `slot_numel` elements).
        Parameters keep the views after an evaluation in inference mode, so they are made outside of it: no graph may
        save inference tensors."""
        with torch.inference_mode(False):
            buffer = buffer.view(self.dtype)
            return [
                buffer[entry.slot_offset : entry.slot_offset + entry.numel].view(entry.shape)
                for entry in self.layout.entries
            ]


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    if gradient.requires_grad:
        gradient = gradient.detach()
    return gradient.to_dense() if gradient.is_sparse else gradient


# A span is 32 MiB of bf16: 0.6 ms of transfer, 3 ms of update. A vocabulary matrix of 311 M parameters has 19 spans. So
# the exposed time is its update and one span of transfer each way (48 ms), not the sum of the three (69 ms).
SPAN_NUMEL = 1 << 24


def _spans(numel: int, kind: str, world_size: int) -> list[slice]:
    # Blocks are small, and compute hides their transfers; with several ranks a unit's weights are uploaded as a whole.
    size = SPAN_NUMEL if kind == "outer" and world_size == 1 else max(numel, 1)
    return [slice(start, min(start + size, numel)) for start in range(0, numel, size)]


@dataclass(frozen=True)
class Empty:
    """The empty tensors that parameters hold while their unit is not on the GPU, as in ZeRO-3."""

    tensors: Mapping[torch.dtype, torch.Tensor]

    @classmethod
    def on(cls, device: torch.device, dtypes: Iterable[torch.dtype]) -> Empty:
        return cls({dtype: torch.empty(0, dtype=dtype, device=device) for dtype in dtypes})
