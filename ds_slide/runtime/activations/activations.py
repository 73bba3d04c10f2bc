"""Runs each block as decided: it keeps its saved tensors, keeps some of them, or is recomputed; its input may leave the
GPU. The decision is made when a forward begins."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ds_slide.plan.keeping import Keepable, Kept, kept_within
from ds_slide.plan.spare import Handling, Input, Shape, inputs_to_move, movable_inputs, moves_unmeasured
from ds_slide.report.log import log
from ds_slide.runtime.activations.block_state import BlockState, WatchedCall
from ds_slide.runtime.activations.checkpointing import UNASKED, BlockCall, TakenOver
from ds_slide.runtime.activations.costs import BlockCosts
from ds_slide.runtime.activations.kept_calls import KeptCall, KeptCalls, MixedCall, WholeCall
from ds_slide.runtime.activations.moved_inputs import MovedInputs, input_of
from ds_slide.runtime.captured.captures import Captures, Wanted
from ds_slide.runtime.captured.checks import AllRandom
from ds_slide.runtime.core.context import Context
from ds_slide.runtime.core.unit import Unit
from ds_slide.runtime.ssd.space import SpaceOnSsd


def shape_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Shape | None:
    """Return the shape of the batch in a call of the model's forward; None where it has no tensor of two dimensions.

    Where a token is fed to a long cache, only the input itself has that shape. In calls of other models token numbers
    tell it best ([batch, sequence]), and otherwise the largest tensor does ([batch, sequence, hidden])."""
    for name in ("input_ids", "inputs_embeds"):
        if isinstance(given := kwargs.get(name), torch.Tensor) and given.dim() >= 2:
            return _shape_of(given)
    leaves = pytree.tree_leaves((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim() >= 2]
    whole = [tensor for tensor in tensors if not tensor.is_floating_point() and tensor.dim() == 2]
    shapes = [shape for shape in map(_shape_of, whole or tensors) if shape is not None]
    return max(shapes, key=lambda shape: shape.tokens, default=None)


def _shape_of(tensor: torch.Tensor) -> Shape | None:
    batch, length = tensor.shape[:2]
    return Shape(batch * length, length) if batch * length else None


@dataclass
class _Forward:
    """The newest forward with gradients. `moved`: blocks whose inputs leave the GPU. `free`: free bytes of the GPU, or
    None if the need of a batch is known. `may_give_up`: whether the tensors that it keeps can be given up. `handled`:
    counts of blocks, and the bytes that it keeps. `inside`: bytes among them that lie in the memory of recordings.
    `recorded`: blocks whose first call is replayed."""

    shape: Shape | None = None
    kept: Kept = field(default_factory=Kept)
    moved: frozenset[int] = frozenset()
    free: float | None = None
    may_give_up: bool = False
    recorded: frozenset[int] = frozenset()
    inside: int = 0
    handled: dict[str, int] = field(default_factory=lambda: _statistics(0, Kept(), 0))


class Activations:
    """All methods are called by the thread that computes: the caller's, and autograd's for recomputations."""

    def __init__(
        self, context: Context, blocks: Sequence[Unit], unasked: Collection[int] = (), space: SpaceOnSsd | None = None
    ) -> None:
        """`unasked`: blocks, by `Unit.order`, that may be recomputed though their script does not ask for it. `space`:
        for inputs of blocks; None where none may go on to SSD."""
        self._blocks = list(blocks)
        self._device = context.device.torch
        self.costs = BlockCosts(self._blocks, context.device, mixes=context.settings.slide.activations == "auto")
        self.times = self.costs.times
        self._taken = TakenOver(blocks, unasked, self)
        self._states = {
            unit.order: BlockState(unit.name, unit.spec.module, _moved_with(unit))
            for unit in blocks
            if unit.spec.module is not None
        }
        self.captures = Captures(
            self._states,
            context.device,
            context.settings.slide.captured_blocks,
            several_ranks=context.ranks.world_size > 1,
            divides_sequences=context.ranks.divides_sequences,
        )
        self._recordable: dict[int, bool] = {}
        """Whether a block can probably be recorded, by order, as its first call in a timed step shows."""
        self._named: set[type] = set()
        """Classes of blocks that change their state, and that the log has named."""
        self._forward = _Forward()
        self.keeps_first = False
        """Whether the first of equal blocks are kept; set between backwards."""
        self.inputs = MovedInputs(context, space)
        self.kept_calls = KeptCalls()
        self._bytes: dict[int, list[int]] = {}
        """Bytes kept of each call of a block. The list begins anew with a forward that finds no call waiting for its
        backward."""

    # ---- a forward ---------------------------------------------------------------------------------------------------

    def begin(self, shape: Shape | None, room: float, free: float | None = None) -> None:
        """Begin a forward of the whole model with gradients, which may keep `room` bytes; a negative `room` is the
        number of bytes missing. `free`: free bytes of the GPU, where the need of a batch is not known yet."""
        self._taken.begin()
        self.captures.begin(shape)
        self.kept_calls.forget_ended()
        self.inputs.begin()
        self._bytes = {unit.order: self._bytes.get(unit.order, []) for unit in self._blocks if unit.awaits_backward}
        self.costs.begin(self._taken.orders, shape)
        candidates = self.costs.keepable(shape)
        for_recordings, self._forward = self._wanted(candidates), _Forward()
        if not self.costs.orders:
            return
        room, shared = self.captures.room_of(room, for_recordings)
        recorded = self.captures.ready
        # The memory of recorded blocks is not in `room`. One call of each is replayed.
        wanted = [self._beside(each, shape) if each.order in recorded else each for each in candidates]
        kept = kept_within(room, wanted, first=self.keeps_first)
        nbytes, beside = kept.nbytes(candidates), kept.nbytes(wanted)
        self._forward = _Forward(
            shape, kept, self._to_move(-room, shape), free, recorded=recorded,
            inside=nbytes - beside + min(shared, beside), handled=_statistics(len(self.costs.orders), kept, nbytes),
        )  # fmt: skip

    def _wanted(self, candidates: Sequence[Keepable]) -> Wanted:
        """Return what recordings of these blocks would need."""
        sizes = [each.nbytes for each in candidates]
        streams = 2 * sum(unit.is_streamed for unit in self._blocks) > len(self._blocks)
        keeps = bool(self._forward.handled[Handling.KEEP.value] or self._forward.handled[Handling.MIX.value])
        return Wanted(sum(sizes), max(sizes, default=0), self.costs.gradient_bytes, streams, keeps)

    def keepable(self, shape: Shape | None) -> list[Keepable]:
        """Return the blocks whose activations may be kept: none where recordings recompute them."""
        return [] if self.captures.recompute_all else self.costs.keepable(shape)

    def expect_recordings(self, shape: Shape | None) -> float:
        """Decide whether recordings of blocks are to come. -> bytes of the GPU to be left for them."""
        wanted = self._wanted(self.costs.keepable(shape))
        may_be_recorded = 2 * sum(self._recordable.values()) > len(self._blocks)
        self._recordable.clear()
        return self.captures.expect(wanted, waits_for_host=self.times.wait_for_host and may_be_recorded)

    @property
    def seconds_on_gpu(self) -> float | None:
        """Seconds that the GPU would compute in the timed step if it did not wait for the host, where recordings are to
        come, which see to that. None: it computes as measured."""
        return self.times.on_gpu_s if self.captures.are_expected else None

    def _beside(self, block: Keepable, shape: Shape | None) -> Keepable:
        """Return what a recorded block takes beside its recording."""
        assert shape is not None
        return replace(block, nbytes=block.nbytes - self.costs.call_bytes(block.order, shape), mixtures=())

    def allow_giving_up(self) -> None:
        """Make the tensors that this forward keeps ready to be given up."""
        self._forward.may_give_up = True
        self.captures.keep_apart()

    def give_up(self) -> int:
        """Give up a portion of the tensors kept for coming backwards, and keep nothing more in this forward. -> bytes;
        0 where nothing can be given up."""
        self._forward.kept = Kept()
        return self.kept_calls.give_up() or self.captures.give_up()

    def leave_unasked(self) -> None:
        """Run the script's model as it is written in this forward."""
        self._taken.leave_unasked()
        self._count_taken()

    def leave_compiled(self, order: int) -> None:
        """Run a compiled block as it is written, from this forward on: dynamo would trace what decides about it."""
        if order in self.costs.orders:
            self._taken.leave_at_once(order)
            self._count_taken()

    def _count_taken(self) -> None:
        orders = self.costs.orders = self._taken.orders
        kept = self._forward.kept = self._forward.kept.of(orders)
        candidates = self.costs.keepable(self._forward.shape)
        self._forward.handled = _statistics(len(orders), kept, kept.nbytes(candidates))

    @property
    def unasked(self) -> int:
        """Blocks that are taken over at present though their script has not asked for it."""
        return len(self._taken.unasked)

    def end(self, *, completed: bool) -> None:
        """Note that the forward has ended. `completed`: no exception has ended it."""
        self._taken.end()
        self.captures.end_forward(completed=completed)
        self.times.end_forward()
        self.inputs.end()

    @property
    def statistics(self) -> dict[str, int]:
        """Counts and bytes of the newest forward with gradients."""
        moved = len(self.inputs.orders)
        recomputed = self._forward.handled[Handling.RECOMPUTE.value] - moved
        handled = {**self._forward.handled, Handling.RECOMPUTE.value: recomputed, Handling.MOVE.value: moved}
        recorded = {
            "replayed": len(self.captures.recorded),
            "recorded_shapes": len(self.captures.shapes.recorded),
            "recorded_bytes": self.captures.nbytes,
        }
        return {**handled, **recorded, **self.inputs.statistics}

    def run(self, call: BlockCall) -> Any:
        """Run a block for its layer."""
        order = call.unit.order
        self.costs.calls[order] += 1
        if self.times.is_timing and order not in self._recordable:
            return self._look_at(call)
        return self._run(call)

    def _look_at(self, call: BlockCall) -> Any:
        """Run a block, and note whether it can probably be recorded: not if it draws random numbers."""
        self._recordable[call.unit.order] = may_record = self.captures.may_record(call)
        random = AllRandom(self._device) if may_record else None
        result = self._run(call)
        if random is not None and random.has_been_drawn_from():
            self._recordable[call.unit.order] = False
        return result

    def _run(self, call: BlockCall) -> Any:
        order, forward = call.unit.order, self._forward
        kept, is_mixed = self._bytes.setdefault(order, []), False
        self.inputs.enter(order)
        if not torch.is_grad_enabled():
            result = call.written(call.function, *call.inputs)
        elif order in forward.kept.whole and call.goes_through:
            assert forward.shape is not None
            nbytes = self.costs.call_bytes(order, forward.shape)
            kept.append(nbytes)
            if forward.may_give_up and call.mixing_form is not None:
                result = self._keep(call, WholeCall(nbytes))
            elif (replay := self.captures.block_of(call)) is not None:
                result = replay(call)
                if order in forward.recorded and self.captures.has_replayed(order):
                    kept[-1] = 0
            else:
                watched = WatchedCall(self._states[order], call, recomputes=False)
                result = watched(*call.inputs)
                self._notice_change(call, watched)
        elif (mixture := forward.kept.mixed.get(order)) is not None and call.mixing_form is not None:
            one = mixture.times(1 / self.costs.expected_calls(order))
            kept.append(one.nbytes)
            is_mixed = True
            result = self._keep(call, MixedCall(one))
        else:
            kept.append(0)
            moves = self._moves(call)
            # A recorded block is recomputed up to its end; another rank's checkpoint may end before a collective.
            again = None if moves or not self.costs.is_alone(order) else self.captures.recomputed(call)
            result = self._recompute(call) if again is None else again.run(call)
            if again is not None and again.watched is not None:
                self._notice_change(call, again.watched)
                again.watched.check()
        self.times.leave(order, forward.shape, is_mixed=is_mixed)
        return result

    def _keep(self, call: BlockCall, kept: KeptCall) -> Any:
        """Run a block through a checkpoint, while `kept` keeps the tensors that it can give up."""
        assert call.mixing_form is not None
        self.kept_calls.add(kept)
        watched = WatchedCall(self._states[call.unit.order], call, guards_weights=True)
        result = call.mixing_form(watched, *call.inputs, context_fn=kept.contexts)
        self._notice_change(call, watched)
        if isinstance(kept, WholeCall) and not watched.can_run_again:
            kept.is_in_use = True  # it cannot be recomputed, so its tensors cannot be given up
        else:
            watched.check()
        return result

    def _recompute(self, call: BlockCall) -> Any:
        """Run a block through a checkpoint that keeps its input only, on the GPU or elsewhere."""
        form, state = call.recomputing_form, self._states[call.unit.order]
        if call.ends_early and state.is_new:
            # A block that changes its state computes other gradients with the script's own form.
            form = call.written
        counted = self.costs.counted(call, self._forward.shape)
        watched = WatchedCall(state, call, counted, guards_weights=call.written is UNASKED)
        if self._moves(call):
            with self.inputs.moving(call.unit.order, call.inputs):
                result = form(watched, *call.inputs)
        else:
            result = form(watched, *call.inputs)
        self._notice_change(call, watched)
        watched.check()
        return result

    def _notice_change(self, call: BlockCall, watched: WatchedCall) -> None:
        """Leave a block that has changed its state as it is written from the next forward on."""
        if not watched.has_changed:
            return
        self._taken.leave(call.unit.order)
        state, kind = self._states[call.unit.order], type(call.unit.spec.module)
        state.forget()
        if kind not in self._named:
            self._named.add(kind)
            log.info(f"{state.name} changes {state.changes} in its forward, so layers like it run as they are written")

    # ---- inputs ------------------------------------------------------------------------------------------------------

    def _moves(self, call: BlockCall) -> bool:
        """Whether the input of this call leaves the GPU. Learns the size of the input."""
        order, forward = call.unit.order, self._forward
        if forward.shape is None or (given := input_of(call.inputs)) is None:
            return False
        self.costs.note_input(order, forward.shape, given.nbytes)
        if forward.free is None:
            return order in forward.moved
        orders = sorted(self.costs.orders)
        may_move = movable_inputs([Input(each, given.nbytes) for each in orders])
        if all(each.order != order for each in may_move):
            return False
        if not moves_unmeasured(given.nbytes * len(orders), forward.free):
            return False
        if not self.inputs.orders:
            self.inputs.provide(may_move)
        return True

    def _to_move(self, missing: float, shape: Shape | None) -> frozenset[int]:
        """Return the blocks whose inputs leave the GPU so that `missing` bytes come free there."""
        if missing <= 0:
            return frozenset()
        inputs = self.costs.inputs(shape)
        moved = inputs_to_move(missing, inputs, self.inputs)
        if moved:
            # A recomputation takes the time of a forward, and a backward twice that time.
            backward_s = 3 * min(map(self.times.seconds_of, moved))
            self.inputs.provide([each for each in inputs if each.order in moved], backward_s)
        return moved

    def movable_bytes(self, shape: Shape | None) -> int:
        """Return the bytes of the inputs that could go to host memory, in blocks taken over in the newest forward.
        States leave the GPU before any inputs go on to SSD."""
        wanted = sum(each.nbytes for each in movable_inputs(self.costs.inputs(shape)))
        return self.inputs.on_host(wanted) if wanted else 0

    def enter_backward(self, order: int) -> None:
        """Bring the next inputs back when the backward of a block begins."""
        self.inputs.ahead(order)

    def close(self) -> None:
        """End the lane of the inputs, and free the recordings."""
        self.captures.close()
        self.inputs.close()

    # ---- what it keeps -----------------------------------------------------------------------------------------------

    @property
    def kept_bytes(self) -> int:
        """Bytes that the newest forward keeps beside recordings, with the bytes that were given up."""
        return max(0, self._forward.handled["kept_bytes"] - self._forward.inside)  # some blocks may have left since

    @property
    def kept_seconds(self) -> float:
        """Seconds of the recomputations that the kept tensors save."""
        return self._forward.kept.seconds(self.costs.keepable(self._forward.shape))

    def alive(self) -> int:
        """Return an upper bound of the bytes that are kept for coming backwards, and the bytes of recordings."""
        return self.captures.nbytes + sum(
            _largest(self._bytes.get(unit.order, ()), unit.uses.begun - unit.uses.ended) for unit in self._blocks
        )


def _moved_with(unit: Unit) -> Iterator[torch.Tensor]:
    """Yield the tensors beside packed weights that move with a block and its parts."""
    for each in (unit, *unit.parts):
        yield from (carried.tensor for carried in each.carried)


def _largest(given: Iterable[int], count: int) -> int:
    """Return the sum of the `count` largest, since it is not known which calls still wait for their backward."""
    return sum(sorted(given, reverse=True)[:count]) if count > 0 else 0


def _statistics(checkpointed: int, kept: Kept, kept_bytes: int) -> dict[str, int]:
    whole, mixed = len(kept.whole), len(kept.mixed)
    handled = {Handling.KEEP: whole, Handling.MIX: mixed, Handling.RECOMPUTE: checkpointed - whole - mixed}
    counts = {handling.value: count for handling, count in handled.items()}
    return {"checkpointed": checkpointed, **counts, "kept_bytes": kept_bytes}
