"""The choice of blocks that keep their saved tensors, call by call, and the cost of a block's tensors and forward."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ds_slide.plan.keeping import Keepable, Kept, kept_within
from ds_slide.plan.mixtures import Mixture, mixtures
from ds_slide.plan.spare import (
    Handling,
    Input,
    Measured,
    Shape,
    movable_inputs,
    moved_within,
    moves_unmeasured,
)
from ds_slide.report.log import log
from ds_slide.runtime.activations.block_state import BlockState, WatchedCall
from ds_slide.runtime.activations.call_times import CallTimes
from ds_slide.runtime.activations.checkpointing import (
    UNASKED,
    Checkpoint,
    TakenOver,
    goes_through,
    mixing_form,
    recomputing_form,
)
from ds_slide.runtime.activations.kept_calls import KeptCalls, WholeCall
from ds_slide.runtime.activations.mixing import MixedCall
from ds_slide.runtime.activations.moved_inputs import MovedInputs, input_of
from ds_slide.runtime.activations.saved_bytes import Saved, counted
from ds_slide.runtime.activations.unchanged_weights import UnchangedWeights
from ds_slide.runtime.core.device import Device
from ds_slide.runtime.core.unit import Unit

BACKWARD_PASSES = 3
"""The time of a block's recomputation and backward, in forwards of the block."""


@dataclass(frozen=True)
class MeasuredBlock:
    """The bytes that a call of a block saves, its mixtures, and the part of its forward that a recomputation runs.
    `squares`: bytes of saved and given tensors with an element for each pair of tokens. `alone`: no other rank takes
    part in the block. Each rank decides alone what it keeps, and a rank that recomputed a collective alone would wait
    for ever, so all ranks recompute blocks with a collective."""

    saved: Measured
    mixtures: tuple[Mixture, ...]
    again: float
    squares: Measured
    alone: bool

    @classmethod
    def of(cls, shape: Shape, saved: Saved, *, mixes: bool) -> MeasuredBlock:
        squares = saved.square + saved.given_square
        found = mixtures(saved.runs, saved.nbytes) if mixes else ()
        return cls(
            Measured(shape, saved.nbytes, saved.square),
            found,
            saved.again,
            Measured(shape, squares, squares),
            not saved.has_collective,
        )


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


class Activations:
    """All methods are called by the thread that computes: the caller's, and autograd's for recomputations."""

    def __init__(
        self,
        blocks: Sequence[Unit],
        device: Device,
        unasked: Collection[int] = (),
        moved: MovedInputs | None = None,
        *,
        mixes: bool = True,
    ) -> None:
        """`unasked`: blocks, by `Unit.order`, that may be recomputed though their script does not ask for it. `moved`:
        None where inputs stay on the GPU. `mixes`: whether a block may keep some results and recompute the rest."""
        self._mixes = mixes
        self._blocks = list(blocks)
        self._kind = {unit.order: _kind_of(unit) for unit in blocks}
        self._kinds = frozenset(self._kind.values())
        self._taken = TakenOver(blocks, unasked, self._run)
        self._modules = {
            unit.order: list(unit.spec.module.modules()) for unit in blocks if unit.spec.module is not None
        }
        """The module of each block, and those in it."""
        self._states = {
            unit.order: BlockState(unit.name, unit.spec.module) for unit in blocks if unit.spec.module is not None
        }
        self._named: set[type] = set()
        """Classes of blocks that change their state, and that the log has named."""
        self._orders: frozenset[int] = frozenset()
        """Blocks that were taken over in the newest forward."""
        self._shape: Shape | None = None
        self._kept = Kept()
        self._moved: frozenset[int] = frozenset()
        """Blocks whose inputs leave the GPU in the newest forward."""
        self._free: float | None = None
        """Free bytes of the GPU, where the need of a batch is not known yet; otherwise None."""
        self.keeps_first = False
        """Whether the first of equal blocks are kept; set between backwards."""
        self._inputs = moved
        self._input_bytes: dict[Hashable, tuple[int, int]] = {}
        """(tokens of the largest batch so far, bytes of a block's input in it), by kind of block."""
        self._bytes: dict[int, list[int]] = {}
        """Bytes kept of each call of a block, since a forward began while no call of it waited for its backward."""
        self._calls: Counter[int] = Counter()
        """Calls of each block in the newest forward."""
        self._most_calls: Counter[int] = Counter()
        """The most calls of each block in one forward so far."""
        self._measured: dict[Hashable, MeasuredBlock] = {}
        """Measurements by kind of block, at the largest shape so far."""
        self._asked: set[Hashable] = set()
        """Kinds that are to be measured by the next recomputation of one of their blocks."""
        self._calls_kept = KeptCalls()
        self._may_give_up = False
        """Whether the tensors that the newest forward keeps can be given up."""
        self._given_up = 0
        """Bytes given up since the last `take_given_up`."""
        self.times = CallTimes(device, self._kind)
        """Times of the blocks' forwards."""
        self._handled = _statistics(0, Kept(), 0)
        """Counts of blocks in the newest forward with gradients."""

    # ---- a forward ---------------------------------------------------------------------------------------------------

    def begin(self, shape: Shape | None, room: float, free: float | None = None) -> None:
        """Begin a forward of the whole model with gradients, which may keep `room` bytes; a negative `room` is the
        number of bytes missing. `free`: free bytes of the GPU, where the need of a batch is not known yet."""
        self._may_give_up = False
        self._taken.begin()
        self._calls_kept.forget_ended()
        if self._inputs is not None:
            self._inputs.begin()
        self._most_calls |= self._calls
        self._calls.clear()
        self._bytes = {unit.order: self._bytes.get(unit.order, []) for unit in self._blocks if unit.awaits_backward}
        checkpointed = self._orders = self._taken.orders
        if not checkpointed:
            self._shape, self._kept, self._moved, self._free = None, Kept(), frozenset(), None
            self._handled = _statistics(0, self._kept, 0)
            return
        self._shape = shape
        if shape is not None:
            of = {kind: self._measured.get(kind) for kind in self._kinds}
            self._asked = {kind for kind, known in of.items() if known is None or known.saved.growth(shape) > 1}
        candidates = self.keepable(shape)
        self._kept = kept_within(room, candidates, first=self.keeps_first)
        self._free = free
        self._moved = self._to_move(-room, shape)
        self._handled = _statistics(len(checkpointed), self._kept, self._kept.nbytes(candidates))

    def watch(self) -> None:
        """Make the tensors that this forward keeps ready to be given up."""
        self._may_give_up = True

    def give_up(self) -> int:
        """Give up a portion of the tensors kept for coming backwards, and keep nothing more in this forward. -> bytes;
        0 where nothing can be given up."""
        given = self._calls_kept.give_up()
        self._given_up += given
        self._kept = Kept()
        return given

    def take_given_up(self) -> int:
        """Return the bytes that were given up since the last call."""
        given, self._given_up = self._given_up, 0
        return given

    def leave_unasked(self) -> None:
        """Run the script's model as it is written in this forward."""
        self._taken.leave_unasked()
        self._count_taken()

    def leave_compiled(self, order: int) -> None:
        """Run a compiled block as it is written, from this forward on: dynamo would trace what decides about it."""
        if order in self._orders:
            self._taken.leave_at_once(order)
            self._count_taken()

    def _count_taken(self) -> None:
        self._orders = self._taken.orders
        self._kept = self._kept.of(self._orders)
        self._handled = _statistics(len(self._orders), self._kept, self._kept.nbytes(self.keepable(self._shape)))

    @property
    def unasked(self) -> int:
        """Blocks that are taken over at present though their script has not asked for it."""
        return self._taken.unasked

    def end(self) -> None:
        """Note that the forward has ended, also where an exception has ended it."""
        self._taken.end()
        self.times.end_forward()
        if self._inputs is not None:
            self._inputs.end()

    @property
    def statistics(self) -> dict[str, int]:
        """Counts and bytes of the newest forward with gradients."""
        moved = 0 if self._inputs is None else len(self._inputs.orders)
        recomputed = self._handled[Handling.RECOMPUTE.value] - moved
        handled = {**self._handled, Handling.RECOMPUTE.value: recomputed, Handling.MOVE.value: moved}
        return {**handled, "moved_bytes": self.moved_bytes, "host_bytes": self.host_bytes, **self._on_ssd}

    @property
    def _on_ssd(self) -> dict[str, int]:
        """The moved bytes that have gone on to SSD, the bytes of their places there, and of the host memory for it."""
        if self._inputs is None or (disk := self._inputs.disk) is None:
            return {}
        return {
            "moved_to_ssd_bytes": self._inputs.disk_bytes,
            "ssd_bytes": disk.nbytes,
            "ssd_host_bytes": disk.host_bytes,
        }

    def _run(self, unit: Unit, written: Checkpoint, function: Callable[..., Any], *inputs: Any) -> Any:
        """Run a block for its caller. `written`: as the script has it."""
        self._calls[unit.order] += 1
        is_mixed = False
        kept, modules = self._bytes.setdefault(unit.order, []), self._modules[unit.order]
        if self._inputs is not None:
            self._inputs.enter(unit.order)
        if not torch.is_grad_enabled():
            result = written(function, *inputs)
        elif unit.order in self._kept.whole and goes_through(written, function, inputs, modules):
            kept.append(nbytes := self._bytes_of(unit.order, self._shape))
            form = mixing_form(written, function, inputs, modules) if self._may_give_up else None
            if form is None:
                result = self._watched(unit, function)(*inputs)
            else:
                result = self._keep(unit, WholeCall(nbytes), form, function, inputs)
        elif (mixture := self._mixture_of(unit.order)) and (mixing := mixing_form(written, function, inputs, modules)):
            kept.append(mixture.nbytes)
            is_mixed = True
            result = self._keep(unit, MixedCall(mixture), mixing, function, inputs)
        else:
            kept.append(0)
            recomputed = recomputing_form(written, function, inputs, modules)
            ends_early = recomputed is not written
            if ends_early and self._states[unit.order].is_new:
                # A block that changes its state computes other gradients with the script's own form.
                recomputed = written
            measured = self._measuring(unit, function, will_end_early=ends_early)
            if written is UNASKED:
                measured = UnchangedWeights(unit, measured)
            watched = self._watched(unit, measured)
            if self._inputs is not None and self._moves(unit, inputs):
                with self._inputs.moving(unit.order, inputs):
                    result = recomputed(watched, *inputs)
            else:
                result = recomputed(watched, *inputs)
            watched.check()
        self.times.leave(unit.order, self._shape, is_mixed=is_mixed)
        return result

    def _keep(
        self,
        unit: Unit,
        call: WholeCall | MixedCall,
        form: Checkpoint,
        function: Callable[..., Any],
        inputs: Sequence[Any],
    ) -> Any:
        """Run a block through the checkpoint `form`, while `call` keeps the tensors that it can give up."""
        self._calls_kept.add(call)
        watched = self._watched(unit, UnchangedWeights(unit, function))
        result = form(watched, *inputs, context_fn=call.contexts)
        if isinstance(call, WholeCall) and not watched.can_run_again:
            call.is_in_use = True  # it keeps all that it saves, as an unwatched block does
        else:
            watched.check()
        return result

    def _watched(self, unit: Unit, function: Callable[..., Any]) -> WatchedCall:
        """Return `function` for one call of the block, wrapped so that it notices a change of the block's state."""
        leave = functools.partial(self._leave, unit)
        is_unasked = self._taken.is_unasked(unit.order)
        return WatchedCall(self._states[unit.order], function, leave, as_written=not is_unasked)

    def _leave(self, unit: Unit) -> None:
        """Leave the block, which changes its state, as it is written from the next forward on."""
        self._taken.leave(unit.order)
        state, kind = self._states[unit.order], type(unit.spec.module)
        state.forget()
        if kind not in self._named:
            self._named.add(kind)
            log.info(f"{unit.name} changes {state.changes} in its forward, so layers like it run as they are written")

    def _measuring(self, unit: Unit, function: Callable[..., Any], *, will_end_early: bool) -> Callable[..., Any]:
        kind, shape = self._kind[unit.order], self._shape
        if shape is None or kind not in self._asked:
            return function
        self._asked.discard(kind)

        def report(saved: Saved) -> None:
            self._measured[kind] = MeasuredBlock.of(shape, saved, mixes=self._mixes)

        return counted(unit, function, shape, report, will_end_early=will_end_early)

    # ---- inputs ------------------------------------------------------------------------------------------------------

    def _moves(self, unit: Unit, inputs: Sequence[Any]) -> bool:
        """Whether the input of this call leaves the GPU. Learns the size of the input."""
        assert self._inputs is not None
        if self._shape is None or (given := input_of(inputs)) is None:
            return False
        kind = self._kind[unit.order]
        if self._shape.tokens > self._input_bytes.get(kind, (0, 0))[0]:
            self._input_bytes[kind] = self._shape.tokens, given.nbytes
        if self._free is None:
            return unit.order in self._moved
        may_move = [each.order for each in movable_inputs([Input(order, 0) for order in sorted(self._orders)])]
        if unit.order not in may_move or not moves_unmeasured(given.nbytes * len(self._orders), self._free):
            return False
        if not self._inputs.orders:
            self._inputs.provide([Input(order, given.nbytes) for order in may_move])
        return True

    def _to_move(self, missing: float, shape: Shape | None) -> frozenset[int]:
        """Return the blocks whose inputs leave the GPU so that `missing` bytes come free there."""
        if self._inputs is None or missing <= 0:
            return frozenset()
        inputs = self._inputs_at(shape)
        moved = moved_within(missing, self._inputs.available(movable_inputs(inputs)), inputs)
        if moved:
            gone = [each for each in inputs if each.order in moved]
            self._inputs.provide(gone, BACKWARD_PASSES * min(self.times.seconds_of(each.order) for each in gone))
        return moved

    def movable_bytes(self, shape: Shape | None) -> int:
        """Return the bytes of the inputs that could go to host memory, in blocks taken over in the newest forward.
        States leave the GPU before any inputs go on to SSD."""
        if self._inputs is None:
            return 0
        wanted = sum(each.nbytes for each in movable_inputs(self._inputs_at(shape)))
        return self._inputs.buffers.available(wanted) if wanted else 0

    def input_bytes(self, shape: Shape | None) -> int:
        """Return the bytes of all known inputs at `shape`."""
        return sum(each.nbytes for each in self._inputs_at(shape))

    def _inputs_at(self, shape: Shape | None) -> list[Input]:
        """Return the inputs of blocks at `shape`, in the order of their calls, without kinds not seen yet."""
        found = []
        for order in sorted(self._orders):
            tokens, nbytes = self._input_bytes.get(self._kind[order], (0, 0))
            if tokens and shape is not None:
                calls = self._expected_calls(order)
                found.append(Input(order, -(-calls * nbytes * shape.tokens // tokens)))
        return found

    def enter_backward(self, order: int) -> None:
        """Bring the next inputs back when the backward of a block begins."""
        if self._inputs is not None:
            self._inputs.ahead(order)

    @property
    def moved_bytes(self) -> int:
        """Bytes of the inputs that the newest forward has sent to host memory, and on to SSD."""
        return 0 if self._inputs is None else self._inputs.bytes

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory where inputs stay, which `ds_slide.host_memory` limits."""
        return 0 if self._inputs is None else self._inputs.buffers.nbytes

    def close(self) -> None:
        """End the lane of the inputs."""
        if self._inputs is not None:
            self._inputs.close()

    # ---- what it costs -----------------------------------------------------------------------------------------------

    def keepable(self, shape: Shape | None) -> list[Keepable]:
        """Return the blocks that might be kept in a batch of `shape`; none before they have been measured."""
        if shape is None:
            return []
        found = []
        for order in self._orders:
            measured = self._measured.get(self._kind[order])
            if measured is not None and measured.alone:
                calls = self._expected_calls(order)
                mixed = tuple(each.times(calls * measured.saved.growth(shape)) for each in measured.mixtures)
                seconds = measured.again * self.times.seconds_of(order)
                mixing_s = self.times.mixing_seconds_of(order)
                found.append(Keepable(order, calls * int(measured.saved.at(shape)), seconds, mixed, mixing_s))
        return found

    def square_bytes(self, shape: Shape) -> float | None:
        """Return the most bytes that a block has in tensors with an element for each pair of tokens of a sequence, in a
        batch of `shape`. None where a block has not been measured: the script's checkpointing may not reach it."""
        found = [self._measured.get(kind) for kind in self._kinds]
        if not found or None in found:
            return None
        return max(each.squares.at(shape) for each in found if each is not None)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the gradients of the block that has the most of them."""
        return max((_gradient_bytes(unit) for unit in self._blocks), default=0)

    def _expected_calls(self, order: int) -> int:
        """Return the expected number of calls of the block in one forward."""
        return max(1, self._most_calls[order])

    def _mixture_of(self, order: int) -> Mixture | None:
        """Return the mixture of one call of the block in this forward; None where it has none."""
        mixture = self._kept.mixed.get(order)
        return None if mixture is None else mixture.times(1 / self._expected_calls(order))

    def _bytes_of(self, order: int, shape: Shape | None) -> int:
        """Return the bytes of the saved tensors of one call."""
        assert shape is not None
        return int(self._measured[self._kind[order]].saved.at(shape))

    @property
    def kept_bytes(self) -> int:
        """Bytes that the newest forward keeps."""
        return self._handled["kept_bytes"]

    @property
    def kept_seconds(self) -> float:
        """Seconds of the recomputations that the kept tensors save."""
        return self._kept.seconds(self.keepable(self._shape))

    def alive(self) -> int:
        """Return the most bytes that can be kept for coming backwards."""
        return sum(_largest(self._bytes.get(unit.order, ()), unit.uses - unit.uses_done) for unit in self._blocks)


def _largest(given: Iterable[int], count: int) -> int:
    """Return the sum of the `count` largest, since it is not known which calls still wait for their backward."""
    return sum(sorted(given, reverse=True)[:count]) if count > 0 else 0


def _statistics(checkpointed: int, kept: Kept, kept_bytes: int) -> dict[str, int]:
    whole, mixed = len(kept.whole), len(kept.mixed)
    handled = {Handling.KEEP: whole, Handling.MIX: mixed, Handling.RECOMPUTE: checkpointed - whole - mixed}
    counts = {handling.value: count for handling, count in handled.items()}
    return {"checkpointed": checkpointed, **counts, "kept_bytes": kept_bytes}


def _gradient_bytes(unit: Unit) -> int:
    return sum(entry.numel * each.dtype.itemsize for each in (unit, *unit.parts) for _, entry in each.trainable)


def _kind_of(unit: Unit) -> Hashable:
    """Blocks of one class with weights of the same shapes save the same."""
    return type(unit.spec.module), tuple(entry.shape for each in (unit, *unit.parts) for entry in each.layout.entries)
