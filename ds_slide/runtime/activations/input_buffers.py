"""Page-locked host memory for the inputs of blocks: pieces of one size; a longer batch takes more pieces.

It is allocated when inputs move for the first time, and grows when a batch needs more. It never shrinks, and nothing is
page-locked twice (0.35 s a GiB): a shorter batch takes fewer pieces, in the same memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ds_slide.errors import SlideError
from ds_slide.plan.host_room import host_room, local_ranks
from ds_slide.plan.memory import SPARE_HOST_SHARE
from ds_slide.report.log import log, size
from ds_slide.runtime.core import running
from ds_slide.runtime.core.context import Context
from ds_slide.runtime.core.pool import BufferLease, BufferPool
from ds_slide.runtime.ssd.space import SpaceOnSsd
from ds_slide.store.ssd.extents import PAGE

PIECES = 4
"""Pieces of the first input. Another input leaves half a piece unused in the mean, an eighth of the first input."""
NAME = "host buffers for inputs of blocks"
BETWEEN = "host buffers for inputs of blocks on their way to and from SSD"


class InputBuffers:
    """Host buffers in pieces of one size. Called by the thread that computes; leases may end on any thread."""

    def __init__(self, context: Context, limit: int | None, name: str = NAME) -> None:
        """`limit`: the value of `ds_slide.host_memory`. `name`: the first of the names of the pools."""
        self._context = context
        self._limit = limit
        self._name = name
        self._own: list[BufferPool] = []
        self._is_full = False
        """Whether host memory has refused more."""
        self._registered = 0
        self.piece = 0
        """Bytes of one piece; 0 until the first input."""
        self.nbytes = 0
        """Bytes of all pieces."""

    def available(self, wanted: int) -> int:
        """Return the number of the `wanted` bytes that can be had, in free pieces and in new ones."""
        free = self._free_bytes()
        return wanted if free >= wanted else min(wanted, free + self._room())

    def provide(self, input_bytes: int, count: int) -> None:
        """Have free pieces for `count` inputs of `input_bytes` each, as far as host memory has room for them."""
        missing = count * self.pieces_of(input_bytes) - self._free_bytes() // self.piece
        if missing > 0 and (more := min(missing, self._room() // self.piece)):
            self._grow(more)

    def may_hold(self, input_bytes: int, count: int) -> bool:
        """Whether `count` inputs of `input_bytes` each have pieces, free or not, or host memory has room for them."""
        missing = self._missing(input_bytes, count)
        return missing <= 0 or missing <= self._room()

    def hold(self, input_bytes: int, count: int) -> bool:
        """Have pieces for `count` inputs of `input_bytes` each, free or not, or make none. -> whether they exist."""
        missing = self._missing(input_bytes, count)
        if 0 < missing <= self._room():
            self._grow(missing // self.piece)
        return self._missing(input_bytes, count) <= 0

    def _missing(self, input_bytes: int, count: int) -> int:
        """Return the bytes of pieces that `count` inputs of `input_bytes` each need beyond all present pieces."""
        return count * self.rounded(input_bytes) - self.nbytes

    def register(self, space: SpaceOnSsd) -> None:
        """Register each piece, once, for reads and writes of `space`."""
        for pool in self._own[self._registered :]:
            for address in pool.addresses:
                space.register(address, pool.buffer_bytes)
        self._registered = len(self._own)

    def lease(self, nbytes: int) -> list[BufferLease] | None:
        """Return free pieces for `nbytes`; None where too few are free."""
        leases: list[BufferLease] = []
        for pool in self._own:
            while len(leases) < self.pieces_of(nbytes) and (lease := pool.try_lease()) is not None:
                leases.append(lease)
        return leases if leases and len(leases) == self.pieces_of(nbytes) else None

    def lease_when_free(self, nbytes: int) -> list[BufferLease]:
        """Return pieces for `nbytes`; waits until they are free. `hold` has made enough of them. All pieces in use come
        back by themselves, and no other thread waits for any."""
        leases: list[BufferLease] = []
        while len(leases) < self.pieces_of(nbytes):
            free = (lease for pool in self._own if (lease := pool.try_lease()) is not None)
            leases.append(next(free, None) or self._lent_to_others(leases).lease())
        return leases

    def _lent_to_others(self, leases: Sequence[BufferLease]) -> BufferPool:
        """Return a pool that other leases also use, to wait for it. No pool has a free piece now."""
        taken = Counter(id(lease.pool) for lease in leases)
        return next(pool for pool in self._own if taken[id(pool)] < len(pool.addresses))

    def rounded(self, nbytes: int) -> int:
        """Return the bytes of the pieces that an input of `nbytes` takes."""
        return self.pieces_of(nbytes) * self.piece

    def pieces_of(self, nbytes: int) -> int:
        """Return the number of pieces that an input of `nbytes` takes. The first input decides the size of a piece."""
        if not self.piece:
            self.piece = -(-nbytes // (PIECES * PAGE)) * PAGE
        return -(-nbytes // self.piece)

    def _free_bytes(self) -> int:
        return sum(int(pool.statistics()["free"]) for pool in self._own) * self.piece

    def _room(self) -> int:
        """Return the bytes of host memory that may be taken at this moment."""
        if self._is_full:
            return 0
        free = host_room(local_ranks(), running.untouched_host_bytes()).nbytes * SPARE_HOST_SHARE
        return max(0, int(free if self._limit is None else min(free, self._limit - running.taken().host_states)))

    def _grow(self, pieces: int) -> None:
        what = self._name if not self._own else f"{self._name} ({len(self._own) + 1})"
        try:
            native = self._context.memory.pool(self.piece, pieces, transfers=True)
        except SlideError as error:
            log.warning(f"inputs of blocks stay on the GPU, where memory is short: {error}")
            self._is_full = True
            return
        pool = self._context.allocator.pools[what] = BufferPool(native, self._context.failures, what)
        self._own.append(pool)
        self.nbytes += pieces * self.piece
        log.info(f"{size(self.nbytes)} of host memory are taken for inputs of blocks, for which the GPU has no room")
