"""The use of spare GPU memory: measured in the first steps, decided between two steps, given back when a batch needs
it.

After a warm-up the peak of a step without any change shows the need of a batch beside the permanent tensors
(`BatchNeed`). States of blocks get a part of the rest where they shorten the step more than activations would, and the
part that neither activations nor one more such batch would need. Each forward keeps the activations of the blocks that
its own size leaves room for. The host waits for the GPU when something is decided, after steps 3 and 6, and where
memory turns out to be short.

All ranks decide alike about states, because that sets the collectives that they call. Each rank decides alone about
activations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch

from ds_slide.plan.sharing import MEMORY_RATE, Offer, for_states, share_out
from ds_slide.plan.spare import NO_SLOTS, Handling, Shape, given_back
from ds_slide.plan.step_model import Change, Schedules, Step
from ds_slide.report.log import log, size
from ds_slide.report.statistics import PRODUCTS, UPDATE, StepStatistics
from ds_slide.runtime.activations.activations import Activations, shape_of
from ds_slide.runtime.core.context import Context
from ds_slide.runtime.memory.batch_need import BatchNeed
from ds_slide.runtime.memory.gpu_room import Budget, GpuRoom, States
from ds_slide.runtime.memory.shortage import Shortage
from ds_slide.runtime.updates.updating import Updating

LOOKS = (3, 6)
"""Steps after which the use is decided. Step 1 allocates the memory that all later steps use again and compiles
kernels. The step after a decision does the same, and one more step is measured in between."""
WARM_UPS = tuple(step - 2 for step in LOOKS)
FIRST_PAUSE = 20
"""Steps after which the use is decided again when states have gone back, perhaps for an evaluation. The number doubles
each time: where states have to go back again and again, moving them costs more than it saves."""


@dataclass(frozen=True)
class Record:
    """The measurements of a rank. `offer`: the spare memory while nothing is kept, without the states that may move,
    which all ranks know. `seconds`: of the step that was measured."""

    offer: Offer
    seconds: float


@dataclass
class Looks:
    """`coming`: the steps after which the use is decided. `latest`: the last of `LOOKS`, or a later step after which it
    was. `pause`: steps until the use is decided again when states have gone back."""

    step: int = 0
    coming: frozenset[int] = frozenset(LOOKS)
    latest: int = LOOKS[-1]
    pause: int = FIRST_PAUSE

    def again_later(self) -> None:
        """Decide again after a pause."""
        self.coming = frozenset(step for step in LOOKS if step > self.step) | {self.step + self.pause}
        self.pause *= 2


class SpareMemory:
    """Shares out spare GPU memory. The thread that computes calls all methods."""

    def __init__(
        self, context: Context, activations: Activations, budget: Budget, updating: Updating, vocabulary: int = 0
    ) -> None:
        """`vocabulary`: the number of logits of a token."""
        self._context = context
        self.activations = activations
        self._updating = updating
        self.need = BatchNeed(activations, budget.gpu, vocabulary)
        self.room = GpuRoom(budget, self.need)
        self.shortage = Shortage(activations, self.room, context.ranks)
        self._looks = Looks()
        self._peak = 0
        """The peak when the last step ended."""
        self._forwards = 0
        """Forwards with gradients since the last step."""
        self._shapes: set[Shape] = set()
        """Shapes of the first two batches that differ."""
        self._recorded = 0
        """Bytes that recordings of blocks had when the last step ended."""
        self._has_said = False
        self._is_tied = context.ranks.world_size > 1
        """Whether states cannot always go back when a batch begins."""

    # ---- a forward ---------------------------------------------------------------------------------------------------

    def begin_forward(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Begin a forward of the whole model with these arguments."""
        if not self.room.budget.exists:
            return
        shape, with_gradient = shape_of(args, kwargs), torch.is_grad_enabled()
        if with_gradient:
            self.shortage.notice()
        room = self.room.of(shape, with_gradient=with_gradient)
        if room < 0 and self.activations.captures.give_up():
            room = self.room.of(shape, with_gradient=with_gradient)
        if room < 0:
            movable = self.activations.movable_bytes(shape) if with_gradient else 0
            missing = -self.room.of(shape, with_gradient=with_gradient, elsewhere=movable)
            if missing > 0 and self._give_back(missing):
                room = self.room.of(shape, with_gradient=with_gradient)
        self.need.end_batch()  # while the moved bytes of the batch before are still known
        if with_gradient:
            self._begin_training(shape, room)
        else:
            self.need.begin_evaluation(shape)
            self.shortage.begin_evaluation(shape)

    def _begin_training(self, shape: Shape | None, room: float) -> None:
        """Begin a forward with gradients, which leaves `room` bytes; a negative `room` is the number missing."""
        gpu, states = self.room.budget.gpu, self.room.states
        self._forwards += 1
        if self._forwards == 1:
            self.room.begin_step()
            if gpu is not None and self._looks.step:
                self._notice_others()
        self._is_tied |= states is not None and not self._is_tied and not states.may_move()
        if shape is not None and len(self._shapes) < 2:
            self._shapes.add(shape)
        free = None if self.need.is_known or gpu is None else gpu.memory()[0]
        room = room if room >= 0 else -self.room.inputs_missing(shape)
        self.activations.begin(shape, room, free)
        self._say_once()
        self.need.begin_forward(shape, alone=WARM_UPS[0] <= self._looks.step < LOOKS[0])
        self.shortage.begin_training(shape, room)

    def _notice_others(self) -> None:
        """Measure anew where a step begins with another amount on the GPU (states have moved, an engine has come). Also
        where something else has made the peak since the last step (an evaluation, another engine, a saved checkpoint):
        such a peak is not the need of a batch."""
        margin = self.room.margin
        if self.need.peak > self._peak or (margin and self.need.change_of_base() > margin / 4):
            self.need.watch_anew()

    def around_backward(self) -> AbstractContextManager[None]:
        """Return the context for a backward that the engine's caller asks for."""
        return self.shortage.around_backward()

    def _say_once(self) -> None:
        checkpointed = len(self.activations.costs.orders)
        if checkpointed and not self._has_said and self._context.ranks.rank == 0:
            way_out = '("ds_slide": {"activations": "as_written"} leaves them alone)'
            if unasked := self.activations.unasked:
                log.info(
                    f"{unasked} blocks are recomputed in backward, which the script does not ask for, in the first "
                    f"{LOOKS[0]} steps, and later where memory is short; the losses are the same, and a key-value "
                    f"cache that nobody asks for stays empty {way_out}"
                )
            if asked := checkpointed - unasked:
                together = self._context.ranks.divides_sequences
                where = "always, with all ranks of a sequence" if together else "only where memory is short"
                log.info(
                    f"the activation checkpointing of {asked} blocks, which the script asks for, is taken over, and "
                    f"a block recomputed {where} {way_out}"
                )
        self._has_said = self._has_said or bool(checkpointed)

    def end_forward(self, *, completed: bool = False) -> None:
        """End the forward. `completed`: no exception has ended it."""
        self.shortage.end_forward()
        self.activations.end(completed=completed)
        self.need.end_forward(completed=completed)

    def _give_back(self, missing: float) -> bool:
        """Take states from the GPU for a batch that needs their place, then sums of gradients, and slots of the window
        where that does not suffice. -> whether that was possible."""
        states = self.room.states
        if states is None or self._context.ranks.world_size > 1:
            return False
        slots, stay = states.slots(1), _stay(missing, states)
        fewer = slots.fitting(-stay.short, 0) or slots.least if stay.short > 0 else slots.count
        if not (stay.gone or stay.sums_gone) and fewer >= slots.count:
            return False
        moved = states.move(stay.promoted, fewer, stay.summed)
        if moved:
            self._updating.passes.times.forget()
            also = f", and {slots.count - fewer} slots of the window are given up" if fewer < slots.count else ""
            sums = f", and {stay.sums_gone} units have no sum of gradients there any more" if stay.sums_gone else ""
            log.info(
                f"a batch needs {size(missing)} of the GPU more than those before it, so the states of {stay.gone} "
                f"units have gone back{sums}{also}"
            )
            self._looks.again_later()
        return moved

    # ---- a step ------------------------------------------------------------------------------------------------------

    def end_step(self) -> None:
        """End a step: nothing is accumulated, and no graph waits for its backward."""
        if not self.room.budget.exists:
            return
        looks = self._looks
        looks.step += 1
        self.need.end_batch()
        lacks_margin = self.shortage.end_step()
        forwards, self._forwards = self._forwards, 0
        captures = self.activations.captures
        before, self._recorded = self._recorded, captures.nbytes
        if self._recorded != before:
            self._updating.passes.times.forget()
        if looks.step in WARM_UPS or self._recorded != before:
            # A step that records has the recordings in its peak, and what they are about to replace: 4.8 GB of 7.6 B,
            # where a batch needed 3.7.
            self.need.watch_anew()
        elif looks.step in looks.coming or looks.step > WARM_UPS[-1]:
            self.need.measure()
        if looks.step + 1 in looks.coming:
            self.activations.times.begin()
        elif looks.step in looks.coming:
            looks.latest = max(looks.latest, looks.step)
            self._look(forwards)
        elif lacks_margin and looks.step > looks.latest + 1:  # torch makes room in the step after a decision
            self.room.widen_margin()
        self._peak = self.need.peak
        if forwards:  # recordings begin when the use of memory has been decided
            is_settled = looks.step > LOOKS[-1] and not looks.coming & {looks.step + 1, looks.step + 2}
            latest = self._context.recorder.latest
            seconds = 0.0 if latest is None else latest.step_s
            has_come_out = captures.end_step(is_settled=is_settled, seconds=seconds)
            # Ranks decide together, and recordings of batches of other shapes come in other steps.
            if has_come_out and self._context.ranks.world_size == 1:
                looks.coming |= {looks.step + 2}  # the step before a decision is measured

    def _look(self, forwards: int) -> None:
        """Decide about states, after a step of `forwards` forwards."""
        self.activations.times.take()
        self.activations.keeps_first = self._updating.schedules().coming == "two passes"
        self.room.measure()
        own = self._record(forwards, self._expect_recordings())
        given = [own] if self.room.states is None else self._context.ranks.exchange(own, "sharing out spare GPU memory")
        records = [each for each in given if each is not None]
        if len(records) == len(given):
            self._share_out(min(records, key=lambda each: each.offer.room))

    def _expect_recordings(self) -> float:
        """Decide whether recordings of blocks are to come. -> bytes of the GPU to be left for them. Where states may
        move, recordings are expected on all ranks or on none: a rank that expects some keeps no activations, and would
        leave to the states of all ranks what the others need for theirs. Collective where states may move."""
        reserved, captures = self.activations.expect_recordings(self.need.shape), self.activations.captures
        if self.room.states is not None:
            captures.are_expected = bool(self._context.ranks.least([int(captures.are_expected)])[0])
        return reserved

    def _record(self, forwards: int, reserved: float) -> Record | None:
        """Return the measurements of this rank; None where batches have no shape. `reserved`: bytes to be left for
        recordings."""
        latest = self._context.recorder.latest
        shape = self.need.shape
        if latest is None or shape is None:
            return None
        gpu, states = self.room.budget.gpu, self.room.states
        room = self.room.of(None) - reserved
        if room < 0:
            elsewhere = self.activations.movable_bytes(shape)
            room = min(0.0, self.room.of(None, elsewhere=elsewhere) - reserved)
        room, reserve = for_states(room, self.need.nbytes, tied=self._is_tied, varying=len(self._shapes) > 1)
        inputs = 2 * forwards * self.activations.statistics.get("moved_to_ssd_bytes", 0)
        kept_s = self.activations.kept_seconds
        step = _measured(latest, self._updating.schedules(), inputs, forwards, self._updating.products_s())
        step = step.recomputing(kept_s)
        seconds = step.after(Change(kept_s))
        if (on_gpu := self.activations.seconds_on_gpu) is not None:
            step = step.computing(on_gpu)
        slots = NO_SLOTS if states is None else states.slots(forwards)
        rate = (None if gpu is None else gpu.memory_rate()) or MEMORY_RATE
        keepable = self.activations.keepable(shape)
        return Record(Offer(room, (), keepable, step, slots, rate, reserve), seconds)

    def _share_out(self, record: Record) -> None:
        offer, states = record.offer, self.room.states
        room, choice = offer.room, share_out(offer.without_moves())
        if states is not None:
            there, stay = _stay(0.0, states), _stay(-room, states)
            forwards = offer.step.micro_batches
            movable, sums = states.movable(forwards), states.summable(forwards)
            with_states = share_out(replace(offer, states=movable, sums=sums))
            if room < 0 and (there.promoted or there.summed):
                states.move(stay.promoted, None, stay.summed)
            elif with_states.moves(offer) and states.move(
                there.promoted | with_states.states, with_states.slots, there.summed | with_states.sums
            ):
                choice = with_states
            self._updating.passes.times.forget()
        grown = choice.slots - offer.slots.count
        beside = f", and {-grown} slots of the window" if grown < 0 else ""
        more = f" {grown} more slots of the window," if grown > 0 else ""
        more += f" the sums of the gradients of {len(choice.sums)} units," if choice.sums else ""
        found, parts = self.activations.statistics, f", of {choice.mixed} more in part" if choice.mixed else ""
        changed = (choice.kept, choice.mixed) != (found[Handling.KEEP.value], found[Handling.MIX.value])
        news = choice.moves(offer) or changed
        if self._context.ranks.rank == 0 and news:
            spare = f"{size(room)} of the GPU are spare" if room >= 0 else f"{size(-room)} of the GPU are missing"
            log.info(
                f"{spare}{beside}: room for{more} the states of {len(choice.states)} more units "
                f"and the activations of {choice.kept} of {len(offer.activations)} checkpointed blocks{parts}; "
                f"expected: {choice.seconds:.3f} s a step, after {record.seconds:.3f} s"
            )


@dataclass(frozen=True)
class _Stay:
    """What stays on the GPU: the states and the sums of these units. `short`: bytes that are missing all the same."""

    promoted: frozenset[int]
    summed: frozenset[int]
    gone: int
    sums_gone: int
    short: float


def _stay(missing: float, states: States) -> _Stay:
    """Return what stays when `missing` bytes have to come free: states go first, then sums of gradients."""
    promoted, sums = states.promoted(), states.summed()
    gone = given_back(missing, promoted, states.slots(1))
    short = missing - sum(each.nbytes for each in promoted if each.order in gone)
    dropped = given_back(short, sums)
    short -= sum(each.nbytes for each in sums if each.order in dropped)
    left = [frozenset(each.order for each in some) for some in (promoted, sums)]
    return _Stay(left[0] - gone, left[1] - dropped, len(gone), len(dropped), short)


def _measured(step: StepStatistics, schedules: Schedules, inputs: int, forwards: int, products_s: float | None) -> Step:
    """Return a step of `forwards` forwards that was measured. `inputs`: bytes of inputs of blocks that the disk has
    written and read. `products_s`: seconds that the GPU takes for the products of updates alone. Beside the model each
    of them waits for processors: 0.15 s of products took 0.58 s of the lane."""
    busy = {lane: float(totals["busy_s"]) for lane, totals in step.lanes.items()}
    if products_s is not None and PRODUCTS in busy:
        busy[PRODUCTS] = min(busy[PRODUCTS], products_s)
    on_ssd = step.ssd.get("read_bytes", 0) + step.ssd.get("written_bytes", 0)
    holding = float(step.lanes.get(UPDATE, {}).get("holding_s", 0.0))
    share = min(1.0, inputs / on_ssd) if on_ssd else 0.0
    return Step(
        schedules.measured,
        step.step_s,
        busy,
        holding_s=holding,
        inputs_share=share,
        down_s=busy.get("d2h", 0.0),
        micro_batches=max(1, forwards),
        two=schedules.two,
        due=schedules.due,
    )
