"""Inputs of recomputed blocks that go on from host memory to SSD, and come back to the host ahead of their backward.

Who may touch what, and when:

    host buffers   all of these inputs pass through a pool of their own. On the way to SSD a buffer is the lane's
                   (`moved_inputs`) until the copy from the GPU has run, then the disk's until the write is complete.
                   On the way back a buffer is the disk's until the read is complete and its sums are compared, then the
                   lane's until the lane has issued the copy to the GPU. Otherwise it is free. The lane may use a free
                   buffer at once, since its stream runs all copies in one order. The disk waits for a fence, a point of
                   that stream
    places         in the store: an input's, from its forward until its graph is gone and no write or read of it is
                   under way. It is read when its write is complete, any number of times

The hand-over thread works in the order of its jobs: it waits for the end of a copy and submits the write, or for the
fence and the write and submits the read. The lane and the hand-over thread wait for each other, but each only for jobs
that were handed over before. The disk waits for neither. The compute thread waits for a free buffer only when the lane
and the disk hold all of them: it gives up the inputs that are read ahead, which wait for itself, before it waits.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ds_slide.errors import SlideError
from ds_slide.plan.spare import LEAST_AHEAD, buffers_for, reads_ahead
from ds_slide.report.log import log, size
from ds_slide.report.statistics import LaneMeter
from ds_slide.runtime.activations.input_buffers import BETWEEN, InputBuffers
from ds_slide.runtime.core.context import Context
from ds_slide.runtime.core.futures import Future
from ds_slide.runtime.core.lanes import Delay, StreamWorker
from ds_slide.runtime.core.pool import BufferLease
from ds_slide.runtime.ssd.space import SpaceOnSsd
from ds_slide.store.ssd.extents import whole_pages
from ds_slide.store.ssd.files import TransferPart


@dataclass(eq=False)
class InputPlace:
    """The place in the store for the input of a call of block `order`: pieces, which begin at `offsets`."""

    order: int
    nbytes: int
    offsets: Sequence[int]
    written: Future


@dataclass(eq=False)
class Arriving:
    """An input that is being read, or has been. `here`: kept when it is in the buffers of `leases`."""

    place: InputPlace
    leases: Sequence[BufferLease]
    here: Future

    def wait(self) -> Sequence[BufferLease]:
        self.here.wait()
        return self.leases

    def release(self) -> None:
        for lease in self.leases:
            lease.release()


class InputDisk:
    """All methods are called by the thread that computes."""

    def __init__(self, context: Context, space: SpaceOnSsd) -> None:
        self._context = context
        self._failures = context.failures
        self._requests = context.recorder.requests
        # Like all buffers in front of the disk, they are not part of the memory that `ds_slide.host_memory` limits.
        self._buffers = InputBuffers(context, None, BETWEEN)
        self._space = space
        self._is_full = False
        """Whether the disks have refused more."""
        self._made: StreamWorker | None = None
        """The hand-over thread, from the first input that goes to SSD on."""
        self._free: deque[int] = deque()
        """Offsets of places' pieces. They come back on whichever thread drops the last reference to a place."""
        self._ahead = LEAST_AHEAD
        self._reading: dict[InputPlace, Arriving] = {}
        """Inputs that are read ahead, in the order of their reads."""

    # ---- room --------------------------------------------------------------------------------------------------------

    def available(self, wanted: int, input_bytes: int) -> int:
        """Return the number of the `wanted` bytes that can be had, in inputs of at most `input_bytes` each."""
        if not self._buffers.may_hold(input_bytes, buffers_for(LEAST_AHEAD)):
            return 0
        free = len(self._free) * self._buffers.piece
        return wanted if free >= wanted else min(wanted, free + self._room())

    def _room(self) -> int:
        return 0 if self._is_full else self._space.room()

    def provide_buffers(self, input_bytes: int, backward_s: float) -> bool:
        """Have enough host buffers for inputs of at most `input_bytes` to hide reads behind the backward of a block, of
        `backward_s` seconds (0: not known), or all that host memory has room for. -> whether inputs can pass."""
        self._ahead = reads_ahead(self._space.seconds(input_bytes), backward_s)
        while self._ahead > LEAST_AHEAD and not self._buffers.may_hold(input_bytes, buffers_for(self._ahead)):
            self._ahead -= 1
        return self._buffers.hold(input_bytes, buffers_for(self._ahead))

    def provide_places(self, input_bytes: int, count: int) -> None:
        """Have places for `count` inputs of at most `input_bytes`, as far as the disks have room for them."""
        piece = self._buffers.piece
        missing = count * self._buffers.pieces_of(input_bytes) - len(self._free)
        if missing <= 0 or not (more := min(missing, self._room() // piece)):
            return
        try:
            start = self._space.extend(more * piece)
        except SlideError as error:
            log.warning(f"inputs of blocks stay on the GPU, where memory is short: {error}")
            self._is_full = True
            return
        self._free.extend(range(start, start + more * piece, piece))
        self._buffers.register(self._space)
        log.info(f"{size(self._space.nbytes)} on SSD hold inputs of blocks, for which GPU and host have no room")

    @property
    def nbytes(self) -> int:
        """Bytes of the places on SSD, free or not."""
        return self._space.nbytes

    @property
    def host_bytes(self) -> int:
        """Bytes of the host buffers, and of the checksums of what is on SSD."""
        return self._buffers.nbytes + self._space.sum_bytes

    # ---- down --------------------------------------------------------------------------------------------------------

    def place(self, order: int, nbytes: int) -> InputPlace | None:
        """Return a place for an input of a call of block `order`; None where no place is free."""
        pieces = self._buffers.pieces_of(nbytes)
        if len(self._free) < pieces:
            return None
        offsets = [self._free.popleft() for _ in range(pieces)]
        place = InputPlace(order, nbytes, offsets, Future(self._failures, "an input of a block to be written to SSD"))
        weakref.finalize(place, self._free.extend, offsets).atexit = False
        return place

    def buffers_of(self, place: InputPlace) -> Sequence[BufferLease]:
        """Return host buffers for an input on its way to `place` or from it; waits until enough are free."""
        while (leases := self._buffers.lease(place.nbytes)) is None and self._reading:
            self._give_up_last()
        return leases or self._buffers.lease_when_free(place.nbytes)

    def write(self, place: InputPlace, leases: Sequence[BufferLease], down: Future) -> None:
        """Write the input that is in these buffers when `down` has run. The buffers are the disk's from then on."""

        def then() -> None:
            for lease in leases:
                lease.release()
            place.written.complete()

        def job() -> None:
            down.synchronize()
            done = self._requests.around("input written", place.order, place.nbytes, then)
            # Compute waits for the buffers of this write, but only the step waits for its other writes.
            self._space.store.write(_parts(place, leases), done, urgent=True)

        self._thread.submit(job)

    # ---- up ----------------------------------------------------------------------------------------------------------

    def read_ahead(self, places: Iterable[InputPlace], lane: StreamWorker) -> None:
        """Begin to read these, in the order of their need, as far as buffers are free. `lane`: that copies."""
        fence: Future | None = None
        for place in places:
            if place in self._reading:
                continue
            if len(self._reading) >= self._ahead or (leases := self._buffers.lease(place.nbytes)) is None:
                return
            fence = fence or self._fence(lane)
            self._reading[place] = self._begin(place, leases, fence)

    def read(self, place: InputPlace, lane: StreamWorker) -> Arriving:
        """Return the input that was read ahead, or begin to read it now. It is the caller's until its `release`."""
        arriving = self._reading.pop(place, None)
        return arriving or self._begin(place, self.buffers_of(place), self._fence(lane))

    def give_up(self) -> None:
        """Give up all inputs that are read ahead: their backward will not run."""
        while self._reading:
            self._give_up_last()

    def _give_up_last(self) -> None:
        """Give back the buffers of the input that was read ahead and is needed last."""
        _, arriving = self._reading.popitem()
        arriving.wait()
        arriving.release()

    def _begin(self, place: InputPlace, leases: Sequence[BufferLease], fence: Future) -> Arriving:
        arriving = Arriving(place, leases, Future(self._failures, "the input of a block to be read from SSD"))

        def job() -> None:
            place.written.wait()
            fence.synchronize()
            # The lambda holds the place and the buffers until the read has ended, also where they were given up.
            done = self._requests.around("input read", place.order, place.nbytes, lambda: arriving.here.complete())
            self._space.store.read(_parts(place, leases), done, urgent=True)

        self._thread.submit(job)
        return arriving

    def _fence(self, lane: StreamWorker) -> Future:
        """Return a future that the lane keeps at this point: when it has passed, all earlier copies have run."""
        fence = Future(self._failures, "copies of inputs of blocks")
        lane.submit(lambda: fence.complete(self._context.device.mark(lane.stream, host_waits=True)))
        return fence

    @property
    def _thread(self) -> StreamWorker:
        if self._made is None:
            debug = self._context.settings.slide.debug
            delay = Delay(debug.lane_delay_ms, debug.seed + 6)
            self._made = StreamWorker("inputs on SSD", self._context.device, self._failures, LaneMeter(), delay)
        return self._made

    def close(self) -> None:
        """End the hand-overs, after the lane. Harmless when called twice."""
        if self._made is not None:
            self._made.close()
        self._space.close()


def _parts(place: InputPlace, leases: Sequence[BufferLease]) -> list[TransferPart]:
    """The transfer between the place and its buffers, in whole pages."""
    piece, parts, left = leases[0].buffer.numel(), [], whole_pages(place.nbytes)
    for offset, lease in zip(place.offsets, leases, strict=True):
        parts.append(TransferPart(offset, lease.buffer.data_ptr(), min(piece, left)))
        left -= piece
    return parts
