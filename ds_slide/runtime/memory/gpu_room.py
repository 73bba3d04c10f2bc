"""The GPU memory that a batch may use, beside what is left free for torch's allocator and for what others take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ds_slide.plan.spare import (
    GPU_SHARES,
    Movable,
    Shape,
    Slots,
    Summable,
    inputs_missing,
    spare_bytes,
)
from ds_slide.runtime.core import running
from ds_slide.runtime.core.device import Device
from ds_slide.runtime.memory.batch_need import BatchNeed


class States(Protocol):
    """Moves states of units between host memory and GPU."""

    def movable(self, forwards: int) -> Sequence[Movable]:
        """Return the units in host memory that may go to the GPU, the most useful first, with `forwards` forwards a
        step."""

    def promoted(self) -> Sequence[Movable]:
        """Return the units that have gone to the GPU. The last ones leave it first."""

    def summable(self, forwards: int) -> Sequence[Summable]:
        """Return the units whose gradients may be added up on the GPU, the first ones first, with `forwards` forwards
        a step."""

    def summed(self) -> Sequence[Movable]:
        """Return the units whose gradients are added up on the GPU. The last ones lose their sums first."""

    def on_their_way(self) -> int:
        """Return the bytes of gradients that leave the GPU by themselves."""

    def slots(self, forwards: int) -> Slots:
        """Return the slots of the window, which serves `forwards` forwards a step."""

    def may_park(self) -> bool:
        """Whether states on the GPU can make room for a forward or a backward under way."""

    def park(self) -> int:
        """Let the states of one more unit wait in host memory. -> bytes that have come free."""

    def give_up_slot(self) -> int:
        """Give up a slot of the window that hides no fetch, in a forward or backward under way. -> bytes that have come
        free."""

    def give_up_sum(self) -> int:
        """Give up the sum of a unit's gradients on the GPU, in a forward or backward under way. -> bytes that have come
        free."""

    def may_move(self) -> bool:
        """Whether states may move now: nothing is accumulated, and no graph waits for its backward."""

    def move(self, orders: frozenset[int], slots: int | None = None, summed: frozenset[int] | None = None) -> bool:
        """Make `orders` the promoted units, give the window at most `slots` slots, but never fewer than the least, and
        add up the gradients of the units `summed` on the GPU. None: as before. -> whether they could move now.
        Collective."""


@dataclass(frozen=True)
class Budget:
    """The GPU memory that may be used. `gpu`: None where the accelerator has no memory of its own; nothing is placed
    there unasked then. `limit`: the value of `ds_slide.gpu_memory`."""

    gpu: Device | None
    limit: int | None

    @property
    def placed(self) -> int:
        """Bytes of all engines that count against the limit so far."""
        return running.on_gpu()

    @property
    def exists(self) -> bool:
        return self.gpu is not None or self.limit is not None


class GpuRoom:
    """All methods are called by the thread that computes. Without a GPU (`Budget.gpu`) there is the limit only."""

    def __init__(self, budget: Budget, need: BatchNeed) -> None:
        self.budget = budget
        self.need = need
        self.states: States | None = None
        """What can go to the GPU and leave it. None: states stay where the plan has them."""
        self.usable = 0
        """Bytes of the GPU that this process may use or has allocated; 0 until they have been measured."""
        self.margin = 0.0
        """Bytes left free because torch cannot use all gaps between tensors."""
        self._most_margin = 0.0
        self.reserve = 0.0
        """Bytes left free because they had to be given up once."""
        self._retries = 0
        """Torch's count of allocation retries when the newest step began."""

    @property
    def _free(self) -> int:
        return self.usable - self.need.peaks.allocated()

    def _free_in_training(self) -> int:
        """Return the bytes beside those that stay. A batch's need counts the gradients that the batch before it has
        left: it is a peak over the bytes at the begin of a step, where there are none. With 7.6 B they are 2.2 GB."""
        free = self._free  # first: a gradient that leaves in between counts as there
        return free + (0 if self.states is None else self.states.on_their_way())

    def of(self, shape: Shape | None, *, with_gradient: bool = True, elsewhere: float = 0.0) -> float:
        """Return the bytes that a batch of `shape` leaves free, of the GPU and of the limit, with `elsewhere` bytes of
        its inputs in host memory. A negative result is the number of bytes missing. 0 as long as nothing has been
        measured."""
        if not self.need.is_known:
            return 0.0
        rooms = []
        if self.budget.gpu is not None:
            needed = self.need.at(shape, with_gradient=with_gradient) - elsewhere
            free = self._free_in_training() if with_gradient else self._free
            rooms.append(spare_bytes(free, needed, self.margin))
        if self.budget.limit is not None:
            rooms.append(self.budget.limit - self.budget.placed)
        # Whole bytes, towards zero: a room of -1e-7 would count as missing in each forward.
        return float(int(min(rooms) - self.reserve))

    def inputs_missing(self, shape: Shape | None) -> float:
        """Return the bytes of inputs that have to leave the GPU for a batch of `shape`."""
        if self.budget.gpu is None:
            return 0.0
        free = self._free_in_training() - self.reserve
        return max(0.0, inputs_missing(free, self.need.at(shape), self.margin))

    def is_tight_for_evaluation(self, shape: Shape | None) -> bool:
        """Whether a forward without gradients leaves too little, so that operators must be able to run again. A single
        token that is generated takes next to nothing, and waits for the host."""
        free = self._free - self.need.at(shape, with_gradient=False)
        of_a_token = shape is not None and shape.length == 1
        return free < (GPU_SHARES.roomy_for_tokens if of_a_token else GPU_SHARES.roomy_for_others) * self.usable

    def fitting_tokens(self, shape: Shape) -> int:
        """Return the tokens of the largest batch that fits, with the sequence length of `shape`."""
        known = self.need.at(shape)
        share = max(0.0, self.usable - self.need.began_with) / known if known else 1.0
        return int(share * shape.tokens)

    # ---- a step ------------------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Begin the first forward of a step: evaluations before it may have had retries."""
        if self.budget.gpu is not None:
            self._retries = self.budget.gpu.allocation_retries()

    def end_step(self) -> tuple[bool, bool]:
        """End a step. -> whether torch has found all memory without looking for it, by giving back its cached memory,
        which stops the GPU; and whether others have left less memory."""
        gpu = self.budget.gpu
        if gpu is None:
            return True, False
        before, self._retries = self._retries, gpu.allocation_retries()
        usable = gpu.memory()[0] + gpu.allocated()
        has_less = usable < self.usable - self.margin / 4
        if has_less:
            self.reserve = max(0.0, self.reserve - (self.usable - usable))  # the others use the reserve
            self.usable = usable
        return self._retries == before, has_less

    def measure(self) -> None:
        """Measure the memory of the GPU, before a decision."""
        if self.budget.gpu is not None:
            free, total = self.budget.gpu.memory()
            self.usable = free + self.budget.gpu.allocated()
            self.margin = max(self.margin, total * GPU_SHARES.margin)
            self._most_margin = total * GPU_SHARES.most_margin

    def widen_margin(self) -> None:
        """Leave more free, because torch had to look for memory."""
        self.margin = min(1.25 * self.margin, self._most_margin)
