"""The recordings of all blocks for batches of one shape."""

from __future__ import annotations

from typing import TypeVar

from ds_slide.runtime.activations.block_state import BlockState
from ds_slide.runtime.activations.checkpointing import BlockCall
from ds_slide.runtime.captured.block import CapturedBlock
from ds_slide.runtime.captured.graphs import Memory
from ds_slide.runtime.captured.inputs import SharedPlaces
from ds_slide.runtime.captured.recomputed import RecomputedBlock

Block = TypeVar("Block", bound=CapturedBlock)
ALL_SHAPES = -1
"""The number that all shapes have in the memory of recomputed blocks."""


class Recordings:
    """All methods are called by the thread that computes."""

    def __init__(self, memory: Memory, number: int) -> None:
        """`number`: of the shape in `memory`."""
        self._memory = memory
        self._number = number
        self.blocks: dict[int, CapturedBlock] = {}
        self.shared = SharedPlaces()
        self.is_open = True
        """Whether blocks are still recorded: in one forward, since later ones may use the memory of its graph."""

    @property
    def is_new(self) -> bool:
        """Whether they have begun with the forward under way, and no block has been called."""
        return self.is_open and not self.blocks

    @property
    def recorded(self) -> frozenset[int]:
        """The blocks that have a recording."""
        return frozenset(order for order, block in self.blocks.items() if block.recording and not block.has_ended)

    @property
    def lacks_memory(self) -> bool:
        return any(block.lacks_memory for block in self.blocks.values())

    @property
    def whys(self) -> str:
        """Why blocks are not recorded."""
        return "; ".join(sorted({block.why for block in self.blocks.values() if block.why}))

    def block_of(self, order: int) -> CapturedBlock | None:
        """Return the block, if it has a recording, or may get one in this forward."""
        block = self.blocks.get(order)
        if block is None or block.has_ended or (block.recording is None and not self.is_open):
            return None
        return block

    def add(self, call: BlockCall, state: BlockState) -> CapturedBlock:
        """Return a new block, whose call will be recorded."""
        return self._added(CapturedBlock, call, state, (self._number, len(self.blocks)))

    def recomputed(self, call: BlockCall, state: BlockState) -> RecomputedBlock:
        """Return the block of a call that is recomputed."""
        block = self.blocks.get(call.unit.order)
        if not isinstance(block, RecomputedBlock):
            block = self._added(RecomputedBlock, call, state, (ALL_SHAPES, 0))  # their inputs lie in one place, too
        return block

    def _added(self, kind: type[Block], call: BlockCall, state: BlockState, place: tuple[int, int]) -> Block:
        block = kind(call.modules, call.unit.name, state, self._memory, self.shared, place)
        self.blocks[call.unit.order] = block
        return block

    def release(self) -> None:
        """Leave the memory of recorded graphs to other recordings. No graph waits for its backward."""
        self.is_open = False
        if left := [block for block in self.blocks.values() if block.may_release]:  # on CUDA: once
            with self._memory.counted():
                for block in left:
                    block.release()

    def end(self) -> None:
        """Free the recordings. No graph waits for its backward."""
        self.is_open = False
        self._memory.device.synchronize()  # replays that are under way; CUDA does not say that it waits for them
        with self._memory.counted():
            for block in self.blocks.values():
                block.end()
