"""A unit at run time: one block or outer module with its states, its place on the GPU and its pending update."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import nn

from ds_slide.compression.codec import GradientCodec
from ds_slide.errors import SlideError
from ds_slide.model.carried import Divided
from ds_slide.model.layout import Entry, UnitLayout
from ds_slide.plan.needs import is_averaged_in_place
from ds_slide.runtime.core.futures import Failures, Future
from ds_slide.runtime.core.settings import UnitPlan
from ds_slide.runtime.core.update import SquareSum, Trained, Update
from ds_slide.store.state import UnitState
from ds_slide.store.way_back import WayBack


class KeptResults:
    """Results that one call of a block keeps from its forward for its recomputations. A recomputation takes them in the
    same order. They are copies, because a model may add to a result in place."""

    def __init__(self) -> None:
        self._kept: list[torch.Tensor] = []
        self._versions: tuple[int, ...] = ()
        self._next = 0

    def begin(self, versions: tuple[int, ...]) -> None:
        """Begin the forward or a recomputation. `versions`: of the block's weights; with others than the forward's,
        the recomputation has other results."""
        if versions != self._versions:
            self._kept.clear()
        self._versions, self._next = versions, 0

    def take(self) -> torch.Tensor | None:
        """Return the next result of the forward; None where it is still to be computed."""
        return self._kept[self._next].clone() if self._next < len(self._kept) else None

    def put(self, result: torch.Tensor) -> None:
        """Go on to the next result, which is `result`."""
        if self._next == len(self._kept):
            self._kept.append(result.clone())
        self._next += 1


class PackedGradient(Protocol):
    """A GPU buffer with the gradients of a unit (`ds_slide.runtime.gradients.sources.Staging`)."""

    packed: torch.Tensor
    own: torch.Tensor
    free: Future


class SharedParts(Protocol):
    """Weights that all ranks of a machine read in each other's memory
    (`ds_slide.runtime.core.ranks.shared_weights.SharedWeights`)."""

    def publish(self, unit: Unit, version: int) -> None:
        """Tell the other ranks that this rank's part of a version is complete."""

    def await_others(self, unit: Unit, version: int) -> None:
        """Wait, on a lane, for the other ranks' parts of a version."""


@dataclass
class Uses:
    """The uses of a unit by forwards, each of which ends with its backward. The compute thread owns the counts."""

    begun: int = 0
    ended: int = 0
    resets: int = 0
    """How often the counts were reset: graphs from before a reset no longer count."""
    left_out: int = 0
    """The number of backwards that gave no parameter of the model a gradient. None of them has ended a use
    (`UseToken`)."""
    in_backward: bool = False
    computing: int = 0
    """The number of forwards under way."""
    raw: int = 0
    """The number of recomputations that have saved the weights as they are, and whose backward has not ended."""
    results: KeptResults | None = None
    """For the call of the block that is under way, where it may be recomputed."""

    @property
    def can_give_up_slot(self) -> bool:
        """Whether the unit's backward has begun, and the weights that it needs can be bound again."""
        return self.in_backward and not self.computing and not self.raw

    def count_anew(self) -> None:
        """Reset the counts, because a backward has ended, or never will."""
        self.begun = self.ended = self.computing = self.raw = 0
        self.resets += 1

    def expect_backward_again(self) -> None:
        """Keep the uses after a backward that gave no parameter a gradient. A graph that the script keeps may have
        another backward; a dropped graph takes its uses back (`UseToken`)."""
        self.ended = 0
        self.left_out += 1


@dataclass
class GradientStatus:
    """The gradient of a unit on its way, step by step. The compute thread owns the fields; the d2h lane keeps the
    future `arrived`, and the update lane may fill `square_sum`."""

    arrived: Future
    """Completed when the gradient that was taken last is at its destination."""
    finalized: bool = False
    """Whether this backward's gradient has left the parameters, or is announced to the other ranks. It is set when the
    unit's last use has ended, and reset for all units when the backward has ended, however it has
    (`Taking.finalize_rest`, `Interruptions`). `take_left_gradient` and `take_agreed` do not count: what they take is
    another backward's."""
    taken: list[torch.Tensor | None] | None = None
    """Gradients to average that are not, or no longer, the gradients of the parameters."""
    staging: PackedGradient | None = None
    """The buffer with the packed gradients, if they are packed."""
    is_postponed: bool = False
    """Whether the gradients of the last backward wait for the other ranks' gradients."""
    has_sum: bool = False
    """Whether the held gradient is the sum of the micro-batches so far."""
    square_sum: SquareSum = field(default_factory=SquareSum)
    """The square sum of the current gradient."""
    gpu_sum: torch.Tensor | None = None
    """The GPU buffer that adds up the gradients of a step, in the data type of the held gradient. None: the CPU adds
    them up."""
    is_in_gpu_sum: bool = False
    """Whether the sum so far is in `gpu_sum` alone, and not in the held gradient (`Gradients.bring_down`)."""

    def forget(self) -> None:
        """Forget the sum so far: a step applies it, or it is dropped."""
        self.has_sum = self.is_in_gpu_sum = False


class Unit:
    """One block or outer module. Ownership of its parts, in the order of a step:

    * the compute thread (forward: the caller's; backward: autograd's) owns `uses`, `gradient` and the binding of the
      parameters to GPU memory;
    * the held gradient (`state.gradient`) belongs to the d2h lane, and to the update lane for the tasks that the d2h
      lane submits, from `Gradients.send` until `gradient.arrived` is complete. Then it belongs to the update lane until
      `completed` is complete, and to the compute thread otherwise;
    * the other state buffers of `state` belong to the update lane from the moment `updated` and `completed` are
      replaced by open futures until these are complete: the weights and their low halves until `updated`, the states of
      the update rule until `completed` (the same future, but for updates in two passes). The update leases them
      (`UnitState.lease`), span by span, and puts them back. Any other thread waits for the update before it reads or
      writes them, and for state buffers on SSD also until they are written (`StateAccess.settle`). States on the GPU
      belong to the compute stream.
    * they also belong to the update lane while the unit has a speculative update (`Speculating.of`). Other threads take
      that update back before they read or write them (`StateAccess.take_back`).
    * where whole matrices are updated, the update lane hands its part on to the lanes of their products and copies,
      which end the update (`ds_slide.runtime.updates.matrices`).
    * spare state buffers in `way_back` always belong to the update lane. It exchanges them with the buffers of `state`
      while it owns both. So another thread must not keep a view of a state buffer after its ownership ends, except a
      view that follows the exchange (`StateBuffer.view`).
    """

    def __init__(
        self,
        plan: UnitPlan,
        order: int,
        state: UnitState,
        updated: Future,
        held_dtype: torch.dtype | None = None,
        *,
        experts_in_parts: bool = False,
    ) -> None:
        """Make a unit without uses. `updated`: a complete future. `held_dtype`: the data type of its held gradient in
        host memory or on SSD; None where it is not held. `experts_in_parts`: whether its experts are in no slot."""
        self.spec = plan.spec
        self.dtype = state.dtype_of("weight")
        self.converts_gradient = held_dtype not in (None, plan.codec.dtype)
        """Whether the held gradient's buffer has another data type, so that the CPU converts even the first
        micro-batch."""
        self.parts: list[Unit] = []
        """The parts of a block with parameters in other data types. They are always on the GPU, like an outer module;
        their gradients leave with the block's."""
        self.order = order
        """The index in the order of the next forward: the deadline of this unit's update. Outer modules come first."""
        self.uses = Uses()
        self.gradient = GradientStatus(updated)
        self.updated = self.completed = updated
        self.applied = updated
        """The last update that has reached the weights on the GPU, for a unit that is always there."""
        self.version = 0
        """The version of the weights; a slot with an older version has to be filled again. It is the same on all ranks,
        because every change of weights is called on all of them."""
        self.shared: SharedParts | None = None
        """The ranks' parts of the weights, where the ranks share them."""
        self.home: UnitState | None = None
        """For a unit that is promoted to the GPU: the state buffers that it returns to, with older content."""
        self.is_gathered = False
        """Whether the compute thread gathers its weights from the ranks each time it binds them."""
        self.resident: torch.Tensor | None = None
        """The GPU buffer of a unit that is always on the GPU (outer modules, GPU-tier blocks), in slot layout."""
        self.chunk_rows = plan.chunk_rows
        """Rows of a chunk of an outer module (one matrix) that is streamed through the GPU
        (`ds_slide.runtime.weights.rows`)."""
        self.way_back: WayBack | None = None
        """The way back from speculative updates; None where there is none."""
        self._experts_in_parts = experts_in_parts
        self._carried = plan.carried
        self.lay_out(plan.layout, plan.parameters, state, plan.codec)

    def lay_out(
        self, layout: UnitLayout, parameters: Sequence[nn.Parameter], state: UnitState, codec: GradientCodec
    ) -> None:
        """Set what depends on which parameters are trainable: at the start, and when more become trainable. No update
        is pending."""
        self.layout = layout
        self.slot_layout = layout.without_experts() if self._experts_in_parts else layout
        """What a slot holds: all but the experts that move in parts (`ds_slide.runtime.weights.experts`)."""
        self.parameters = list(parameters)
        self.state = state
        self.codec = codec
        self.is_averaged_in_place = is_averaged_in_place(codec, self.spec.kind)
        """Whether several ranks average its gradient from where autograd left it, as the plan has it."""
        places = {entry.name: entry for entry in (*layout.entries, *layout.carried)}
        self.carried = [CarriedTensor(each.tensor, places[name], each.of) for each, name in self._carried]
        """Frozen tensors that are bound together with the parameters."""
        self.dtypes = [self.declared(entry) for entry in layout.entries]
        """The data types of the parameters that a script sees outside of a forward."""
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
        """The data type of its parameters that a script sees outside of a forward, except those kept as bytes
        (`dtypes`)."""
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
        return self.uses.begun > self.uses.ended

    def open_update(self, failures: Failures, *, two_passes: bool = False) -> Update:
        """Open the futures of an update, because the weights are about to change."""
        self.version += 1
        self.mark_changed()
        update = Update(self, failures, two_passes=two_passes)
        self.span_updated, self.updated, self.completed = update.spans, update.done, update.completed
        return update

    @property
    def has_gradient(self) -> bool:
        """Whether a parameter has a gradient from autograd, or a gradient was taken out of the parameters."""
        if self.gradient.taken is not None or self.gradient.staging is not None:
            return self.gradient.staging is not None or any(gradient is not None for gradient in self.gradients())
        for parameter, _ in self.trainable:  # `any` would make a generator, and a block's first parameter decides
            if parameter.grad is not None:
                return True
        return False

    def mark_changed(self) -> None:
        """Tell autograd that an update changes the weights: a graph that has saved them then raises, as in plain
        torch."""
        changed = [parameter for parameter, _ in self.trainable if parameter.requires_grad]
        torch.autograd.graph.increment_version(changed)

    def gradients(self) -> list[torch.Tensor | None]:
        """Return the gradients of the trainable parameters, or the gradients taken out of them; None for a parameter
        without one. Sparse gradients (of embeddings) become dense. Gradients of a backward with `create_graph` are
        detached."""
        if self.gradient.taken is not None:
            return self.gradient.taken
        found = [parameter.grad for parameter, _ in self.trainable]
        return [_dense(each) if each is not None and (each.requires_grad or each.is_sparse) else each for each in found]

    def take_gradients(self) -> list[torch.Tensor | None]:
        """Take the gradients out of the parameters."""
        gradients = self.gradients()
        self._leave_without()
        return gradients

    def _leave_without(self) -> None:
        for parameter, _ in self.trainable:
            parameter.grad = None

    def drop_gradients(self) -> None:
        """Drop what `gradients` returns: its copy is under way."""
        if self.gradient.taken is None:
            self._leave_without()
        self.gradient.taken = None

    def declared(self, entry: Entry) -> torch.dtype:
        """Return the data type of a parameter that a script sees outside of a forward."""
        return entry.dtype or self.parameter_dtype

    @property
    def in_slot(self) -> list[nn.Parameter]:
        """The parameters that a slot holds."""
        return self.parameters[: len(self.slot_layout.entries)]

    @property
    def experts(self) -> dict[str, Entry]:
        """The parameters of experts that move in parts, by name."""
        return {entry.name: entry for entry in self.layout.entries[len(self.slot_layout.entries) :]}

    def slot_views(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """Return one view per parameter that a slot holds, and then one per carried tensor, in its own shape, of a
        buffer in slot layout (at least `slot_numel` elements). Parameters keep the views after an evaluation in
        inference mode, so they are made outside of it: no graph may save inference tensors."""
        with torch.inference_mode(False):
            buffer = buffer.view(self.dtype)
            places = (*self.slot_layout.entries, *(each.entry for each in self.carried))
            return [entry.viewed(buffer[entry.slot_place], entry.numel).view(entry.shape) for entry in places]

    def find_carried_home(self) -> None:
        """Point the carried tensors to the state buffer of the weights, which has a new place, or is there at last.
        They are as empty as parameters between forwards where that buffer is on SSD, or has this rank's part alone."""
        for each in self.carried:
            each.home = torch.empty(0, dtype=each.tensor.dtype)
            if each.entry not in self.layout.entries:  # not a second name of a parameter's memory
                view, entry = self.state.weights.buffer.view(each.entry.place), each.entry
                if view is not None and self.layout.world_size == 1:
                    Divided.forget(each.tensor)
                    each.home = entry.viewed(view, entry.numel).view(entry.shape)
                else:
                    own = each.home if view is None else entry.viewed(view, entry.partition_numel)
                    Divided(entry.shape, own).note(each.tensor)
            each.point_to(each.home)

    def bind_carried(self, views: Sequence[torch.Tensor]) -> None:
        """Point the carried tensors to `views` for a forward or backward."""
        for each, view in zip(self.carried, views, strict=True):
            each.bind(view)

    def bring_carried_home(self) -> None:
        """Point the carried tensors to host memory, where they are whole between forwards. Raises SlideError where a
        forward or backward has written one: the write would be lost. What was written while the unit's weights stayed
        on the GPU goes with them."""
        lost = []
        for each in self.carried:
            if self.resident is not None:
                each.take_write_home()
            if each.bring_home():
                lost.append(each.entry.name)
        if lost:
            raise SlideError(
                f"{lost[0]} was written by a forward of {self.name}, but it is a large buffer beside packed weights, "
                "which DS-Slide streams as frozen bytes, so the write would be lost; register what a forward writes "
                "with persistent=False"
            )

    def carried_with(self, parameter: nn.Parameter) -> list[CarriedTensor]:
        """Return what is read together with a parameter and is in memory of its own."""
        return [each for each in self.carried if each.of is parameter and each.entry not in self.layout.entries]

    def note_carried_writes(self) -> None:
        """Let the weights be fetched again where a script has written a carried tensor between forwards. Raises
        SlideError where it was empty then, or has been given memory of another kind."""
        written = [each for each in self.carried if each.is_written]
        for each in written:
            if self.resident is None and Divided.of(each.tensor) is not None:
                each.bring_home()
                raise SlideError(
                    f"{each.entry.name} was written between forwards, but it is on SSD or each rank has a part of it; "
                    "write it with load_state_dict, on all ranks"
                )
        for each in written:
            each.take_write_home()
        if written and self.resident is None:
            self.version += 1


class CarriedTensor:
    """A frozen tensor that moves with a block, and its place in the layout."""

    def __init__(self, tensor: torch.Tensor, entry: Entry, of: nn.Parameter | None) -> None:
        """`of`: the packed parameter that is read together with it, if any."""
        self.tensor = tensor
        self.entry = entry
        self.of = of
        self.home = tensor.data
        """Its memory while the block is not bound."""
        self.version = tensor._version
        """Autograd's count of its writes, when it was bound last."""
        self.is_lent = False
        """Whether it has memory of its own between forwards, for a script."""
        self._bound = self.home
        """The memory that it was given last."""

    def bind(self, view: torch.Tensor) -> None:
        """Give it this memory, whose contents are its own."""
        self.point_to(view)
        self.version = self.tensor._version

    @property
    def is_written(self) -> bool:
        """Whether it has been written in place, or given other memory (`tensor.data = ...`), since it was bound or
        brought home."""
        tensor = self.tensor
        is_there = tensor.dtype == self.home.dtype and tensor.is_set_to(self._bound)
        return self.version != tensor._version or not is_there

    def take_write_home(self) -> None:
        """Copy what was written to host memory, and to the memory that it was given last. Leave it alone where it is
        not whole there. Raises SlideError where it has been given another shape or data type."""
        new, entry = self.tensor.data, self.entry
        if not self.is_written:
            return
        if new.shape != entry.shape or new.dtype != self.home.dtype:
            self.bind(self._bound)
            raise SlideError(
                f"the data of {entry.name} was replaced by {new.dtype} of shape {tuple(new.shape)}, but this large "
                f"buffer moves with its block as {self.home.dtype} of shape {tuple(entry.shape)}; assign another "
                f"tensor of the accelerator in its place ({entry.name} = tensor), which then stays there"
            )
        if new.shape != self.home.shape:
            return
        for place in (self._bound, self.home):
            if place.data_ptr() != new.data_ptr():
                place.copy_(new)
        self.bind(self._bound)

    def point_to(self, memory: torch.Tensor) -> None:
        """Give it this memory. A write that has not been noticed yet stays one."""
        self.tensor.data = self._bound = memory

    def bring_home(self) -> bool:
        """Point it to host memory. -> whether it had been written since it was bound."""
        written = self.is_written
        self.bind(self.home)
        return written

    def lend(self, whole: torch.Tensor) -> None:
        """Give it memory of its own until `take_back`."""
        self.bind(whole)
        self.is_lent = True

    def take_back(self) -> None:
        """Take that memory away."""
        self.bind(self.home)
        self.is_lent = False


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
