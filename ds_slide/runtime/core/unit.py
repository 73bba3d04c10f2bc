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
    """Of weights that no other rank reads."""


@dataclass
class SquareSum:
    """The square sum of one held gradient. Each gradient has its own: what the update lane adds up late, of one that
    `zero_grad` has dropped meanwhile, must not count for the next."""

    place: Literal["device", "host"] | None = None
    """Where it is; None: nothing has computed it yet."""
    on_host: float = 0.0


class PackedGradient(Protocol):
    """A buffer on the GPU with the gradients of a unit (`ds_slide.runtime.gradients.sources.Staging`)."""

    packed: torch.Tensor
    own: torch.Tensor
    free: Future


class Update:
    """Futures of one update of a unit: one for each span, kept when it has its new weights, and `done`, which is kept
    with the last of them. `completed`: every span has its new states, too; an update in two passes leaves them, and the
    held gradient that it needs for them, for later."""

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
        """`name`: of the unit. `bring_forward`: called when somebody begins to wait for it. `publish` tells the other
        ranks that this rank's part of the new weights is there."""
        self.is_pressed = False
        """Somebody waits for it, or has waited."""
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
        """Whoever begins to wait says so: nothing that the update needs may then wait for anything less needed."""
        self.is_pressed = True
        self._bring_forward()

    def finish(self, index: int) -> None:
        """Span `index` has its new weights."""
        self.spans[index].keep()
        with self._lock:
            self._left -= 1
            last = not self._left
        if last:
            self._publish()
            self.done.keep()

    def finish_states(self) -> None:
        """One more span has its new states, by the second of two passes. Called by the update lane alone."""
        self._left_states -= 1
        if not self._left_states:
            self.completed.keep()


class Unit:
    """Ownership, in the order of a step:

    * the compute thread (forward: the caller's; backward: autograd's) owns the counters and the binding
      of the parameters to GPU memory;
    * the held gradient (`state.gradient`), wherever it is, belongs to the d2h lane (and what that hands to the
      update lane) from `finalize` until `arrived` is kept, to the update lane until `completed` is kept, and
      to the compute thread otherwise;
    * the other state buffers of `state` belong to the update lane from the moment `updated` and `completed` are
      replaced by open futures until these are kept: the weights and what completes them to the masters until
      `updated`, the states of the update rule until `completed` (the same future, but for updates in two passes).
      The update leases them (`UnitState.lease`), span by span, and puts them back. Whoever else wants to read or
      write them waits for it first, and for state buffers on SSD also until they are written
      (`SlideRuntime.settle`). States on the GPU belong to the compute stream.
    * they belong to the update lane, too, while the unit has a speculative update (`Speculating.of`): others take it
      back before they read or write them (`SlideRuntime.take_back`).
    * where `way_back` is spare state buffers, these belong to the update lane, always. It exchanges them with those of
      `state` while these are its own, too. So others keep no view of a state buffer for longer than that is theirs, but
      for one that follows (`StateBuffer.view`).
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
        """`codec`: of its gradient. `held_dtype`: in which that is held in host memory or on SSD, None where it is
        not."""
        self.spec = spec
        self.dtype = state.dtype_of("weight")
        self.converts_gradient = held_dtype not in (None, codec.dtype)
        """The held gradient's buffer has another data type, so even the first micro-batch is converted by the CPU."""
        self.parts: list[Unit] = []
        """Of a block: its parameters in other data types. They are on the GPU all the time, as an outer module's are;
        their gradients leave with the block's."""
        self.order = order
        """Place in the order of the next forward: the deadline of this unit's update. Outer modules come first."""
        self.updated = self.completed = updated
        self.arrived = updated
        self.applied = updated
        """The last update that has been brought to the weights on the GPU: of a unit that is there all the time."""
        self.version = 0
        """Counts the weights' generations; a slot that holds an older one has to be filled again. The same on all
        ranks: whatever changes weights is called on all of them."""
        self.publish: Callable[[int], None] = _nothing
        """Of shared weights: tells the other ranks that this rank's part of that version is there."""
        self.await_others: Callable[[int], None] = _nothing
        """Of shared weights: waits, on a lane, for the other ranks' parts of that version."""
        self.home: UnitState | None = None
        """Of a unit whose states are on the GPU for now: the state buffers that it goes back to, which are older."""
        self.is_gathered = False
        """Its weights are gathered from the ranks by the compute thread each time that they are bound."""
        self.uses = 0
        self.uses_done = 0
        self.counting = 0
        """How often uses have been counted anew: graphs of before no longer count."""
        self.left_out = 0
        """Backwards that have given no parameter of the model a gradient."""
        self.in_backward = False
        self.computing = 0
        """Forwards of it that are under way."""
        self.raw = 0
        """Recomputations that have saved its weights as they are, and whose backward has not ended."""
        self.finalized = False
        """This backward's gradient has left the parameters."""
        self.taken: list[torch.Tensor | None] | None = None
        """Gradients that are averaged although they are not, or no more, those of the parameters."""
        self.packed: PackedGradient | None = None
        """Where they are packed, if they are."""
        self.is_postponed = False
        """Gradients of its last backward wait until other ranks have theirs."""
        self.gradient_ready = False
        """The held gradient is the sum of this accumulation window's gradients so far."""
        self.resident: torch.Tensor | None = None
        """GPU buffer of a unit that is always on the GPU (outer modules, GPU-tier blocks), in slot layout."""
        self.chunk_rows = 0
        """Rows of a chunk of an outer module, one matrix, that passes through the GPU
        (`ds_slide.runtime.weights.rows`)."""
        self.way_back: WayBack | None = None
        """From updates that begin before the norm is known; None where there is none."""
        self.square_sum = SquareSum()
        """Of the current gradient."""
        self.lay_out(layout, parameters, state, codec)

    def lay_out(
        self, layout: UnitLayout, parameters: Sequence[nn.Parameter], state: UnitState, codec: GradientCodec
    ) -> None:
        """Set what depends on which parameters are trainable: once, and when more of them are. No update is pending."""
        self.layout = layout
        self.parameters = list(parameters)
        self.state = state
        self.codec = codec
        self.spans = state.optimizer.spans(_spans(codec.numel, self.spec.kind, layout.world_size))
        """Parts of the trainable state buffers that go down, through the update and up again one behind the other."""
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
        """What a script sees of its parameters outside of a forward."""
        return self.spec.precision.parameter

    @property
    def is_uploaded(self) -> bool:
        """Whether what its updates write comes to the GPU from host memory or SSD. Otherwise they are done there."""
        return self.state.written.buffer.tier != "gpu"

    @property
    def remainder_on_gpu(self) -> torch.Tensor | None:
        """What completes weights to masters there, of a unit whose gradients are compressed, if that is anywhere."""
        remainder = self.state.masters.get("remainder")
        return None if remainder is None else remainder.tensor

    @property
    def is_streamed(self) -> bool:
        """Whether it passes through the window."""
        return self.resident is None and self.spec.kind == "block"

    @property
    def trains(self) -> bool:
        """Whether a parameter of it, or of a part of it, has states and requires a gradient now."""
        return not self.trained.is_off or any(not part.trained.is_off for part in self.parts)

    @property
    def awaits_backward(self) -> bool:
        return self.uses > self.uses_done

    @property
    def can_give_up_slot(self) -> bool:
        """Whether its backward has begun, and what that needs of the weights can be bound again."""
        return self.in_backward and not self.computing and not self.raw

    def count_uses_anew(self) -> None:
        """A backward has ended, or never will."""
        self.uses = self.uses_done = self.computing = self.raw = 0
        self.counting += 1

    def expect_backward_again(self) -> None:
        """A backward has ended that gave no parameter a gradient. Its graph, where the script keeps it, may have
        another one; a graph that is dropped takes its uses back (`UseToken`)."""
        self.uses_done = 0
        self.left_out += 1

    def open_update(self, failures: Failures, *, two_passes: bool = False) -> Update:
        """The weights are about to change: new futures."""
        self.version += 1
        self.mark_changed()
        publish, press = functools.partial(self.publish, self.version), self.state.written.press
        update = Update(self.name, len(self.spans), failures, press, publish, two_passes=two_passes)
        self.span_updated, self.updated, self.completed = update.spans, update.done, update.completed
        return update

    @property
    def has_gradient(self) -> bool:
        """Whether autograd has left a gradient in any of its parameters, or one was taken out of them."""
        if self.taken is not None or self.packed is not None:
            return self.packed is not None or any(gradient is not None for gradient in self.gradients())
        return any(parameter.grad is not None for parameter, _ in self.trainable)

    def mark_changed(self) -> None:
        """Tell autograd that an update changes the weights: a graph that has saved them raises, as in plain torch."""
        changed = [parameter for parameter, _ in self.trainable if parameter.requires_grad]
        torch.autograd.graph.increment_version(changed)

    def gradients(self) -> list[torch.Tensor | None]:
        """What the trainable parameters have, or what was taken out of them; None where one has none. Sparse ones (of
        embeddings) become dense, and those of a backward with `create_graph` leave their graph."""
        if self.taken is not None:
            return self.taken
        return [None if parameter.grad is None else _dense(parameter.grad) for parameter, _ in self.trainable]

    def take_gradients(self) -> list[torch.Tensor | None]:
        """The parameters' gradients, which they have no more."""
        gradients = self.gradients()
        for parameter, _ in self.trainable:
            parameter.grad = None
        return gradients

    def drop_gradients(self) -> None:
        """What `gradients` gives is on its way."""
        if self.taken is None:
            self.take_gradients()
        self.taken = None

    def slot_views(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """One view per parameter, in its own shape, of a buffer in slot layout (of `slot_numel` elements, or more).
        Parameters keep them when an evaluation in inference mode is over, whose own tensors no graph may save."""
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


# 32 MiB of bf16: 0.6 ms of transfer, 3 ms of update. A vocabulary matrix of 311 M parameters makes 19 such spans, so
# that what nothing hides is its update and one span of transfer each way (48 ms), not the sum of the three (69 ms).
SPAN_NUMEL = 1 << 24


def _spans(numel: int, kind: str, world_size: int) -> list[slice]:
    # Blocks are small and hidden; with several ranks a unit's weights go up as a whole.
    size = SPAN_NUMEL if kind == "outer" and world_size == 1 else max(numel, 1)
    return [slice(start, min(start + size, numel)) for start in range(0, numel, size)]


@dataclass(frozen=True)
class Empty:
    """What a parameter holds while its unit is not on the GPU: ZeRO-3's empty tensor, as the model declares it."""

    tensors: Mapping[torch.dtype, torch.Tensor]

    @classmethod
    def on(cls, device: torch.device, dtypes: Iterable[torch.dtype]) -> Empty:
        return cls({dtype: torch.empty(0, dtype=dtype, device=device) for dtype in dtypes})
