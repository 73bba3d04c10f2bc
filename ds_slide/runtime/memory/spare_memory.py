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

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from ds_slide.plan.sharing import MEMORY_RATE, Offer, for_states, share_out
from ds_slide.plan.spare import (
    GPU_SHARES,
    NO_SLOTS,
    Handling,
    Movable,
    Shape,
    Slots,
    given_back,
    inputs_missing,
    spare_bytes,
)
from ds_slide.plan.step_model import Change, Schedule, Schedules, Step
from ds_slide.report.log import log, size
from ds_slide.report.statistics import UPDATE, StepRecorder, StepStatistics
from ds_slide.runtime.activations.activations import Activations, shape_of
from ds_slide.runtime.core.calls import in_backward
from ds_slide.runtime.core.ranks.collectives import Ranks
from ds_slide.runtime.memory.batch_need import BatchNeed
from ds_slide.runtime.memory.peaks import Peaked
from ds_slide.runtime.memory.proof import Proof
from ds_slide.runtime.memory.retries import Retries

LOOKS = (3, 6)
"""Steps after which the use is decided. Step 1 allocates the memory that all later steps use again and compiles
kernels. The step after a decision does the same, and one more step is measured in between."""
WARM_UPS = tuple(step - 2 for step in LOOKS)
FIRST_PAUSE = 20
"""Steps after which the use is decided again when states have gone back, perhaps for an evaluation. The number doubles
each time: where states have to go back again and again, moving them costs more than it saves."""


class GpuMemory(Peaked, Protocol):
    """Torch's figures of a GPU's memory (`ds_slide.runtime.core.device.Device`)."""

    def memory(self) -> tuple[int, int]: ...
    def allocation_retries(self) -> int: ...
    def memory_rate(self) -> float | None: ...
    def release_cached(self) -> None: ...


class States(Protocol):
    """Moves states of units between host memory and GPU."""

    def movable(self) -> Sequence[Movable]:
        """Return the units in host memory that may go to the GPU, the most useful first."""

    def promoted(self) -> Sequence[Movable]:
        """Return the units that have gone to the GPU, in the same order."""

    def slots(self, forwards: int) -> Slots:
        """Return the slots of the window, which serves `forwards` forwards a step."""

    def may_park(self) -> bool:
        """Whether states on the GPU can make room for a forward or a backward under way."""

    def park(self) -> int:
        """Let the states of one more unit wait in host memory. -> bytes that have come free."""

    def may_move(self) -> bool:
        """Whether states may move now: nothing is accumulated, and no graph waits for its backward."""

    def move(self, orders: frozenset[int], slots: int | None = None) -> bool:
        """Make `orders` the promoted units, and give the window at most `slots` slots; None: its present number; never
        fewer than the least. -> whether they could move now. Collective."""


class HasSchedules(Protocol):
    """Knows when updates run (`ds_slide.runtime.updates.updating.Updating`)."""

    def schedules(self) -> Schedules:
        """Return the schedules of updates. Called when a step has ended."""


@dataclass(frozen=True)
class Budget:
    """The GPU memory that may be used. `gpu`: None where the accelerator has no memory of its own; nothing is placed
    there unasked then. `limit`: the value of `ds_slide.gpu_memory`. `placed`: bytes of all engines that count against
    the limit so far."""

    gpu: GpuMemory | None
    limit: int | None
    placed: Callable[[], int]

    @property
    def exists(self) -> bool:
        return self.gpu is not None or self.limit is not None


@dataclass(frozen=True)
class Record:
    """The measurements of a rank. `offer`: the spare memory while nothing is kept, without the states that may move,
    which all ranks know. `kept_s`: seconds of recomputation that its step has left out."""

    offer: Offer
    kept_s: float


class SpareMemory:
    """Shares out spare GPU memory. The thread that computes calls all methods."""

    def __init__(
        self,
        activations: Activations,
        budget: Budget,
        ranks: Ranks,
        recorder: StepRecorder,
        updating: HasSchedules,
        vocabulary: int = 0,
    ) -> None:
        """`vocabulary`: the number of logits of a token."""
        self.activations = activations
        self.states: States | None = None
        """None: states stay where the plan has them."""
        self._budget = budget
        self._ranks = ranks
        self._recorder = recorder
        self._updating = updating
        self._steps = 0
        self._looks = frozenset(LOOKS)
        self._latest_look = 0
        self._pause = FIRST_PAUSE
        self._need = BatchNeed(activations, budget.gpu, vocabulary)
        self._usable = 0
        self._margin = 0.0
        self._most_margin = 0.0
        self._retries = 0
        """Torch's count of allocation retries when the newest step began."""
        self._peak = 0
        """The peak when the last step ended."""
        self._proof = Proof()
        self._forwards = 0
        """Forwards with gradients since the last step."""
        self._shapes: set[Shape] = set()
        """Shapes of the first two batches that differ."""
        self._has_said = False
        self._is_tied = ranks.world_size > 1
        """Whether states cannot always go back when a batch begins."""
        self._reserve = 0.0
        """Bytes left free because they had to be given up once."""
        self._left = 0.0
        """Bytes of the predicted room that the newest forward has not filled."""
        self._parked_in_training = 0
        """Bytes of states that have made room for a forward with gradients, or its backward. Later batches leave these
        bytes free; an evaluation takes them for its own time only."""
        self._has_told_parked = False
        self._had_shortage = False
        """Whether memory was short since the last step."""
        self._trains = False
        """Whether the newest forward has gradients."""
        self._retrying = Retries(self)

    @property
    def is_shared_out(self) -> bool:
        """Whether there is GPU memory to share out."""
        return self._budget.exists

    # ---- a forward ---------------------------------------------------------------------------------------------------

    def begin_forward(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Begin a forward of the whole model with these arguments."""
        if not self._budget.exists or torch.compiler.is_compiling():
            return
        shape = shape_of(args, kwargs)
        self._trains = with_gradient = torch.is_grad_enabled()
        if with_gradient:
            self._notice_given_up()
        room = self._room(shape, with_gradient=with_gradient)
        if room < 0:
            movable = self.activations.movable_bytes(shape) if with_gradient else 0
            missing = -self._room(shape, with_gradient=with_gradient, elsewhere=movable)
            if missing > 0 and self._give_back(missing):
                room = self._room(shape, with_gradient=with_gradient)
        self._need.end_batch()  # while the moved bytes of the batch before are still known
        if with_gradient:
            self._begin_training(shape, room)
        else:
            self._begin_evaluation(shape)

    def _begin_training(self, shape: Shape | None, room: float) -> None:
        """Begin a forward with gradients, which leaves `room` bytes; a negative `room` is the number missing."""
        self._forwards += 1
        if self._forwards == 1 and self._budget.gpu is not None:
            self._retries = self._budget.gpu.allocation_retries()  # evaluations may have had some
        self._notice_others()
        self._is_tied |= self.states is not None and not self._is_tied and not self.states.may_move()
        if shape is not None and len(self._shapes) < 2:
            self._shapes.add(shape)
        free = None if self._need.is_known or self._budget.gpu is None else self._budget.gpu.memory()[0]
        room = room if room >= 0 else -self._inputs_missing(shape)
        self.activations.begin(shape, room, free)
        self._left = max(0.0, room - self.activations.kept_bytes)
        self._say_once()
        self._need.begin_forward(shape, self._allocated(), alone=self._learns)
        self._watch(shape, room)

    def _begin_evaluation(self, shape: Shape | None) -> None:
        """Begin a forward without gradients."""
        self._need.begin_evaluation(shape, self._allocated())
        if self._may_park() and self._is_tight_for_evaluation(shape):
            self._retrying.enter()

    def _watch(self, shape: Shape | None, room: float) -> None:
        """Let operators that find no memory run again, in this forward and its backward, where little is left and no
        steps have shown yet that it is enough."""
        kept = self.activations.kept_bytes
        is_tight = room - kept < GPU_SHARES.roomy * (self._usable or self._budget.limit or 0)
        if is_tight and self._need.is_known and not self._proof.covers(self._allocated() + self._need.at(shape) + kept):
            self.activations.watch()
            self._retrying.enter()
        else:
            self._proof.is_open = False

    def _may_park(self) -> bool:
        return self.states is not None and self.states.may_park()

    def _is_tight_for_evaluation(self, shape: Shape | None) -> bool:
        """Whether a forward without gradients leaves too little, so that operators must be able to run again. A single
        token that is generated takes next to nothing, and waits for the host."""
        free = self._usable - self._allocated() - self._need.at(shape, with_gradient=False)
        of_a_token = shape is not None and shape.length == 1
        return free < (GPU_SHARES.roomy_for_tokens if of_a_token else GPU_SHARES.roomy_for_others) * self._usable

    def make_room(self) -> bool:
        """Give up kept activations, and then the places of states, for an operator that has found no memory. -> whether
        it may find some now."""
        if self.activations.give_up():
            return True
        parked = self.states.park() if self._may_park() and self.states is not None else 0
        if parked:
            self._tell_parked(parked)
        if self._trains or in_backward():
            self._parked_in_training += parked
        return bool(parked)

    def explain_shortage(self) -> str:
        """Return the end of a message that says what is missing where nothing more can be given up."""
        shape = self._need.under_way
        if shape is None:
            return ""
        given_up = f" ds_slide has nothing left to give up on the GPU for a batch of {shape.tokens:,} tokens"
        if not self._trains:
            return f"{given_up} without gradients; use fewer tokens at once, or more GPU memory."
        fitting = self._largest_that_fits(shape)
        about = f", of which about {fitting:,} would fit" if fitting < shape.tokens else ""
        return f"{given_up}{about}; use fewer tokens a micro-batch and more micro-batches, or more GPU memory."

    def _largest_that_fits(self, shape: Shape) -> int:
        """Return the tokens of the largest batch that fits, with the sequence length of `shape`."""
        known = self._need.at(shape)
        share = max(0.0, self._usable - self._need.began_with) / known if known else 1.0
        return int(share * shape.tokens)

    @property
    def _learns(self) -> bool:
        """Whether single batches are measured, in the steps before the first look."""
        return WARM_UPS[0] <= self._steps < LOOKS[0]

    def around_backward(self) -> AbstractContextManager[None]:
        """Return the context for a backward that the engine's caller asks for."""
        return self._retrying.around_backward() if self._proof.is_open else nullcontext()

    def _notice_given_up(self) -> None:
        """Keep less from now on, where memory was short. With several ranks states cannot go back for it, and are
        parked again."""
        given, parked = self.activations.take_given_up(), self._parked_in_training
        self._parked_in_training = 0
        if given or (parked and self._ranks.world_size == 1):
            self._reserve += given + parked + self._left
            self._left = 0.0
            self._proof.begin()
            self._had_shortage = True
        if given:
            log.info(
                f"the GPU of rank {self._ranks.rank} had no memory left: {size(given)} of kept activations were given "
                "up and recomputed, and as much is left free from now on"
            )

    def _tell_parked(self, parked: int) -> None:
        """Say once that states make room."""
        if not self._has_told_parked:
            self._has_told_parked = True
            log.info(
                f"the GPU of rank {self._ranks.rank} had no memory left: optimizer states wait in host memory until "
                f"their update, {size(parked)} of them at first"
            )

    def release_cached(self) -> None:
        if self._budget.gpu is not None:
            self._budget.gpu.release_cached()

    def _say_once(self) -> None:
        checkpointed = self.activations.statistics["checkpointed"]
        if checkpointed and not self._has_said and self._ranks.rank == 0:
            way_out = '("ds_slide": {"activations": "as_written"} leaves them alone)'
            if unasked := self.activations.unasked:
                log.info(
                    f"{unasked} blocks are recomputed in backward, which the script does not ask for, in the first "
                    f"{LOOKS[0]} steps, and later where memory is short; the losses are the same, and a key-value "
                    f"cache that nobody asks for stays empty {way_out}"
                )
            if asked := checkpointed - unasked:
                log.info(
                    f"the activation checkpointing of {asked} blocks, which the script asks for, is taken over, and "
                    f"a block recomputed only where memory is short {way_out}"
                )
        self._has_said = self._has_said or bool(checkpointed)

    def end_forward(self, *, completed: bool = False) -> None:
        """End the forward. `completed`: no exception has ended it."""
        self._retrying.leave()
        self.activations.end()
        self._need.end_forward(completed=completed)
        if not self._trains:
            self.activations.take_given_up()  # it belongs to a graph that waits for its backward meanwhile

    def _notice_others(self) -> None:
        """Measure anew where a step begins with another amount on the GPU (states have moved, an engine has come). Also
        where something else has made the peak since the last step (an evaluation, another engine, a saved checkpoint):
        such a peak is not the need of a batch."""
        if self._budget.gpu is None or self._forwards > 1 or not self._steps:
            return
        changed = self._need.change_of_base(self._allocated())
        others_came = changed is not None and changed > self._margin / 4
        if self._need.peak > self._peak or (others_came and self._margin):
            self._need.watch_anew()

    def _allocated(self) -> int:
        return 0 if self._budget.gpu is None else self._budget.gpu.allocated()

    def _room(self, shape: Shape | None, *, with_gradient: bool, elsewhere: float = 0.0) -> float:
        """Return the bytes that a batch of `shape` leaves free, of the GPU and of the limit, with `elsewhere` bytes of
        its inputs in host memory. A negative result is the number of bytes missing. 0 as long as nothing has been
        measured."""
        if not self._need.is_known:
            return 0.0
        rooms = []
        if self._budget.gpu is not None:
            needed = self._need.at(shape, with_gradient=with_gradient) - elsewhere
            rooms.append(spare_bytes(self._usable - self._allocated(), needed, self._margin))
        if self._budget.limit is not None:
            rooms.append(self._budget.limit - self._budget.placed())
        return min(rooms) - self._reserve

    def _inputs_missing(self, shape: Shape | None) -> float:
        """Return the bytes of inputs that have to leave the GPU for a batch of `shape`."""
        if self._budget.gpu is None:
            return 0.0
        free = self._usable - self._allocated() - self._reserve
        return max(0.0, inputs_missing(free, self._need.at(shape), self._margin))

    def _give_back(self, missing: float) -> bool:
        """Take states from the GPU for a batch that needs their place, and slots of the window where that does not
        suffice. -> whether that was possible."""
        if self.states is None or self._ranks.world_size > 1:
            return False
        promoted, slots = self.states.promoted(), self.states.slots(1)
        gone = given_back(missing, promoted, slots)
        short = missing - sum(each.nbytes for each in promoted if each.order in gone)
        fewer = slots.fitting(-short, 0) or slots.least if short > 0 else slots.count
        if not gone and fewer >= slots.count:
            return False
        moved = self.states.move(frozenset(each.order for each in promoted if each.order not in gone), fewer)
        if moved:
            also = f", and {slots.count - fewer} slots of the window are given up" if fewer < slots.count else ""
            log.info(
                f"a batch needs {size(missing)} of the GPU more than those before it, so the states of {len(gone)} "
                f"units have gone back{also}"
            )
            self._looks = frozenset(step for step in LOOKS if step > self._steps) | {self._steps + self._pause}
            self._pause *= 2
        return moved

    # ---- a step ------------------------------------------------------------------------------------------------------

    def end_step(self) -> None:
        """End a step: nothing is accumulated, and no graph waits for its backward."""
        if not self._budget.exists:
            return
        self._steps += 1
        self._need.end_batch()
        self._notice_given_up()
        lacks_margin = self._notice_retries()
        forwards, self._forwards = self._forwards, 0
        if self._steps in WARM_UPS:
            self._need.watch_anew()
        elif self._steps + 1 in self._looks:
            self.activations.times.begin()
        elif self._steps in self._looks:
            self._need.measure()
            self._look(forwards)
        elif self._steps > WARM_UPS[-1]:
            self._need.measure()
            if lacks_margin:
                self._widen_margin()
        self._peak = self._need.peak

    def _notice_retries(self) -> bool:
        """Notice that torch had to look for memory in the step, by giving back its cached memory, which stops the GPU.
        Notice memory that others have taken, too. -> whether more has to be left free than already is."""
        gpu = self._budget.gpu
        if gpu is None:
            self._proof.end_step(went_well=True)
            return False
        before, self._retries = self._retries, gpu.allocation_retries()
        usable, _ = _usable(gpu)
        is_less = usable < self._usable - self._margin / 4
        if is_less:
            self._reserve = max(0.0, self._reserve - (self._usable - usable))  # the others use the reserve
            self._usable = usable
        found = self._retries == before
        self._proof.end_step(went_well=found and not is_less)
        was_short, self._had_shortage = self._had_shortage, False
        return not (found or was_short)  # the bytes that were short are left free already

    def _widen_margin(self) -> None:
        """Leave more free where torch had to look for memory, except in the step after a decision, where torch makes
        room for the new use."""
        if self._steps > max(LOOKS[-1], self._latest_look) + 1:
            self._margin = min(1.25 * self._margin, self._most_margin)

    def _look(self, forwards: int) -> None:
        """Decide about states, after a step of `forwards` forwards."""
        self.activations.times.take()
        self.activations.keeps_first = self._updating.schedules().coming == "two passes"
        self._latest_look = self._steps
        if self._budget.gpu is not None:
            self._usable, total = _usable(self._budget.gpu)
            self._margin, self._most_margin = (
                max(self._margin, total * GPU_SHARES.margin),
                total * GPU_SHARES.most_margin,
            )
        own = self._record(forwards)
        given = [own] if self.states is None else self._ranks.exchange(own, "sharing out spare GPU memory")
        records = [each for each in given if each is not None]
        if len(records) == len(given):
            self._share_out(min(records, key=lambda each: each.offer.room))

    def _record(self, forwards: int) -> Record | None:
        """Return the measurements of this rank; None where batches have no shape."""
        latest = self._recorder.latest
        shape = self._need.shape
        if latest is None or shape is None:
            return None
        room = self._room(None, with_gradient=True)
        if room < 0:
            elsewhere = self.activations.movable_bytes(shape)
            room = min(0.0, self._room(None, with_gradient=True, elsewhere=elsewhere))
        room, reserve = for_states(room, self._need.nbytes, tied=self._is_tied, varying=len(self._shapes) > 1)
        inputs = 2 * forwards * self.activations.statistics.get("moved_to_ssd_bytes", 0)
        kept_s = self.activations.kept_seconds
        step = _measured(latest, self._updating.schedules().measured, inputs).recomputing(kept_s)
        slots = NO_SLOTS if self.states is None else self.states.slots(forwards)
        rate = (None if self._budget.gpu is None else self._budget.gpu.memory_rate()) or MEMORY_RATE
        keepable = self.activations.keepable(shape)
        return Record(Offer(room, (), keepable, step, slots, rate, reserve), kept_s)

    def _share_out(self, record: Record) -> None:
        offer = record.offer
        room, choice = offer.room, share_out(offer)
        if self.states is not None:
            promoted = self.states.promoted()
            orders = frozenset(each.order for each in promoted)
            with_states = share_out(replace(offer, states=self.states.movable()))
            if room < 0 and promoted:
                self.states.move(orders - given_back(-room, promoted, offer.slots))
            elif with_states.states and self.states.move(orders | with_states.states, with_states.slots):
                choice = with_states
        given_up = offer.slots.count - choice.slots
        beside = f", and {given_up} slots of the window" if given_up else ""
        found, parts = self.activations.statistics, f", of {choice.mixed} more in part" if choice.mixed else ""
        changed = (choice.kept, choice.mixed) != (found[Handling.KEEP.value], found[Handling.MIX.value])
        news = bool(choice.states) or changed
        if self._ranks.rank == 0 and news:
            log.info(
                f"{size(room)} of the GPU are spare{beside}: room for the states of {len(choice.states)} more units "
                f"and the activations of {choice.kept} of {len(offer.activations)} checkpointed blocks{parts}; "
                f"expected: {choice.seconds:.3f} s a step, after {offer.step.after(Change(record.kept_s)):.3f} s"
            )


def _usable(gpu: GpuMemory) -> tuple[int, int]:
    """Return (bytes of the GPU that this process may use or has allocated, bytes of the GPU in all)."""
    free, total = gpu.memory()
    return free + gpu.allocated(), total


def _measured(step: StepStatistics, schedule: Schedule, inputs: int) -> Step:
    """Return a step that was measured. `inputs`: bytes of inputs of blocks that the disk has written and read."""
    busy = {lane: float(totals["busy_s"]) for lane, totals in step.lanes.items()}
    on_ssd = step.ssd.get("read_bytes", 0) + step.ssd.get("written_bytes", 0)
    holding = float(step.lanes.get(UPDATE, {}).get("holding_s", 0.0))
    share = min(1.0, inputs / on_ssd) if on_ssd else 0.0
    return Step(schedule, step.step_s, busy, holding_s=holding, inputs_share=share)
