"""A block that is recomputed in backward, and replays its forward, its recomputation and its backward.

Such a block keeps its inputs only. So all blocks record in the same memory, where nothing stays: the forward copies its
inputs to their places, replays, and returns copies of the results. The backward copies the inputs again, replays the
forward, and then the backward. Both are recorded in the first backward that can be.

Weights that stream have to lie where they lay at the recording. The window brings a block back to its own slot. Where
they lie elsewhere, or a call differs from the recorded one, operators compute what the replay would: the forward, whose
graph is dropped, and in backward both. The results are the same, to the bit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch._C import _len_torch_dispatch_stack

from ds_slide.runtime.activations.block_state import WatchedCall, modified
from ds_slide.runtime.activations.checkpointing import UNASKED, BlockCall
from ds_slide.runtime.captured.block import (
    READS_OTHERS,
    CapturedBlock,
    Recording,
    is_plain_context,
    needs_gradient,
)
from ds_slide.runtime.captured.checks import AllRandom, leaves_below
from ds_slide.runtime.captured.graphs import Pool
from ds_slide.runtime.captured.inputs import PLAIN, NotRecordable, leaves_of, with_leaves
from ds_slide.runtime.weights.saved_weights import hooks_around, only_hooks_of_block

MOST_MISPLACED = 3
"""Calls in a row that find the weights elsewhere before a block is recorded anew."""
_TENSOR = object()
"""Stands for a tensor among the arguments of a call: the node of autograd holds the tensor."""


@dataclass
class _Use:
    """One call, between its forward and its backward. `written`: the block's own forward. `hollow`: its arguments
    without tensors. `trained`: the trained weights."""

    written: Callable[..., Any]
    hollow: Any
    trained: Sequence[nn.Parameter]
    watched: WatchedCall
    """Runs the operators."""
    guarded: Sequence[nn.Parameter] = ()
    """Weights that backward has to find as the forward found them: the script has not asked for a recomputation."""
    versions: Sequence[int] = ()
    """Of these weights in the forward."""
    random: AllRandom | None = None
    """The generators before the forward, if it has drawn from them."""

    def with_tensors(self, tensors: Sequence[torch.Tensor]) -> tuple[Any, list[Any]]:
        """Return the arguments, and their leaves."""
        rest = iter(tensors)
        leaves = [next(rest) if leaf is _TENSOR else leaf for leaf in leaves_of(self.hollow)]
        return with_leaves(self.hollow, iter(leaves)), leaves


class RecomputedBlock(CapturedBlock):
    """All methods are called by the threads that compute, one at a time."""

    watched: WatchedCall | None = None
    """Watches the operators of the latest call; None for a replay."""
    _call: BlockCall | None = None
    """The call under way."""
    _misplaced = 0
    """Replays in a row that could not be, since the weights lay elsewhere."""

    @property
    def _pool(self) -> Pool:
        return self._memory.backwards

    # ---- a forward ---------------------------------------------------------------------------------------------------

    def may_run(self, call: BlockCall) -> bool:
        """Whether a call may come here instead of to its checkpoint."""
        around = hooks_around()
        has_plain_hooks = around is None or only_hooks_of_block(around)
        return isinstance(call.function, functools.partial) and has_plain_hooks and self._may_replay_here()

    def run(self, call: BlockCall) -> Any:
        """Run the forward of a call that may come here."""
        self._call, self.watched, self.has_replayed = call, None, False
        try:
            return self._run_inside(call)
        finally:
            self._call = None

    def _forward(self, written: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        try:
            return self._as_one_node(written, (args, kwargs))
        except NotRecordable as error:
            self._end_for(str(error))
            return UNASKED(written, *args, **kwargs)

    def _as_one_node(self, written: Callable[..., Any], given: Any) -> Any:
        """Run the forward as one node of autograd. Raises NotRecordable, see `_run_operators`."""
        leaves = list(leaves_of(given))
        with _without_hooks():
            recording = self._fitting(given, leaves)
            use = self._use_of(written, given, leaves, recording)
            copies = None if recording is None else self._replayed_forward(recording, leaves)
            if recording is not None and copies is not None:
                self.has_replayed = True
                use.watched.skip_forward(recording.before)
                result, made = recording.result, copies
                without_gradient: list[torch.Tensor] = []  # a recording has none of these
            else:
                result = self._run_operators(use, leaves)
                written_ones = list(leaves_of(result))
                made = [each.detach() if isinstance(each, torch.Tensor) else each for each in written_ones]
                pairs = zip(made, written_ones, strict=True)
                without_gradient = [
                    new for new, each in pairs if isinstance(new, torch.Tensor) and not each.requires_grad
                ]
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        results = [each for each in made if isinstance(each, torch.Tensor)]
        new = iter(_Again.apply(self, use, results, without_gradient, *tensors, *use.trained))
        return with_leaves(result, iter([next(new) if isinstance(each, torch.Tensor) else each for each in made]))

    def _replayed_forward(self, recording: Recording, leaves: Sequence[Any]) -> list[torch.Tensor | None] | None:
        """Return copies of the results of a replay; None where it has given other numbers than the operators."""
        with self._memory.in_use():
            self._memory.stack.pushed += 1
            recording.fill(leaves, None)
            recording.forward.replay()
            if not self._is_right(recording):
                return None
            return [None if each is None else each.detach().clone() for each in recording.results]

    def _use_of(
        self, written: Callable[..., Any], given: Any, leaves: Sequence[Any], recording: Recording | None
    ) -> _Use:
        """Return the use of a call. `recording`: what fits it."""
        assert self._call is not None
        hollow = with_leaves(given, iter([_TENSOR if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]))
        # A recording that fits has the same weights, without a walk through 13 modules.
        weights = self._module.parameters() if recording is None else recording.weights.trained
        trained = [each for each in weights if each.requires_grad]
        function = functools.partial(self._operators, written, hollow, trained)
        guarded = self._call.parameters if self._call.written is UNASKED else []
        versions = [each._version for each in guarded]
        return _Use(
            written,
            hollow,
            trained,
            WatchedCall(self._state, replace(self._call, function=function)),
            guarded,
            versions,
        )

    def _run_operators(self, use: _Use, leaves: Sequence[Any]) -> Any:
        """Run the forward by operators, and note whether the block can be recorded. Raises NotRecordable where its
        backward cannot be taken apart from the rest; nothing has been drawn then."""
        random = AllRandom(self._memory.device.torch)
        result, inputs, stand_ins = use.watched(*leaves)
        self.watched = use.watched
        if use.watched.has_changed:
            self._end_for(f"it changes {self._state.changes}")
        if random.has_been_drawn_from():
            use.random = random
            self._end_for("it draws random numbers")
        made = list(leaves_of(result))
        why = "a result is no tensor"
        if all(isinstance(each, (torch.Tensor, *PLAIN)) for each in made):
            if leaves_below(made) <= {id(each) for each in (*inputs, *stand_ins)}:
                return result
            why = READS_OTHERS
        random.put_back()
        raise NotRecordable(why)

    def _end_for(self, why: str) -> None:
        self.end()
        self.why = why

    def _operators(
        self, written: Callable[..., Any], hollow: Any, trained: Sequence[nn.Parameter], *leaves: Any
    ) -> tuple[Any, list[torch.Tensor], list[nn.Parameter]]:
        """Run the block as it is written. -> its result with a graph, and the leaves of this graph: the inputs that
        need a gradient, and stand-ins for the trained weights."""
        own = [
            leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, torch.Tensor) else leaf
            for leaf in leaves
        ]
        args, kwargs = with_leaves(hollow, iter(own))
        with torch.enable_grad(), self._stand_ins(trained) as stand_ins:
            result = written(*args, **kwargs)
        return result, [leaf for leaf in own if needs_gradient(leaf)], stand_ins

    def _fitting(self, given: Any, leaves: Sequence[Any]) -> Recording | None:
        """Return the recording, if it can be replayed for a call with these arguments."""
        recording = self.recording
        if recording is None or self.has_ended or recording.backward is None or not recording.is_valid():
            return None
        if not recording.weights.are_there():
            self._misplaced += 1
            return None
        self._misplaced = 0
        is_alike = recording.signature.fits(*given) is not None
        return recording if is_alike and recording.may_take(leaves) else None

    # ---- a backward --------------------------------------------------------------------------------------------------

    def backward_of(
        self,
        use: _Use,
        tensors: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor | None],
        receivers: Sequence[Any],
    ) -> list[torch.Tensor | None]:
        """Compute the backward of a call. `tensors`: among its arguments. `gradients`: of the tensors that it returned.
        `receivers`: the nodes of autograd that get the gradients of the tensors and the trained weights. -> what
        autograd gives to these."""
        self._require_no_graph()
        if use.versions != [each._version for each in use.guarded]:
            raise modified(self.name)
        with self._memory.in_use():
            self._memory.lent.take_back()
            pattern = tuple(each is not None for each in gradients)
            if not any(pattern):
                return [None] * (len(tensors) + len(use.trained))
            given, leaves = use.with_tensors(tensors)
            is_due = self.recording is None or self._misplaced >= MOST_MISPLACED
            is_plain = is_plain_context(self._memory.device.torch.type)
            if is_due and is_plain and not _len_torch_dispatch_stack() and not self.has_ended:
                self._record_both(use, given, leaves, gradients)
            recording = self._fitting(given, leaves)
            has_state = recording is not None and use.watched.may_find(recording.before)
            if recording is not None and is_plain and has_state and recording.pattern == pattern:
                found = self._replayed(recording, leaves, gradients)
                return self._given_on(use, tensors, found, receivers)
        return self._given_on(use, tensors, _gradients_by_operators(use, leaves, gradients), receivers)

    def _given_on(
        self,
        use: _Use,
        tensors: Sequence[torch.Tensor],
        found: Sequence[torch.Tensor | None],
        receivers: Sequence[Any],
    ) -> list[torch.Tensor | None]:
        """Return what autograd gives on of the gradients `found`, which the next replay may overwrite."""
        of_inputs = iter(found)
        copies = [
            each.clone() if needs_gradient(of) and (each := next(of_inputs)) is not None else None for of in tensors
        ]
        return copies + self._give(use.trained, list(of_inputs), receivers[len(tensors) :])

    def _record_both(
        self, use: _Use, given: Any, leaves: Sequence[Any], gradients: Sequence[torch.Tensor | None]
    ) -> None:
        """Record the forward and the backward, or note why they cannot be recorded."""
        before = use.watched.before
        if before is None or not before.is_there():  # the recording would be another forward's
            return
        self._take_out()
        self._try_to_record(use.written, given, leaves, None)
        if self.recording is None:
            return
        self.recording.before = before
        self.recording.pattern = tuple(each is not None for each in gradients)
        tensors = [each is not None for each in self.recording.results]
        if self.recording.needing == tensors:
            self._record_backward(self.recording, self._placed(self.recording, gradients))
        else:
            self._fail(ValueError("a result needs no gradient"))
        with self._memory.counted():
            self.release()

    def _take_out(self) -> None:
        self.recording, self._misplaced = None, 0

    def _placed(self, recording: Recording, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        """Copy the gradients of results to the places that the recorded backward reads."""
        results = [each for each in recording.results if each is not None]
        pairs = [(each, new) for each, new in zip(results, gradients, strict=True) if new is not None]
        places = self._shared.of_gradients([each for each, _ in pairs])
        for place, (_, gradient) in zip(places, pairs, strict=True):
            place.copy_(gradient)
        return places

    def _replayed(
        self, recording: Recording, leaves: Sequence[Any], gradients: Sequence[torch.Tensor | None]
    ) -> Sequence[torch.Tensor | None]:
        """Return the gradients of the inputs and the trained weights, in memory that the next replay overwrites."""
        assert recording.pattern is not None and recording.backward is not None
        recording.fill(leaves, None)
        places = self._placed(recording, gradients)
        recording.forward.replay()
        recording.backward.replay()
        if recording.compares:
            return self._compared(recording, recording.gradients, recording.pattern, places)
        return recording.gradients


def _gradients_by_operators(
    use: _Use, leaves: Sequence[Any], gradients: Sequence[torch.Tensor | None]
) -> list[torch.Tensor | None]:
    """Recompute a call and its backward. -> the gradients of the inputs that need one, and of the trained weights."""
    device = next(leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor))
    with (
        use.random.again() if use.random else nullcontext(),
        torch.autocast(device.type, enabled=False),
    ):  # the forward has been without, too
        result, inputs, stand_ins = use.watched(*leaves)
    made = [each for each in leaves_of(result) if isinstance(each, torch.Tensor)]
    both = [
        (each, gradient)
        for each, gradient in zip(made, gradients, strict=True)
        if each.requires_grad and gradient is not None
    ]
    results, given = [each for each, _ in both], [gradient for _, gradient in both]
    wanted = [*inputs, *stand_ins]
    if not results:
        return [None] * len(wanted)
    return list(torch.autograd.grad(results, wanted, given, allow_unused=True))


@contextmanager
def _without_hooks() -> Iterator[None]:
    """Leave out the block's hooks for saved tensors."""
    if (pair := hooks_around()) is None:
        yield
        return
    torch._C._autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        torch._C._autograd._push_saved_tensors_default_hooks(*pair)


class _Again(torch.autograd.Function):
    """The node of a call. `given`: the tensors among the call's arguments, which it saves, and the trained weights."""

    @staticmethod
    def forward(
        ctx: Any,
        block: RecomputedBlock,
        use: _Use,
        results: Sequence[torch.Tensor],
        without_gradient: Sequence[torch.Tensor],
        *given: torch.Tensor,
    ) -> Any:
        ctx.block, ctx.use = block, use
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*given[: len(given) - len(use.trained)])
        ctx.mark_non_differentiable(*without_gradient)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        receivers = [node for node, _ in ctx.next_functions]
        return (None, None, None, None, *ctx.block.backward_of(ctx.use, ctx.saved_tensors, gradients, receivers))
