"""The way of states between SSD and their update: what an update needs is brought together, and written back after it.

    store      reads a chunk of optimizer states and the block's weights into pooled host buffers
    update     one step in place, on the update lane
    store      writes both back; h2d copies the new weights from the same buffer

No thread of its own: every hand-over is a completion of the store, a task of the update lane or a call of the compute
thread, ordered by the two `BufferCache`s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ds_slide.report.trace import Requests
from ds_slide.runtime.transfers.buffers import BufferCache
from ds_slide.runtime.transfers.handoff import Failures
from ds_slide.runtime.transfers.pool import BufferPool
from ds_slide.runtime.unit import Unit, Update
from ds_slide.store.ssd.store import SsdStore
from ds_slide.store.state_buffers import StateBuffers

ChunkKey = tuple[int, int]
"""(order of the unit, number of the chunk)"""
UseStateBuffers = Callable[[StateBuffers], None]


class SsdStates:
    """States of all units that have some on SSD. `store` is closed by `close`."""

    def __init__(
        self,
        units: Sequence[Unit],
        store: SsdStore,
        chunk_buffers: BufferPool,
        weight_buffers: BufferPool,
        failures: Failures,
        *,
        updates_under_backward: bool,
        requests: Requests,
    ) -> None:
        self._units = {unit.order: unit for unit in units}
        self._store = store
        self._requests = requests
        order = _update_order(units, under_backward=updates_under_backward)
        self.chunks: BufferCache[ChunkKey] = BufferCache(
            chunk_buffers, self._load_chunk, failures, order, "the optimizer states (unit, chunk)"
        )
        self.weights: BufferCache[int] = BufferCache(
            weight_buffers, self._load_weight, failures, what="the weights of unit"
        )
        self.ahead = len(weight_buffers.addresses)
        """Blocks whose weights may be read ahead."""
        # Backward waits for updates under it (for gradient buffers), never for those under the next forward.
        self._updates_are_urgent = updates_under_backward

    # ---- updates -----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """From here on chunks are read ahead, in the order of the updates, whenever a buffer is free: the disk does
        not stop between two steps."""
        self.chunks.read_ahead()

    def reserve(self, unit: Unit) -> None:
        """All chunks of the unit will be updated as soon as its gradient is in host memory."""
        if _weight_on_ssd(unit):
            self.weights.reserve(unit.order, len(unit.spans))

    def bring(self, unit: Unit, index: int, update: Update, use: UseStateBuffers, *, reserved: bool) -> None:
        """Call `use` with the state buffers of span `index` once they are in host memory, on any thread. `put_back`
        follows. `update`: the one that they are for, which the one before must have left. `reserved`: after
        `reserve`."""
        ssd, state = unit.state.ssd, unit.state
        assert ssd is not None
        span = unit.spans[index]

        def with_weight(weight: torch.Tensor) -> None:
            if not ssd.has_chunks:
                use(state.state_buffers(span, weight))
                return
            key = (unit.order, index)
            self.chunks.take(
                key, lambda chunk: use(ssd.state_buffers(index, chunk, weight[span])), urgent=True, generation=update
            )

        # The weights first, always: two updates that hold one and wait for the other would wait for ever.
        if state.weight is not None:
            with_weight(state.weight)
        else:
            self.weights.take(
                unit.order,
                lambda buffer: with_weight(ssd.weight_view(buffer)),
                urgent=self._updates_are_urgent,
                pressed=lambda: update.is_pressed,
                generation=update,
                reserved=reserved,
            )

    def press(self, unit: Unit) -> None:
        """Somebody waits for the unit's update (`Update.press`): it goes before what the GPU needs soon, because the
        GPU may be the one that waits."""
        if _weight_on_ssd(unit):
            self.weights.press(unit.order)

    def put_back(self, unit: Unit, index: int) -> None:
        """The state buffers of span `index` have been updated: write them. Called by the update lane."""
        ssd, order = unit.state.ssd, unit.order
        assert ssd is not None
        if ssd.has_chunks:
            key = (order, index)
            chunk = self.chunks.begin_write(key)
            self.chunks.release(key)
            written = self._requests.around("states written", order, chunk.nbytes, lambda: self.chunks.end_write(key))
            ssd.store_chunk(index, chunk, written)
        if ssd.has_weight:
            state_buffer = self.weights.begin_write(order)
            self.weights.release(order)
            span, end = unit.spans[index], lambda: self.weights.end_write(order)
            nbytes = (span.stop - span.start) * unit.dtype.itemsize
            ssd.store_weight(span, state_buffer, self._requests.around("weights written", order, nbytes, end))

    # ---- weights -----------------------------------------------------------------------------------------------------

    def expect_weights(self, coming: Sequence[Unit], kept: Sequence[Unit]) -> None:
        """Blocks whose weights are needed next in host memory, for the GPU or an update, in order; and those of them
        that must not make room."""
        self.weights.expect(
            [unit.order for unit in coming if _weight_on_ssd(unit)],
            [unit.order for unit in kept if _weight_on_ssd(unit)],
        )

    @contextmanager
    def weight(self, unit: Unit) -> Iterator[torch.Tensor]:
        """The weights' state buffer in a host buffer, for the h2d lane; it stays there until the block ends."""
        assert unit.state.ssd is not None
        with self.weights.held(unit.order) as buffer:
            yield unit.state.ssd.weight_view(buffer)

    # ---- from outside ------------------------------------------------------------------------------------------------

    def settle(self, unit: Unit) -> None:
        """Wait for the unit's pending update and its writes, and keep nothing of it in buffers: whoever reads or writes
        its state buffers does so in the file."""
        with self.weights.hurry():
            unit.updated.synchronize()
        self.forget(unit)

    def forget(self, unit: Unit) -> None:
        self.chunks.forget(lambda key: key[0] == unit.order)
        self.weights.forget(lambda order: order == unit.order)

    def statistics(self) -> dict[str, Any]:
        """Of the store, since its start."""
        return dict(self._store.statistics())

    def abandon(self) -> None:
        """Before the lanes end: nothing more is brought to them."""
        self.chunks.abandon()
        self.weights.abandon()

    def close(self) -> None:
        """After the lanes have ended. The files are removed."""
        self._store.close()
        self.chunks.close()
        self.weights.close()

    def _load_chunk(self, key: ChunkKey, buffer: torch.Tensor, then: Callable[[], None]) -> None:
        ssd = self._units[key[0]].state.ssd
        assert ssd is not None
        ssd.load_chunk(key[1], buffer, self._requests.around("states read", key[0], buffer.nbytes, then))

    def _load_weight(self, order: int, buffer: torch.Tensor, then: Callable[[], None]) -> None:
        ssd = self._units[order].state.ssd
        assert ssd is not None
        ssd.load_weight(buffer, self._requests.around("weights read", order, buffer.nbytes, then))


def moved_bytes(store: SsdStore) -> int:
    """Bytes that the disk has read and written since the start: requests, not whole transfers."""
    statistics = store.statistics()
    return int(statistics["read_bytes"] + statistics["written_bytes"])


def _weight_on_ssd(unit: Unit) -> bool:
    return unit.state.ssd is not None and unit.state.ssd.has_weight


def _update_order(units: Sequence[Unit], *, under_backward: bool) -> list[ChunkKey]:
    """Chunks in the order in which their updates become ready: by deadline, or as backward finishes the units."""
    ordered = sorted(units, key=lambda unit: unit.order)
    if under_backward:
        blocks = [unit for unit in reversed(ordered) if unit.spec.kind != "outer"]
        # A streamed head is finished before backward has come to the blocks, the other outer modules after them.
        outer_units = [unit for unit in ordered if unit.spec.kind == "outer"]
        first = [unit for unit in outer_units if unit.chunk_rows]
        ordered = [*first, *blocks, *(unit for unit in outer_units if not unit.chunk_rows)]
    return [
        (unit.order, index)
        for unit in ordered
        if unit.state.ssd is not None
        for index in range(len(unit.state.ssd.extents.chunks))
    ]
