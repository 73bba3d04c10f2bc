"""Stand-ins for the modules `threading`, `queue`, `time` and `atexit`."""

from __future__ import annotations

import atexit as real_atexit
import queue as real_queue
import threading as real_threading
import time as real_time
from collections.abc import Callable
from typing import Any

from liveness.locks import Condition, Event, Lock, RLock, Semaphore, SimpleQueue
from liveness.scheduler import LogicalThread, Operation, active


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
atexit = _Module(real_atexit, register=lambda function, *_args, **_kwargs: function, unregister=lambda _function: None)
