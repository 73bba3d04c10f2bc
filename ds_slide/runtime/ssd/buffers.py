"""Host buffers in front of the SSD: what was asked for is loaded, what comes next is read ahead, what is clean can go.

The same rules serve chunks of optimizer states (loaded, updated, written back) and the weights of blocks (loaded,
copied to the GPU, updated, written back). An entry is one key in one buffer; who may touch the buffer:

    loading     the store, until the read has completed
    users > 0   whoever has taken it and not yet released it
    writes > 0  the store reads it; so may users
    otherwise   nobody: it is clean, and its buffer may be given to another key at any time

The buffers are leases of a pool that is the cache's alone, taken when they are first needed and given back when a key
is forgotten, or at the end. Nobody waits for the pool: who gets a buffer next is decided here.

Updates of one generation may be under way together, from their use to the end of their writes; those of another wait
for them. Two writes of one place would reach the disk in any order.

Waiting in a circle is excluded by what may displace what. An urgent demand takes any clean buffer, in the last resort
also one that is kept or reserved; a plain demand only what is needed later than itself. What is needed sooner goes when
the GPU has used it, but the GPU may be the one that waits: so whoever waits for an update presses it first, which makes
its demands urgent (`press`). A demand stays plain only while nobody waits for it. Who holds a buffer of one cache may
wait for one of another in one order only (weights before chunks).
"""

from __future__ import annotations

import functools
import itertools
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar

import torch

from ds_slide.runtime.core.futures import Failures
from ds_slide.runtime.core.pool import BufferPool, Lease

Key = TypeVar("Key")
Use = Callable[[torch.Tensor], None]
Load = Callable[[Key, torch.Tensor, Callable[[], None]], None]
"""Start reading a key into a buffer; the third argument is called when it is there."""
How = Literal["urgent", "demand", "ahead"]
_NEVER = 1 << 60


@dataclass
class _Entry:
    lease: Lease
    loading: bool = True
    users: int = 0
    writes: int = 0
    changes: int = 0
    """Updates under way, each from its use to the end of its write."""
    generation: object = None
    """The generation of these updates."""
    waiting: list[_Demand] = field(default_factory=list)

    @property
    def idle(self) -> bool:
        return not (self.loading or self.users or self.writes or self.waiting)


@dataclass(frozen=True)
class _Demand:
    use: Use
    generation: object
    """The generation of an update, which changes the buffer; None where it is only read."""

    def may_start(self, entry: _Entry) -> bool:
        if entry.loading:
            return False
        return self.generation is None or not entry.changes or entry.generation == self.generation


class BufferCache(Generic[Key]):
    """All methods may be called from any thread; `use` and `load` are called without the lock held."""

    def __init__(
        self,
        pool: BufferPool | None,
        load: Load[Key],
        failures: Failures,
        cycle: Iterable[Key] = (),
        what: str = "buffers",
        named: Callable[[Key], str] = str,
    ) -> None:
        """`pool`: None until `provide`. `cycle`: keys that are used once a step, in this order; they need no `expect`.
        `what`: what the buffers hold, a plural, and `named`: of what, by key; for messages."""
        self._what = what
        self._named = named
        self._cycle = frozenset(cycle)
        self._pool = pool
        self._load = load
        self._failures = failures
        self._changed = threading.Condition()
        self._entries: dict[Key, _Entry] = {}
        self._asked: dict[bool, deque[Key]] = {True: deque(), False: deque()}
        """Keys that are asked for and in no buffer yet, first in, first out, by urgency."""
        self._demands: defaultdict[Key, list[_Demand]] = defaultdict(list)
        """The demands of each key."""
        self._unserved: dict[Key, float] = {}
        """When the demands that had to wait began to."""
        self._reserved: Counter[Key] = Counter()
        self._upcoming = {key: place for place, key in enumerate(cycle)}
        """When a key is needed next: places that only compare. In this order."""
        self._places = itertools.count(len(self._upcoming))
        self._kept: frozenset[Key] = frozenset()
        self._hurry = 0
        self._abandoned = False

    # ---- what comes next ---------------------------------------------------------------------------------------------

    def expect(self, keys: Iterable[Key], kept: Iterable[Key] = ()) -> None:
        """The next uses in order: they are read ahead as buffers allow, and stay before others. `kept`: entries that
        stay as well, but need not be read again once they are gone."""
        with self._changed:
            self._upcoming = {key: place for place, key in enumerate(keys)}
            self._kept = frozenset(kept)
            actions = self._pump()
        _run(actions)

    def read_ahead(self) -> None:
        """Begin to read what the cycle starts with."""
        with self._changed:
            actions = self._pump()
        _run(actions)

    def reserve(self, key: Key, count: int) -> None:
        """`count` takes of `key` will follow that nothing but disk and updates can hold up: until then it stays."""
        with self._changed:
            self._reserved[key] += count

    def provide(self, pool: BufferPool) -> None:
        """Before the first use."""
        with self._changed:
            self._pool = pool

    # ---- use ---------------------------------------------------------------------------------------------------------

    def take(
        self,
        key: Key,
        use: Use,
        *,
        urgent: bool,
        pressed: Callable[[], bool] | None = None,
        generation: object = None,
        reserved: bool = False,
    ) -> None:
        """Call `use(buffer)` when the key is loaded, on whichever thread brings that about; then `release` it.

        `urgent`: may displace any other clean entry. `pressed`: whether it may because somebody waits for it, asked
        under the lock, so that `press` comes either before the question or after the demand. `generation`: as an
        update, which `begin_write` must follow; it waits for those of other generations. `reserved`: one of those
        announced by `reserve`.
        """
        with self._changed:
            self._reserved[key] -= 1 if reserved else 0
            self._upcoming.pop(key, None)
            if key in self._cycle:
                self._upcoming[key] = next(self._places)
            demand = _Demand(use, generation)
            if (entry := self._entries.get(key)) is not None:
                entry.waiting.append(demand)
            else:
                self._demands[key].append(demand)
                self._asked[urgent or (pressed is not None and pressed())].append(key)
            actions = self._pump()
            if key in self._demands:
                self._unserved.setdefault(key, time.perf_counter())
        _run(actions)

    def press(self, key: Key) -> None:
        """Somebody waits for what `key` was asked for: what has been asked so far is urgent from now on."""
        with self._changed:
            if key in self._demands:
                self._asked[True].append(key)  # in both queues now: the first one serves all its demands
            actions = self._pump()
        _run(actions)

    @contextmanager
    def held(self, key: Key) -> Iterator[torch.Tensor]:
        """The buffer of `key`, read-only, for a thread that waits for it."""
        arrived = threading.Event()
        got: list[torch.Tensor] = []

        def use(buffer: torch.Tensor) -> None:
            got.append(buffer)
            arrived.set()

        self.take(key, use, urgent=True)
        with self._failures.waiting(f"the {self._what} of {self._named(key)} to be read from SSD", arrived.set):
            arrived.wait()
        if not got:
            self._failures.raise_first()
        try:
            yield got[0]
        finally:
            self.release(key)

    def release(self, key: Key) -> None:
        with self._changed:
            self._entries[key].users -= 1
            actions = self._pump()
        _run(actions)

    def begin_write(self, key: Key) -> torch.Tensor:
        """Called by an update before it releases: the store reads the buffer, which is returned, until `end_write`."""
        with self._changed:
            entry = self._entries[key]
            entry.writes += 1
            return entry.lease.buffer

    def end_write(self, key: Key) -> None:
        with self._changed:
            entry = self._entries[key]
            entry.writes -= 1
            entry.changes -= 1
            actions = self._pump()
        _run(actions)

    # ---- from outside the flow of a step -----------------------------------------------------------------------------

    @contextmanager
    def hurry(self) -> Iterator[None]:
        """While somebody waits for updates without computing on: clean entries are not kept for later uses."""
        with self._changed:
            self._hurry += 1
            actions = self._pump()
        _run(actions)
        try:
            yield
        finally:
            with self._changed:
                self._hurry -= 1

    def forget(self, of: Callable[[Key], bool]) -> None:
        """Drop the entries of these keys, once users and writes that are under way have ended. Until they are taken or
        expected again they are not read ahead either: the caller may be about to change them on the disk."""
        with self._changed:
            for key in [key for key in self._upcoming if of(key)]:
                del self._upcoming[key]
            what = f"the {self._what} to be written to SSD"
            self._failures.wait_for(self._changed, lambda: self._dropped(of), what)
            actions = self._pump()
        _run(actions)

    def abandon(self) -> None:
        """Start nothing more, neither reads nor uses (the runtime ends)."""
        with self._changed:
            self._abandoned = True

    def close(self) -> None:
        """After `abandon`, when neither store nor lanes use a buffer any more: give back all, and forget the demands,
        which may have leases of other pools. Harmless when called twice."""
        with self._changed:
            self._demands.clear()
            while self._entries:
                self._entries.popitem()[1].lease.release()

    # ---- with the lock held ------------------------------------------------------------------------------------------

    def _dropped(self, of: Callable[[Key], bool]) -> bool:
        """Drop the idle entries of these keys. -> whether none is left."""
        for key in [key for key, entry in self._entries.items() if of(key) and entry.idle]:
            self._entries.pop(key).lease.release()
        return not any(of(key) for key in self._entries)

    def _loaded(self, key: Key) -> None:
        with self._changed:
            self._entries[key].loading = False
            actions = self._pump()
        _run(actions)

    def _pump(self) -> list[Callable[[], None]]:
        """Bring everything forward that can be; returns what is to be called once the lock is free."""
        actions: list[Callable[[], None]] = []
        self._changed.notify_all()
        if self._abandoned:
            return actions
        for urgent, how in ((True, "urgent"), (False, "demand")):
            asked = self._asked[urgent]
            while asked and (asked[0] not in self._demands or self._start(asked[0], how, actions)):  # type: ignore[arg-type]
                asked.popleft()
        if not self._demands:
            for key in self._upcoming:
                if key not in self._entries and not self._start(key, "ahead", actions):
                    break
        for entry in self._entries.values():
            while entry.waiting and entry.waiting[0].may_start(entry):
                demand = entry.waiting.pop(0)
                entry.users += 1
                if demand.generation is not None:
                    entry.changes += 1
                    entry.generation = demand.generation
                actions.append(functools.partial(demand.use, entry.lease.buffer))
        return actions

    def _start(self, key: Key, how: How, actions: list[Callable[[], None]]) -> bool:
        lease = self._lease_for(key, how)
        if lease is None:
            return False
        self._entries[key] = _Entry(lease, waiting=self._demands.pop(key, []))
        if (began := self._unserved.pop(key, None)) is not None:
            lease.pool.count_wait(began)
        actions.append(lambda: self._load(key, lease.buffer, lambda: self._loaded(key)))
        return True

    def _lease_for(self, key: Key, how: How) -> Lease | None:
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

    def _rank(self, key: Key) -> int:
        return self._upcoming.get(key, _NEVER)


def _run(actions: Iterable[Callable[[], None]]) -> None:
    for action in actions:
        action()
