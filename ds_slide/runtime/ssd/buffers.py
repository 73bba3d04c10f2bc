"""Host buffers in front of the SSD: requested keys are loaded, the next keys are read ahead, clean buffers are reused.

The same rules serve chunks of optimizer states (loaded, updated, written back) and the weights of blocks (loaded,
copied to the GPU, updated, written back). An entry is one key in one buffer. Access to the buffer depends on its state:

    loading     the store writes it, until the read has completed
    users > 0   the threads that have taken it and not yet released it
    writes > 0  the store reads it; so may users
    otherwise   no thread may: it is clean, and its buffer may be given to another key at any time

The buffers are leases of a pool that only the cache uses, taken when first needed and given back when a key is
forgotten, or at the end. No thread waits for the pool: the cache decides which key gets a buffer next.

Updates of one generation may be under way together, from their use to the end of their writes; updates of another
generation wait for them. Otherwise two writes of one place could reach the disk in any order.

The rules of displacement exclude a circular wait. An urgent demand takes any clean buffer, as a last resort also a kept
or reserved one; a plain demand takes only a buffer whose key is needed later. A buffer needed sooner is freed when the
GPU has used it, but the GPU itself may wait. So a thread that waits for an update presses it first, which makes its
demands urgent (`press`). A demand stays plain only while no thread waits for it. The holder of a buffer of one cache
may wait for a buffer of another in one order only (weights before chunks).
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
"""Starts to read a key into a buffer; the third argument is called when the read has completed."""
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
    """The generation of an update, which changes the buffer; None for a read."""

    def may_start(self, entry: _Entry) -> bool:
        if entry.loading:
            return False
        return self.generation is None or not entry.changes or entry.generation == self.generation


class BufferCache(Generic[Key]):
    """A cache of buffers by key. Any thread may call its methods; `use` and `load` are called without the lock held."""

    def __init__(
        self,
        pool: BufferPool | None,
        load: Load[Key],
        failures: Failures,
        cycle: Iterable[Key] = (),
        what: str = "buffers",
        named: Callable[[Key], str] = str,
    ) -> None:
        """Begin with no entry. `pool`: None until `provide`. `cycle`: keys that are used once a step, in this order;
        they need no `expect`. For messages, `what` says what the buffers hold (a plural), and `named` names the owner
        of a key."""
        self._what = what
        self._named = named
        self._cycle = frozenset(cycle)
        self._pool = pool
        self._load = load
        self._failures = failures
        self._changed = threading.Condition()
        self._entries: dict[Key, _Entry] = {}
        self._asked: dict[bool, deque[Key]] = {True: deque(), False: deque()}
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

    # ---- what comes next ---------------------------------------------------------------------------------------------

    def expect(self, keys: Iterable[Key], kept: Iterable[Key] = ()) -> None:
        """Set the next uses, in order: they are read ahead as buffers allow, and stay longer than others. `kept`:
        entries that stay as well, but are not read again after they have been displaced."""
        with self._changed:
            self._upcoming = {key: place for place, key in enumerate(keys)}
            self._kept = frozenset(kept)
            actions = self._pump()
        _run(actions)

    def read_ahead(self) -> None:
        """Begin to read the first keys of the cycle."""
        with self._changed:
            actions = self._pump()
        _run(actions)

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
        use: Use,
        *,
        urgent: bool,
        pressed: Callable[[], bool] | None = None,
        generation: object = None,
        reserved: bool = False,
    ) -> None:
        """Call `use(buffer)` when the key is loaded, on the thread that completes the load; the user calls `release`
        afterwards.

        `urgent`: it may displace any other clean entry. `pressed`: whether it is urgent because a thread waits for it.
        This is asked under the lock, so that `press` comes either before the question or after the demand.
        `generation`: the generation of an update, which `begin_write` must follow; it waits for updates of other
        generations. `reserved`: whether `reserve` has announced it.
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
        """Make all demands of `key` so far urgent, because a thread waits for them."""
        with self._changed:
            if key in self._demands:
                self._asked[True].append(key)  # in both queues now: the first queue serves all its demands
            actions = self._pump()
        _run(actions)

    @contextmanager
    def held(self, key: Key) -> Iterator[torch.Tensor]:
        """Wait for the buffer of `key`, and hold it read-only."""
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
        """Return the buffer, which the store reads until `end_write`. An update calls this before it releases."""
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
        """Let any demand displace any clean entry while this context is open: a thread waits for updates, and nothing
        computes."""
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
        """Drop the entries of these keys when their users and writes have ended. They are not read ahead until they are
        taken or expected again: the caller may be about to change them on the disk."""
        with self._changed:
            for key in [key for key in self._upcoming if of(key)]:
                del self._upcoming[key]
            what = f"the {self._what} to be written to SSD"
            self._failures.wait_for(self._changed, lambda: self._dropped(of), what)
            actions = self._pump()
        _run(actions)

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

    def _dropped(self, of: Callable[[Key], bool]) -> bool:
        """Drop the idle entries of these keys. Returns whether none is left."""
        for key in [key for key, entry in self._entries.items() if of(key) and entry.idle]:
            self._entries.pop(key).lease.release()
        return not any(of(key) for key in self._entries)

    def _loaded(self, key: Key) -> None:
        with self._changed:
            self._entries[key].loading = False
            actions = self._pump()
        _run(actions)

    def _pump(self) -> list[Callable[[], None]]:
        """Start everything that can start. Returns the calls to make when the lock is free."""
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
