"""Host buffers in front of the SSD: requested keys are loaded, the next keys are read ahead, clean buffers are reused.

The same rules serve chunks of optimizer states (loaded, updated, written back) and the weights of blocks (loaded,
copied to the GPU, updated, written back). An entry is one key in one buffer. Access to the buffer depends on its state:

    loading     the store writes it, until the read has completed
    users > 0   the threads that have taken it and not yet released it
    writes > 0  the store reads it; so may users
    otherwise   no thread may: it is clean, and its buffer may be given to another key at any time

The buffers are leases of a pool that only the cache uses, taken when first needed and given back when a key is
forgotten, or at the end. No thread waits for the pool: the cache decides which key gets a buffer next.

Spans of one update may be under way together, from their use to the end of their writes; another update waits for them.
Otherwise two writes of one place could reach the disk in any order.

The rules of displacement exclude a circular wait. An urgent demand takes any clean buffer, as a last resort also a kept
or reserved one; a plain demand takes only a buffer whose key is needed later. A buffer needed sooner is freed when the
GPU has used it, but the GPU itself may wait. So a thread that waits for an update presses it first, which makes its
demands urgent (`press`). A demand stays plain only while no thread waits for it. The holder of a buffer of one cache
may wait for a buffer of another in one order only (weights before chunks).
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Generic, Literal, Protocol, TypeVar

import torch

from ds_slide.runtime.core.futures import Failures
from ds_slide.runtime.core.pool import BufferLease, BufferPool
from ds_slide.store.tiers import Lessee

Key = TypeVar("Key")
OfKey = TypeVar("OfKey", contravariant=True)
How = Literal["urgent", "demand", "ahead"]


class Loader(Protocol[OfKey]):
    """Reads the states on SSD that a cache holds."""

    @property
    def what(self) -> str:
        """What the buffers hold, a plural, for messages."""

    def load(self, key: OfKey, buffer: torch.Tensor) -> None:
        """Begin to read `key` into `buffer`. `BufferCache.end_load` follows when the read has completed."""

    def owner(self, key: OfKey) -> str:
        """Return the name of the owner of `key`, for messages."""


@dataclass
class _Entry:
    lease: BufferLease
    loading: bool = True
    users: int = 0
    writes: int = 0
    changes: int = 0
    """Spans of an update under way, each from its use to the end of its write."""
    update: Lessee | None = None
    """The update of these spans."""
    waiting: list[_Demand] = field(default_factory=list)

    @property
    def idle(self) -> bool:
        return not (self.loading or self.users or self.writes or self.waiting)


@dataclass(frozen=True)
class _Demand:
    use: Callable[[torch.Tensor], None]
    update: Lessee | None
    """The update that changes the buffer; None for a read."""

    def may_start(self, entry: _Entry) -> bool:
        if entry.loading:
            return False
        return self.update is None or not entry.changes or entry.update == self.update


class BufferCache(Generic[Key]):
    """A cache of buffers by key. Any thread may call its methods; uses and loads begin without the lock held."""

    def __init__(
        self, source: Loader[Key], failures: Failures, cycle: Iterable[Key] = (), pool: BufferPool | None = None
    ) -> None:
        """Begin with no entry. `cycle`: keys that are used once a step, in this order; they need no `expect`. `pool`:
        None until `provide`."""
        self._source = source
        self._cycle = frozenset(cycle)
        self._pool = pool
        self._failures = failures
        self._changed = threading.Condition()
        self._entries: dict[Key, _Entry] = {}
        self._asked: dict[How, deque[Key]] = {"urgent": deque(), "demand": deque()}
        """Requested keys that have no buffer yet, first in, first out, by urgency."""
        self._demands: defaultdict[Key, list[_Demand]] = defaultdict(list)
        """The demands of each key."""
        self._unserved: dict[Key, float] = {}
        """When the waiting demands of a key began to wait."""
        self._reserved: Counter[Key] = Counter()
        self._upcoming = {key: place for place, key in enumerate(cycle)}
        """The place of a key in the order of the next uses; places are only compared. The keys are in this order."""
        self._places = itertools.count(len(self._upcoming))
        self._kept: frozenset[Key] = frozenset()
        self._hurry = 0
        self._abandoned = False

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Hold the lock for a change. Then begin all loads and uses that it allows, without the lock."""
        with self._changed:
            yield
            loads, uses = self._pump()
        for key, buffer in loads:
            self._source.load(key, buffer)
        for demand, buffer in uses:
            demand.use(buffer)

    # ---- what comes next ---------------------------------------------------------------------------------------------

    def expect(self, keys: Iterable[Key], kept: Iterable[Key] = ()) -> None:
        """Set the next uses, in order: they are read ahead as buffers allow, and stay longer than others. `kept`:
        entries that stay as well, but are not read again after they have been displaced."""
        with self._changing():
            self._upcoming = {key: place for place, key in enumerate(keys)}
            self._kept = frozenset(kept)

    def read_ahead(self) -> None:
        """Begin to read the first keys of the cycle."""
        with self._changing():
            pass

    def reserve(self, key: Key, count: int) -> None:
        """Keep `key` for `count` coming takes, which only the disk and updates can delay."""
        with self._changed:
            self._reserved[key] += count

    def provide(self, pool: BufferPool) -> None:
        """Set the pool, before the first use."""
        with self._changed:
            self._pool = pool

    # ---- use ---------------------------------------------------------------------------------------------------------

    def take(
        self,
        key: Key,
        use: Callable[[torch.Tensor], None],
        *,
        urgent: bool,
        update: Lessee | None = None,
        reserved: bool = False,
    ) -> None:
        """Call `use(buffer)` when the key is loaded, on the thread that completes the load; the user calls `release`
        afterwards.

        `urgent`: it may displace any other clean entry. `update`: the update that takes it, which `begin_write` must
        follow; it waits for other updates. It is urgent if a thread waits for it. This is asked under the lock, so that
        `press` comes either before the question or after the demand. `reserved`: whether `reserve` has announced it.
        """
        with self._changing():
            self._reserved[key] -= 1 if reserved else 0
            self._upcoming.pop(key, None)
            if key in self._cycle:
                self._upcoming[key] = next(self._places)
            demand = _Demand(use, update)
            if (entry := self._entries.get(key)) is not None:
                entry.waiting.append(demand)
            else:
                self._demands[key].append(demand)
                pressed = update is not None and update.is_pressed
                self._asked["urgent" if urgent or pressed else "demand"].append(key)

    def press(self, key: Key) -> None:
        """Make all demands of `key` so far urgent, because a thread waits for them."""
        with self._changing():
            if key in self._demands:
                self._asked["urgent"].append(key)  # in both queues now: the first queue serves all its demands

    @contextmanager
    def held(self, key: Key) -> Iterator[torch.Tensor]:
        """Wait for the buffer of `key`, and hold it read-only."""
        arrived = threading.Event()
        got: list[torch.Tensor] = []

        def use(buffer: torch.Tensor) -> None:
            got.append(buffer)
            arrived.set()

        self.take(key, use, urgent=True)
        what = f"the {self._source.what} of {self._source.owner(key)} to be read from SSD"
        with self._failures.waiting(what, arrived.set):
            arrived.wait()
        if not got:
            self._failures.raise_first()
        try:
            yield got[0]
        finally:
            self.release(key)

    def end_load(self, key: Key) -> None:
        """Note that the read of `key` has completed."""
        with self._changing():
            self._entries[key].loading = False

    def release(self, key: Key) -> None:
        with self._changing():
            self._entries[key].users -= 1

    def begin_write(self, key: Key) -> torch.Tensor:
        """Return the buffer, which the store reads until `end_write`. An update calls this before it releases."""
        with self._changed:
            entry = self._entries[key]
            entry.writes += 1
            return entry.lease.buffer

    def end_write(self, key: Key) -> None:
        with self._changing():
            self._entries[key].writes -= 1
            self._entries[key].changes -= 1

    # ---- from outside the flow of a step -----------------------------------------------------------------------------

    @contextmanager
    def hurry(self) -> Iterator[None]:
        """Let any demand displace any clean entry while this context is open: a thread waits for updates, and nothing
        computes."""
        with self._changing():
            self._hurry += 1
        try:
            yield
        finally:
            with self._changed:
                self._hurry -= 1

    def forget(self, keys: Sequence[Key]) -> None:
        """Drop the entries of these keys when their users and writes have ended. They are not read ahead until they are
        taken or expected again: the caller may be about to change them on the disk."""

        def dropped() -> bool:
            present = [key for key in keys if key in self._entries]
            for key in present:
                if self._entries[key].idle:
                    self._entries.pop(key).lease.release()
            return not any(key in self._entries for key in present)

        with self._changing():
            for key in keys:
                self._upcoming.pop(key, None)
            self._failures.wait_for(self._changed, dropped, f"the {self._source.what} to be written to SSD")

    def abandon(self) -> None:
        """Start no more reads and uses, because the runtime ends."""
        with self._changed:
            self._abandoned = True

    def close(self) -> None:
        """Give back all buffers, and forget the demands, which may have leases of other pools. Called after `abandon`,
        when neither store nor lanes use a buffer any more. Harmless when called twice."""
        with self._changed:
            self._demands.clear()
            while self._entries:
                self._entries.popitem()[1].lease.release()

    # ---- with the lock held ------------------------------------------------------------------------------------------

    def _pump(self) -> tuple[list[tuple[Key, torch.Tensor]], list[tuple[_Demand, torch.Tensor]]]:
        """Return the loads and uses that can begin, each with its buffer."""
        loads: list[tuple[Key, torch.Tensor]] = []
        uses: list[tuple[_Demand, torch.Tensor]] = []
        self._changed.notify_all()
        if self._abandoned:
            return loads, uses
        for how, asked in self._asked.items():
            while asked and (asked[0] not in self._demands or self._start(asked[0], how, loads)):
                asked.popleft()
        if not self._demands:
            for key in self._upcoming:
                if key not in self._entries and not self._start(key, "ahead", loads):
                    break
        for entry in self._entries.values():
            while entry.waiting and entry.waiting[0].may_start(entry):
                demand = entry.waiting.pop(0)
                entry.users += 1
                if demand.update is not None:
                    entry.changes += 1
                    entry.update = demand.update
                uses.append((demand, entry.lease.buffer))
        for key in self._demands.keys() - self._unserved.keys():
            self._unserved[key] = time.perf_counter()
        return loads, uses

    def _start(self, key: Key, how: How, loads: list[tuple[Key, torch.Tensor]]) -> bool:
        lease = self._lease_for(key, how)
        if lease is None:
            return False
        self._entries[key] = _Entry(lease, waiting=self._demands.pop(key, []))
        if (began := self._unserved.pop(key, None)) is not None:
            lease.pool.count_wait(began)
        loads.append((key, lease.buffer))
        return True

    def _lease_for(self, key: Key, how: How) -> BufferLease | None:
        if self._pool is not None and (lease := self._pool.try_lease()) is not None:
            return lease
        idle = [other for other, entry in self._entries.items() if entry.idle]
        clean = [other for other in idle if other not in self._kept and self._reserved[other] <= 0]
        if not clean and (how == "urgent" or self._hurry) and len(idle) == len(self._entries):
            clean = idle  # nothing else will become free
        victim = max(clean, key=self._rank, default=None)
        if victim is None:
            return None
        if how == "demand" and not self._hurry and self._rank(victim) < self._rank(key):
            return None
        if how == "ahead" and self._rank(victim) <= self._rank(key):
            return None
        return self._entries.pop(victim).lease

    def _rank(self, key: Key) -> float:
        return self._upcoming.get(key, math.inf)
