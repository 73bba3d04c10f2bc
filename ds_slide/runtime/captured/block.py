"""A block that replays its forward and backward.

The hooks of the block itself are called as always; only its `forward` is replaced for the length of the call:

    recording   has leaves of its own: the places of inputs, and stand-ins for the trained weights, on their memory
    forward     copies the inputs to the places that the recording reads, replays, and returns copies of the results
    backward    copies the gradient of the results, replays, and puts the gradients of weights into `parameter.grad`.
                Where autograd would do more with them (hooks, `torch.autograd.grad`), it gets copies

The results have the bits of the operators as they are written: a recording launches the same kernels.
A call that differs from the recorded one runs as it is written. The first call and its backward are recorded. A
backward that cannot be recorded, or that gets the gradients of other results, runs through the recorded graph. Where
neither can come, this graph goes, and its saved tensors leave their memory to recordings of other shapes (`release`).
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from operator import is_
from typing import Any

import torch
from torch import nn
from torch._C import _len_torch_dispatch_stack
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from ds_slide.errors import SlideError
from ds_slide.runtime.activations.block_state import Before, BlockState
from ds_slide.runtime.activations.checkpointing import BlockCall
from ds_slide.runtime.captured.checks import HostRandom, MadeOf, NoCommunication, Weights, have_hooks, leaves_below
from ds_slide.runtime.captured.comparison import COMPARISONS, differ, run_beside
from ds_slide.runtime.captured.graphs import Graph, Memory, Pool, Token
from ds_slide.runtime.captured.inputs import NotRecordable, Place, SharedPlaces, Signature, leaves_of, with_leaves
from ds_slide.runtime.core.calls import in_backward
from ds_slide.runtime.core.context import AS_THEY_ARE
from ds_slide.runtime.weights.saved_weights import SavedTensor, hooks_around

_ABSENT = object()
READS_OTHERS = "it reads a tensor with a gradient that is neither an input nor its own weight"
WAY_OUT = 'set "ds_slide": {"captured_blocks": false}'


@dataclass
class Recording:
    """The recorded call. `made_of`, `weights`: of the block. `places`: of the call's leaves, None for a leaf that is no
    tensor. `inputs`: the places that need a gradient. `result`: what the forward returns. `made`: its leaves, with
    their graph, of which `results` has the first ones for ever. `needing`: which of them need a gradient."""

    signature: Signature
    made_of: MadeOf
    weights: Weights
    places: list[Place | None]
    inputs: list[torch.Tensor]
    forward: Graph
    backward: Graph | None = None
    leaves: list[nn.Parameter] = field(default_factory=list)
    """Stand-ins for the trained weights in the recording."""
    pattern: tuple[bool, ...] | None = None
    """Which results had a gradient in the first backward; None before it."""
    result: Any = None
    made: list[Any] = field(default_factory=list)
    results: list[torch.Tensor | None] = field(default_factory=list)
    needing: list[bool] = field(default_factory=list)
    gradients: list[torch.Tensor | None] = field(default_factory=list)
    """Places of the gradients of `inputs` and of the trained weights."""
    before: Before | None = None
    """The block's state at the recording; None until this call has ended."""
    again: Callable[[], Any] | None = None
    """Runs the operators on the same places."""
    compared: int = 0
    """Comparisons with the operators so far."""
    compared_among: int = 0
    """The recorded shapes at the latest one."""
    compares: bool = False
    """Whether the latest replay is compared."""

    def is_valid(self) -> bool:
        """Whether the block is what it was at the recording."""
        before = self.before
        return before is not None and before.is_there() and self.made_of.is_there()

    def may_replay(self, leaves: Sequence[Any]) -> bool:
        """Whether the weights are in their places, and no place would be overwritten that a waiting backward reads.
        Asked behind the hooks of the block, which bind the weights that the last step has written."""
        return self.weights.are_there() and self.may_take(leaves)

    def may_take(self, leaves: Sequence[Any]) -> bool:
        """Whether no place would be overwritten that a waiting backward reads."""
        return all(place is None or place.may_take(leaf) for place, leaf in zip(self.places, leaves, strict=True))

    def fill(self, leaves: Sequence[Any], token: Token | None) -> None:
        """Copy the leaves of a call to their places. `token`: of a forward whose backward reads them there."""
        with torch.no_grad():
            for place, leaf in zip(self.places, leaves, strict=True):
                if place is not None:
                    place.fill(leaf, token)


class CapturedBlock:
    """All methods are called by the threads that compute, one at a time."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        name: str,
        state: BlockState,
        memory: Memory,
        shared: SharedPlaces,
        place: tuple[int, int],
    ) -> None:
        """`modules`: the block's own and all in it. `place`: the number of its shape in `memory`, and of its recording
        among those of this shape."""
        self._modules = modules
        self._module, *self._inside = modules
        self.name = name
        self._state = state
        self._memory = memory
        self._shared = shared
        self._place = place
        self.recording: Recording | None = None
        self.has_replayed = False
        """Whether the latest call was a replay."""
        self._nothing = torch.empty(0, device=memory.device.torch)
        self.has_ended = False
        """Whether it runs as it is written for good."""
        self.why = ""
        """The reason for that, where it could not be recorded."""
        self.lacks_memory = False
        """Whether the reason is that the GPU has no memory left."""

    # ---- a call ------------------------------------------------------------------------------------------------------

    def run(self, call: BlockCall) -> Any:
        """Run a call of the block, and record it if it is the first one."""
        self.has_replayed = False
        recording = self.recording
        if hooks_around() is not None:
            return call.function(*call.inputs)
        if not self._may_replay_here() or not isinstance(call.function, functools.partial):
            return call.function(*call.inputs)
        before = self._state.before() if recording is None else None
        result = self._run_inside(call)
        if before is not None and self.recording is not None:
            self.recording.before = before
            self.has_ended = self._state.after(before)
        return result

    def _run_inside(self, call: BlockCall) -> Any:
        """Run a call, whose function is a partial one, with `_forward` in place of the block's own forward."""
        function, module = call.function, self._module
        assert isinstance(function, functools.partial)
        if function.args and function.args[0] is module:  # transformers 5.24: the hooks of the block are around us
            written = functools.partial(function.func, module)
            return self._forward(written, (*function.args[1:], *call.inputs), function.keywords)
        with self._exchanged():  # before: the function calls the module with its hooks
            return function(*call.inputs)

    def _may_replay_here(self) -> bool:
        """Whether a call may be replayed, as far as hooks for saved tensors and the place of weights do not matter."""
        if self.has_ended or in_backward() or not torch.is_grad_enabled():
            return False
        if not is_plain_context(self._memory.device.torch.type):
            return False
        if self.recording is None:
            return not _len_torch_dispatch_stack() and not have_hooks(self._inside)
        return self.recording.is_valid()

    @contextmanager
    def _exchanged(self) -> Iterator[None]:
        own = vars(self._module)
        before, written = own.get("forward", _ABSENT), self._module.forward

        def put_back() -> None:
            if before is _ABSENT:
                own.pop("forward", None)
            else:
                own["forward"] = before

        def forward(*args: Any, **kwargs: Any) -> Any:
            put_back()  # the block's state is looked at
            return self._forward(written, args, kwargs)

        own["forward"] = forward
        try:
            yield
        finally:
            put_back()

    def _forward(self, written: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        given = (args, kwargs)
        if self.has_ended:  # since `run`: a hook of the block found no memory, and the recordings were freed for it
            return written(*args, **kwargs)
        if self.recording is None:
            leaves: list[Any] | None = list(leaves_of(given))
        else:
            leaves = self.recording.signature.fits(args, kwargs)
        if leaves is None or (self.recording is not None and not self.recording.may_replay(leaves)):
            return written(*args, **kwargs)
        if (token := self._memory.stack.push(*self._place)) is None:
            return written(*args, **kwargs)
        if self.recording is None:
            self._try_to_record(written, given, leaves, token)
        else:
            self.recording.fill(leaves, token)
        if (recording := self.recording) is None:
            del token
            return written(*args, **kwargs)
        recording.forward.replay()
        if not self._is_right(recording):
            del token
            return written(*args, **kwargs)
        inputs = [leaf for leaf in leaves if needs_gradient(leaf)]
        with saved_tensors_hooks(lambda _: token, lambda _: self._nothing):
            results = _Replay.apply(self, weakref.ref(token), *inputs, *recording.weights.trained)
        self.has_replayed = True
        return with_leaves(recording.result, iter(results))

    # ---- comparisons with the operators ------------------------------------------------------------------------------

    def _is_right(self, recording: Recording) -> bool:
        """Whether a replayed forward is the operators', as far as it is compared."""
        memory = self._memory
        recording.compares = (
            recording.before is not None  # this is no recording
            and recording.compared < COMPARISONS
            and recording.compared_among < memory.recorded_shapes
        )
        if not recording.compares or recording.again is None:
            return True
        recording.compared += 1
        recording.compared_among = memory.recorded_shapes
        with torch.no_grad():
            result = run_beside(recording.again, memory.device.torch)
        if result is None:
            recording.compares = False
        elif differ(recording.results, list(leaves_of(result))):
            self._note_error()
            return False
        return True

    def _compared(
        self,
        recording: Recording,
        found: Sequence[torch.Tensor | None],
        pattern: Sequence[bool],
        places: Sequence[torch.Tensor],
    ) -> Sequence[torch.Tensor | None]:
        """Return the gradients `found` by a replay, or the operators' gradients where they differ."""
        recording.compares, again = False, recording.again
        assert again is not None

        def run() -> list[torch.Tensor | None]:
            with torch.enable_grad(), self._stand_ins(recording.weights.trained) as leaves:
                made = [each for each in leaves_of(again()) if needs_gradient(each)]
            results = [each for each, has_one in zip(made, pattern, strict=True) if has_one]
            return list(torch.autograd.grad(results, [*recording.inputs, *leaves], places, allow_unused=True))

        expected = run_beside(run, self._memory.device.torch)
        if expected is None or not differ(found, expected):
            return found
        self._note_error()
        return expected

    def _note_error(self) -> None:
        self._memory.has_erred = self.has_ended = True
        self.why = "a replay has given other numbers than the operators"

    # ---- recordings --------------------------------------------------------------------------------------------------

    @property
    def _pool(self) -> Pool:
        """The memory of recorded forwards."""
        return self._memory.forwards

    def _try_to_record(
        self, written: Callable[..., Any], given: Any, leaves: Sequence[Any], token: Token | None
    ) -> None:
        """Record the forward, or note why it cannot be recorded. An error of the script's own comes again when the call
        runs as it is written."""
        random = HostRandom()
        try:
            recording = self._prepared(given, leaves)
            recording.fill(leaves, token)
        except Exception as error:
            self._fail(error)
            return
        with self._memory.counted():
            try:
                self._record(recording, written, given, leaves)
                if random.has_been_drawn_from(of_torch=self._memory.device.is_cuda):
                    raise NotRecordable("it draws random numbers on the host")
                self.recording = recording
            except Exception as error:
                del recording  # its tensors, before memory is counted
                random.put_back()
                self._fail(error)

    def _fail(self, error: Exception) -> None:
        """Run as it is written from now on. A recording that waits for its backward stays until then."""
        self.has_ended, self.why, self.lacks_memory = True, str(error), "out of memory" in str(error)

    def _prepared(self, given: tuple[Any, Any], leaves: Sequence[Any]) -> Recording:
        """Return a recording with the places of its inputs. Raises NotRecordable."""
        signature = Signature(*given, self._memory.device.torch)
        places = [self._place_of(number, leaf) for number, leaf in enumerate(leaves)]
        inputs = [place.tensor for place, leaf in zip(places, leaves, strict=True) if place and needs_gradient(leaf)]
        for each in inputs:
            each.requires_grad_()
        made_of, weights = MadeOf(self._module, self._inside), Weights(self._module)
        return Recording(signature, made_of, weights, places, inputs, Graph(self._memory, self._pool))

    def _record(
        self, recording: Recording, written: Callable[..., Any], given: tuple[Any, Any], leaves: Sequence[Any]
    ) -> None:
        """Record the forward. Raises NotRecordable, or whatever the forward raises."""
        places = recording.places
        statics = [leaf if place is None else place.tensor for place, leaf in zip(places, leaves, strict=True)]
        args, kwargs = with_leaves(given, iter(statics))
        versions = [None if place is None else place.tensor._version for place in places]

        recording.again = functools.partial(written, *args, **kwargs)

        def forward() -> list[torch.Tensor | None]:
            with torch.enable_grad(), self._stand_ins(recording.weights.trained) as recording.leaves:
                recording.result = written(*args, **kwargs)
            recording.made = list(leaves_of(recording.result))
            if not all(isinstance(each, torch.Tensor | None) for each in recording.made):
                raise NotRecordable("a result is no tensor")
            return list(recording.made)

        with torch.no_grad(), self._alone():
            recording.results = recording.forward.record(forward)
        recording.needing = list(map(needs_gradient, recording.results))
        if not any(recording.needing):
            raise NotRecordable("no result needs a gradient")
        after = list(leaves_of((args, kwargs)))
        if len(after) != len(statics) or not all(map(is_, after, statics)):
            raise NotRecordable("it changes a container among its inputs")
        if versions != [None if place is None else place.tensor._version for place in places]:
            raise NotRecordable("it changes an input in place")
        if not leaves_below(recording.made) <= {id(each) for each in (*recording.inputs, *recording.leaves)}:
            raise NotRecordable(READS_OTHERS)

    def _alone(self) -> AbstractContextManager[Any]:
        """Return the context of a recording, in which a call that communicates with other ranks raises NotRecordable:
        these may run the block as it is written, or compare it, while this rank replays it."""
        return NoCommunication() if self._memory.several_ranks else nullcontext()

    @contextmanager
    def _stand_ins(self, trained: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
        """Exchange the trained weights for new leaves on the same memory, and yield these.

        Autograd keeps with a leaf the stream that it was used on first, and waits for it: a wait for another stream
        would end the recording. New leaves have versions of their own: a backward may be recorded, or run through the
        recorded graph, after weights have been updated. `backward` compares the versions of the weights themselves.
        """
        of = {id(each): nn.Parameter(each.data) for each in trained}
        holders = [(holder, name, weight) for each in self._modules for holder, name, weight in _weights_of(each)]
        exchanged = [(holder, name, weight) for holder, name, weight in holders if id(weight) in of]
        for holder, name, weight in exchanged:
            holder[name] = of[id(weight)]
        try:
            yield list(of.values())
        finally:
            for holder, name, weight in exchanged:
                holder[name] = weight

    def _place_of(self, number: int, leaf: Any) -> Place | None:
        if not isinstance(leaf, torch.Tensor):
            return None
        if leaf.requires_grad:
            return Place(self._memory.inputs.like((self._place[1], number), leaf))
        return self._shared.of(number, leaf)

    def _record_backward(self, recording: Recording, places: Sequence[torch.Tensor]) -> None:
        """Record the backward, if that is possible. `places`: of the gradients of the results that have one."""
        graph = Graph(self._memory, self._memory.backwards)
        pattern = recording.pattern
        assert pattern is not None
        with self._memory.counted():
            try:
                with self._alone():
                    gradients = graph.record(lambda: _gradients(recording, pattern, places))
            except Exception as error:
                self._fail(error)
                return
            recording.gradients = list(map(self._memory.place_of, gradients))
            recording.backward = graph
            del gradients

    @property
    def may_release(self) -> bool:
        """Whether it has a graph or a recording that is not needed any more, once no graph waits for its backward. A
        backward that is not recorded yet, or gets the gradients of other results, needs the graph."""
        recording = self.recording
        if recording is None or not recording.made:
            return False
        return self.has_ended or (recording.backward is not None and sum(recording.needing) == 1)

    def release(self) -> None:
        """Leave the memory of the recorded graph to recordings of other shapes. No forward is recorded for this shape
        any more: it would use the same memory."""
        if self.has_ended:
            self.end()
        if (recording := self.recording) is None:
            return
        results = recording.results
        results[:] = map(self._memory.place_of, results)  # in place: on the CPU accelerator replays write to them
        recording.result, recording.made = with_leaves(recording.result, iter(results)), []

    def end(self) -> None:
        """Run as it is written from now on, and free the recording. No graph waits for its backward."""
        self.has_ended = True
        self.recording = None

    # ---- the parts of `_Replay` --------------------------------------------------------------------------------------

    def results(self) -> tuple[list[torch.Tensor | None], list[torch.Tensor]]:
        """Return copies of the results, which the next replay overwrites, and those that need no gradient."""
        assert self.recording is not None
        copies = [None if each is None else each.detach().clone() for each in self.recording.results]
        pairs = zip(copies, self.recording.needing, strict=True)
        return copies, [copied for copied, needs in pairs if copied is not None and not needs]

    def versions(self) -> list[int]:
        """Return how often each weight has been written."""
        assert self.recording is not None
        return self.recording.weights.versions()

    def backward(
        self,
        token: Token | None,
        versions: Sequence[int],
        gradients: Sequence[torch.Tensor | None],
        receivers: Sequence[Any],
    ) -> list[torch.Tensor | None]:
        """Replay the backward. `versions`: of the weights in the forward. `gradients`: of all results. `receivers`: the
        nodes of autograd that get the gradients of inputs and weights. -> what autograd gives to these."""
        recording, memory = self.recording, self._memory
        if token is None or recording is None:
            raise SlideError(f"the backward of {self.name} came after its recording had been freed; {WAY_OUT}")
        self._require_no_graph()
        for weight, version in zip(recording.weights.parameters, versions, strict=True):
            SavedTensor(weight, version).unchanged()
        memory.lent.take_back()
        all_results = zip(recording.results, recording.needing, gradients, strict=True)
        needed = [(each, new) for each, needs, new in all_results if needs]
        pattern = tuple(new is not None for _, new in needed)
        given = [(each, new) for each, new in needed if each is not None and new is not None]
        count = len(recording.inputs)
        if not given:
            return [None] * (count + len(recording.weights.trained))
        places = self._shared.of_gradients([each for each, _ in given])
        for place, (_, gradient) in zip(places, given, strict=True):
            place.copy_(gradient)
        if recording.pattern is None and not _len_torch_dispatch_stack():
            recording.pattern = pattern
            self._record_backward(recording, places)
        if recording.backward is not None and pattern == recording.pattern:
            recording.backward.replay()
            found: Sequence[torch.Tensor | None] = recording.gradients
            if recording.compares:
                found = self._compared(recording, found, pattern, places)
        else:
            found = memory.aside(lambda: _gradients(recording, pattern, places))
        copies = [None if each is None else each.clone() for each in found[:count]]
        return copies + self._give(recording.weights.trained, found[count:], receivers[count:])

    def _require_no_graph(self) -> None:
        """Raise SlideError in a backward that makes a graph of its own."""
        if torch.is_grad_enabled():
            raise SlideError(
                f"a backward with create_graph=True goes through {self.name}, which replays its backward; {WAY_OUT}"
            )

    def _give(
        self, weights: Sequence[nn.Parameter], gradients: Sequence[torch.Tensor | None], receivers: Sequence[Any]
    ) -> list[torch.Tensor | None]:
        """Put gradients into `parameter.grad`. -> copies of the gradients that autograd is to give."""
        direct, rest = [], []
        with AS_THEY_ARE():
            for weight, gradient, receiver in zip(weights, gradients, receivers, strict=True):
                is_direct = gradient is not None and _only_accumulates(weight, receiver)
                rest.append(None if gradient is None or is_direct else gradient.clone())
                if gradient is not None and is_direct:
                    direct.append((weight, gradient))
        self._memory.lent.give(direct)
        return rest


def _gradients(
    recording: Recording, pattern: Sequence[bool], gradients: Sequence[torch.Tensor]
) -> list[torch.Tensor | None]:
    """Return the gradients of inputs and weights. `pattern`: which results that need a gradient have one."""
    wanted = [*recording.inputs, *recording.leaves]
    needing = [each for each in recording.made if needs_gradient(each)]
    results = [each for each, has_one in zip(needing, pattern, strict=True) if has_one]
    # The saved tensors of the recorded forward stay, because its replays write into them.
    return list(torch.autograd.grad(results, wanted, gradients, allow_unused=True, retain_graph=True))


def _only_accumulates(weight: nn.Parameter, receiver: Any) -> bool:
    """Whether autograd would do nothing with a gradient but add it to `weight.grad`. `receiver`: its node."""
    if weight._backward_hooks or weight._post_accumulate_grad_hooks or not weight.requires_grad:
        return False
    try:  # the backward may be one for some leaves alone
        return bool(torch._C._will_engine_execute_node(receiver))
    except RuntimeError:  # `torch.autograd.grad` returns this gradient
        return False


def is_plain_context(device: str) -> bool:
    """Whether operators run as they are written: not under autocast, a transform, or what watches each operator.
    `Retries` may be in force: a replay takes no memory."""
    if torch.is_anomaly_enabled() or torch.is_autocast_enabled(device):
        return False
    if _len_torch_dispatch_stack() and not all(map(_lets_replay, _get_current_dispatch_mode_stack())):
        return False
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return False
    return bool(torch._C._autograd._saved_tensors_hooks_is_enabled())  # type: ignore[attr-defined]


def _lets_replay(mode: Any) -> bool:
    return bool(getattr(mode, "lets_replay", False))


def _weights_of(module: nn.Module) -> Iterator[tuple[dict[str, Any], str, nn.Parameter]]:
    for name, weight in module._parameters.items():
        if weight is not None:
            yield module._parameters, name, weight


def needs_gradient(each: Any) -> bool:
    return isinstance(each, torch.Tensor) and each.requires_grad


class _Replay(torch.autograd.Function):
    """The node of a replayed block. It holds the token of its forward where a node holds its saved tensors, so that it
    lets go of the token when it frees them."""

    @staticmethod
    def forward(ctx: Any, block: CapturedBlock, token: weakref.ref[Token], *_tensors: torch.Tensor) -> Any:
        ctx.block, ctx.token, ctx.versions = block, token, block.versions()
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(block._nothing)
        results, without_gradient = block.results()
        ctx.mark_non_differentiable(*without_gradient)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        _ = ctx.saved_tensors  # raises torch's own error where the graph has been freed
        receivers = [node for node, _ in ctx.next_functions]
        return (None, None, *ctx.block.backward(ctx.token(), ctx.versions, gradients, receivers))
