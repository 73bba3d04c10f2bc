"""Locks, conditions, events and queues whose operations are points of the scheduler."""

from __future__ import annotations

import queue as real_queue
import sys
from collections import deque
from collections.abc import Callable
from typing import Any

from liveness.scheduler import Killed, LogicalThread, Operation, active
from liveness.sharing import Shared, sharing


class Lock(Shared):
    reentrant = False

    def __init__(self) -> None:
        super().__init__()
        self.of_failures = self.made_in == "Failures.__init__"
        self.owner: LogicalThread | None = None
        self.count = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        scheduler = active()
        if scheduler is None or scheduler.dying or (me := scheduler.current) is None:
            return True
        if self.reentrant and self.owner is me:
            self.count += 1
            return True
        if self.of_failures and self.owner is None and not scheduler.may_fail and _registers_a_wait():
            self.owner, self.count = me, 1
            return True
        self.used_by(me)
        if not blocking:
            if sharing().is_shared(self.place):
                scheduler.do(Operation("lock", self))
            if self.owner is not None:
                return False
        elif self.owner is not None or sharing().is_shared(self.place):
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


def _registers_a_wait() -> bool:
    """Whether `Failures.waiting` takes its lock. That is no point where no lane is to fail.

    Its two critical sections take no other lock and wait for nothing, so each is one step for all others. And they can
    be swapped with whatever these do: they only put a sentence into a table and take it out again, which nobody but
    `Failures._fail` and a watchdog reads, and look at a failure that does not happen. Being a leaf would not be enough:
    the order in which threads pass through the lock of a cache, a leaf too, decides who gets a buffer.
    """
    return sys._getframe(3).f_code.co_name == "waiting"


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


class Event(Shared):
    def __init__(self) -> None:
        super().__init__()
        self._set = False

    def is_set(self) -> bool:
        scheduler = active()
        if scheduler is not None and scheduler.exploring and not scheduler.dying:
            sharing().share(self.place)
            scheduler.do(Operation("look at", self))
        return self._set

    def set(self) -> None:
        scheduler = active()
        if scheduler is not None and sharing().is_shared(self.place):
            scheduler.do(Operation("set", self))
        self._set = True

    def clear(self) -> None:
        sharing().share(self.place)
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


class Semaphore(Shared):
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


class SimpleQueue(Shared):
    def __init__(self, maxsize: int = 0) -> None:
        super().__init__()
        self.items: deque[Any] = deque()
        self.maxsize = maxsize

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:  # noqa: ARG002
        scheduler = active()
        if scheduler is not None and not scheduler.dying:
            self.used_by(scheduler.current)
            if self.maxsize:
                scheduler.do(Operation("room", self, lambda: len(self.items) < self.maxsize, timeout))
            elif sharing().is_shared(self.place):
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
