"""Stand-ins for `threading`, `queue`, `time` and `atexit` whose operations are points of the scheduler.

Only what cannot be swapped with every operation of every other thread is a point: taking a lock, and in so far as
several threads do it, setting an event that others ask for without waiting, and putting into a queue. A critical
section is one step therefore; waiting for an event that is set or taking from a queue that is not empty is none.
"""

from __future__ import annotations

import queue as real_queue
import sys
import threading as real_threading
import time as real_time
from collections import deque
from collections.abc import Callable
from types import FrameType
from typing import Any

from liveness.scheduler import Killed, LogicalThread, Operation, active

Place = tuple[Any, ...]
FRAMES_OF_A_PLACE = 3
"""A ticket is made by one of a few lines of its class; who made the ticket is told by the frames around."""


class Sharing:
    """What was seen of the places in the code that make locks, events and queues, over all runs of an exploration.

    A lock that one thread takes, an event that nobody asks and a queue into which one thread puts need no points. Where
    that turns out to be wrong after it was relied upon, `changed` says that the exploration has to begin again.
    """

    def __init__(self, *, all_points: bool = False) -> None:
        self.all_points = all_points
        self.users: dict[Place, int] = {}
        self.shared: set[Place] = set()
        self.changed = False

    def share(self, place: Place) -> None:
        if place not in self.shared:
            self.shared.add(place)
            self.changed = True

    def is_shared(self, place: Place) -> bool:
        return self.all_points or place in self.shared


sharing = Sharing()


def use_sharing(new: Sharing) -> None:
    global sharing
    sharing = new


def _place() -> Place:
    """Where the calling constructor was called from: the innermost frames outside this file."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    found: list[tuple[str, int]] = []
    while frame is not None and len(found) < FRAMES_OF_A_PLACE:
        found.append((frame.f_code.co_name, frame.f_lineno))
        frame = frame.f_back
    scheduler = active()
    if scheduler is not None and not scheduler.exploring:
        # While the engine is built nothing is chosen: the number of an object is the same in every run.
        scheduler.objects += 1
        return (*found, scheduler.objects)
    return tuple(found)


class _Shared:
    """Something that was made at a place."""

    def __init__(self) -> None:
        self.place = _place()
        self._user: LogicalThread | None = None

    def describe(self) -> str:
        kind = type(self).__name__
        at = ", ".join(f"{name}:{line}" for name, line in self.place[:2])
        return f"{kind} made at {at}"

    def _used_by(self, thread: LogicalThread | None) -> None:
        if thread is None or self._user is thread:
            return
        if self._user is None:
            self._user = thread
        else:
            sharing.share(self.place)


class Lock(_Shared):
    reentrant = False

    def __init__(self) -> None:
        super().__init__()
        self.owner: LogicalThread | None = None
        self.count = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        scheduler = active()
        if scheduler is None or scheduler.dying or (me := scheduler.current) is None:
            return True
        if self.reentrant and self.owner is me:
            self.count += 1
            return True
        self._used_by(me)
        if not blocking:
            if sharing.is_shared(self.place):
                scheduler.do(Operation("lock", self))
            if self.owner is not None:
                return False
        elif self.owner is not None or sharing.is_shared(self.place):
            operation = Operation("lock", self, self.is_free, None if timeout < 0 else timeout)
            scheduler.do(operation)
            if operation.expired:
                return False
        self.owner, self.count = me, 1
        return True

    def is_free(self) -> bool:
        return self.owner is None

    def release(self) -> None:
        scheduler = active()
        if scheduler is None or scheduler.dying or scheduler.current is None:
            return
        assert self.owner is scheduler.current, f"{self.describe()} is released by a thread that does not hold it"
        self.count -= 1
        if not self.count:
            self.owner = None

    def locked(self) -> bool:
        return self.owner is not None

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_exc: object) -> None:
        self.release()


class RLock(Lock):
    reentrant = True


class Condition:
    def __init__(self, lock: Lock | None = None) -> None:
        self.lock = RLock() if lock is None else lock
        self._waiting: list[_Waiter] = []
        self.acquire, self.release = self.lock.acquire, self.lock.release

    def describe(self) -> str:
        return "Condition of " + self.lock.describe()

    def __enter__(self) -> bool:
        return self.lock.acquire()

    def __exit__(self, *_exc: object) -> None:
        self.lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        scheduler = active()
        if scheduler is None or scheduler.dying or (me := scheduler.current) is None:
            raise Killed
        assert self.lock.owner is me
        waiter, count = _Waiter(self.lock), self.lock.count
        self._waiting.append(waiter)
        self.lock.owner, self.lock.count = None, 0
        operation = Operation("notification", self, waiter.may_go_on, timeout)
        scheduler.do(operation)
        while self.lock.owner is not None:  # only after a time-out
            scheduler.do(Operation("lock", self.lock, self.lock.is_free))
        if waiter in self._waiting:
            self._waiting.remove(waiter)
        self.lock.owner, self.lock.count = me, count
        return waiter.notified

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        while not (result := predicate()):
            if not self.wait(timeout) and timeout is not None:
                return predicate()
        return result

    def notify(self, n: int = 1) -> None:
        for waiter in self._waiting[:n]:
            waiter.notified = True
        del self._waiting[:n]

    def notify_all(self) -> None:
        self.notify(len(self._waiting))


class _Waiter:
    __slots__ = ("lock", "notified")

    def __init__(self, lock: Lock) -> None:
        self.lock = lock
        self.notified = False

    def may_go_on(self) -> bool:
        return self.notified and self.lock.owner is None


class Event(_Shared):
    def __init__(self) -> None:
        super().__init__()
        self._set = False

    def is_set(self) -> bool:
        scheduler = active()
        if scheduler is not None and scheduler.exploring and not scheduler.dying:
            sharing.share(self.place)
            scheduler.do(Operation("look at", self))
        return self._set

    def set(self) -> None:
        scheduler = active()
        if scheduler is not None and sharing.is_shared(self.place):
            scheduler.do(Operation("set", self))
        self._set = True

    def clear(self) -> None:
        sharing.share(self.place)
        if (scheduler := active()) is not None:
            scheduler.do(Operation("clear", self))
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        scheduler = active()
        if self._set or scheduler is None:
            return self._set
        scheduler.do(Operation("set", self, self._is_set, timeout))
        return self._set

    def _is_set(self) -> bool:
        return self._set


class Semaphore(_Shared):
    def __init__(self, value: int = 1) -> None:
        super().__init__()
        self._value = value

    def acquire(self, blocking: bool = True, timeout: float | None = None) -> bool:
        scheduler = active()
        assert scheduler is not None
        if blocking:
            operation = Operation("semaphore", self, lambda: self._value > 0, timeout)
            scheduler.do(operation)
        if self._value <= 0:
            return False
        self._value -= 1
        return True

    def release(self, n: int = 1) -> None:
        if (scheduler := active()) is not None:
            scheduler.do(Operation("semaphore", self))
        self._value += n

    __enter__ = acquire

    def __exit__(self, *_exc: object) -> None:
        self.release()


class SimpleQueue(_Shared):
    def __init__(self, maxsize: int = 0) -> None:
        super().__init__()
        self.items: deque[Any] = deque()
        self.maxsize = maxsize

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:  # noqa: ARG002
        scheduler = active()
        if scheduler is not None and not scheduler.dying:
            self._used_by(scheduler.current)
            if self.maxsize:
                scheduler.do(Operation("room", self, lambda: len(self.items) < self.maxsize, timeout))
            elif sharing.is_shared(self.place):
                scheduler.do(Operation("put", self))
        self.items.append(item)

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        scheduler = active()
        if not self.items:
            if not block or scheduler is None:
                raise real_queue.Empty
            scheduler.do(Operation("an item", self, self._has_items, timeout))
            if not self.items:
                raise real_queue.Empty
        return self.items.popleft()

    def _has_items(self) -> bool:
        return bool(self.items)

    def put_nowait(self, item: Any) -> None:
        self.put(item)

    def get_nowait(self) -> Any:
        return self.get(block=False)

    def empty(self) -> bool:
        return not self.items

    def qsize(self) -> int:
        return len(self.items)


class Thread:
    """As `threading.Thread`, made and started by a logical thread."""

    def __init__(
        self,
        group: None = None,  # noqa: ARG002
        target: Callable[..., Any] | None = None,
        name: str | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        daemon: bool | None = None,
    ) -> None:
        self._target, self._args, self._kwargs = target, args, kwargs or {}
        scheduler = active()
        assert scheduler is not None
        self.name = name or f"thread-{len(scheduler.threads)}"
        self.daemon = bool(daemon)
        self.logical: LogicalThread | None = None

    @property
    def ident(self) -> int | None:
        return None if self.logical is None else self.logical.number + 1

    native_id = ident

    def run(self) -> None:
        if self._target is not None:
            self._target(*self._args, **self._kwargs)

    def start(self) -> None:
        scheduler = active()
        assert scheduler is not None
        self.logical = scheduler.spawn(self.name, self.run)
        _threads_of(scheduler)[self.logical.number] = self

    def is_alive(self) -> bool:
        return self.logical is not None and not self.logical.finished

    def join(self, timeout: float | None = None) -> None:
        scheduler, logical = active(), self.logical
        if scheduler is None or logical is None or logical.finished:
            return
        scheduler.do(Operation("the end", logical, lambda: logical.finished, timeout))


def _threads_of(scheduler: Any) -> dict[int, Thread]:
    table: dict[int, Thread] = scheduler.__dict__.setdefault("thread_objects", {})
    return table


def current_thread() -> Any:
    scheduler = active()
    if scheduler is None or scheduler.current is None:
        return real_threading.current_thread()
    table = _threads_of(scheduler)
    number = scheduler.current.number
    if number not in table:
        table[number] = Thread(name=scheduler.current.name)
        table[number].logical = scheduler.current
    return table[number]


def get_ident() -> int:
    scheduler = active()
    return (
        real_threading.get_ident() if scheduler is None or scheduler.current is None else scheduler.current.number + 1
    )


class Local:
    """As `threading.local`."""

    def __init__(self) -> None:
        object.__setattr__(self, "_tables", {})

    def _table(self) -> dict[str, Any]:
        return object.__getattribute__(self, "_tables").setdefault(get_ident(), {})  # type: ignore[no-any-return]

    def __getattr__(self, name: str) -> Any:
        try:
            return self._table()[name]
        except KeyError:
            raise AttributeError(name) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self._table()[name] = value


class QuietLock:
    """Of statistics, which no thread ever waits for: no point."""

    def acquire(self, *_args: Any) -> bool:
        return True

    def release(self) -> None: ...
    def __enter__(self) -> bool:
        return True

    def __exit__(self, *_exc: object) -> None: ...


class _Module:
    """A module with some names replaced."""

    def __init__(self, real: Any, **replaced: Any) -> None:
        self.__dict__.update(replaced)
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def sleep(seconds: float) -> None:
    """Others may go on meanwhile; a watchdog does not come back."""
    scheduler = active()
    if scheduler is None or scheduler.current is None:
        return
    if scheduler.current.is_watchdog:
        scheduler.do(Operation("the end of its sleep", scheduler.current, lambda: False, seconds))
    else:
        scheduler.do(Operation("sleep", scheduler.current))


threading = _Module(
    real_threading,
    Thread=Thread,
    Lock=Lock,
    RLock=RLock,
    Condition=Condition,
    Event=Event,
    Semaphore=Semaphore,
    BoundedSemaphore=Semaphore,
    current_thread=current_thread,
    get_ident=get_ident,
    get_native_id=get_ident,
    local=Local,
)
quiet_threading = _Module(real_threading, Lock=QuietLock, RLock=QuietLock)
queue = _Module(real_queue, SimpleQueue=SimpleQueue, Queue=SimpleQueue)
# The clock stands still: what depends on time is not explored.
time = _Module(
    real_time,
    sleep=sleep,
    time=lambda: 0.0,
    monotonic=lambda: 0.0,
    perf_counter=lambda: 0.0,
    monotonic_ns=lambda: 0,
    perf_counter_ns=lambda: 0,
)
atexit = _Module(sys.modules["atexit"] if "atexit" in sys.modules else __import__("atexit"))
atexit.__dict__.update(register=lambda function, *_args, **_kwargs: function, unregister=lambda _function: None)
