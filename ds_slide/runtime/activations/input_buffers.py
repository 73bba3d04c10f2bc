"""Page-locked host memory for the inputs of blocks: pieces of one size, of which a longer batch takes more.

It is had when inputs move for the first time, and grows when a batch needs more than there is. It never shrinks, and
nothing is page-locked twice (0.35 s a GiB): a shorter batch takes fewer pieces, in the same memory.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping

from ds_slide.errors import SlideError
from ds_slide.report.log import log, size
from ds_slide.runtime.transfers.handoff import Failures
from ds_slide.runtime.transfers.pool import BufferPool, Lease
from ds_slide.store.host_memory import HostMemory

PIECES = 4
"""Of the first input: what is left of the last piece of another one is an eighth of it in the mean."""
PAGE = 4096
NAME = "host buffers for inputs of blocks"


class InputBuffers:
    """Called by the thread that computes; leases may end on any."""

    def __init__(
        self,
        memory: HostMemory,
        room: Callable[[], int],
        pools: MutableMapping[str, BufferPool],
        failures: Failures,
    ) -> None:
        """`room`: bytes of host memory that may be taken at this moment. `pools`: where those that are made go, by
        their names."""
        self._memory = memory
        self._room = room
        self._all = pools
        self._failures = failures
        self._own: list[BufferPool] = []
        self._piece = 0
        self.nbytes = 0
        """Of all pieces."""

    def available(self, wanted: int) -> int:
        """How much of `wanted` bytes can be had, in free pieces and in new ones."""
        free = self._free_bytes()
        return wanted if free >= wanted else min(wanted, free + self._room())

    def provide(self, one: int, count: int) -> None:
        """Have pieces for `count` inputs of `one` byte each, as far as host memory has room for them."""
        if not self._piece:
            self._piece = -(-one // (PIECES * PAGE)) * PAGE
        missing = count * self._pieces_of(one) - self._free_bytes() // self._piece
        if missing > 0 and (more := min(missing, self._room() // self._piece)):
            self._grow(more)

    def lease(self, nbytes: int) -> list[Lease] | None:
        """Pieces for so many bytes; None where so many are not free."""
        leases: list[Lease] = []
        for pool in self._own:
            while len(leases) < self._pieces_of(nbytes) and (lease := pool.try_lease()) is not None:
                leases.append(lease)
        return leases if leases and len(leases) == self._pieces_of(nbytes) else None

    def _pieces_of(self, nbytes: int) -> int:
        return -(-nbytes // self._piece)

    def _free_bytes(self) -> int:
        return sum(int(pool.statistics()["free"]) for pool in self._own) * self._piece

    def _grow(self, pieces: int) -> None:
        what = NAME if not self._own else f"{NAME} ({len(self._own) + 1})"
        try:
            native = self._memory.pool(self._piece, pieces, transfers=True)
        except SlideError as error:
            log.warning(f"inputs of blocks stay on the GPU, where memory is short: {error}")
            self._room = lambda: 0
            return
        self._own.append(BufferPool(native, self._failures, what))
        self._all[what] = self._own[-1]
        self.nbytes += pieces * self._piece
        log.info(f"{size(self.nbytes)} of host memory hold inputs of blocks, for which the GPU has no room")
