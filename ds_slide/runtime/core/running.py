"""The engines of this process: what they use of the limits that all share, and how the process's ends reach them.

A reference model beside a trained model, or an actor and a critic, each have an engine. All are built one after the
other from the same configuration. If two of them each used a whole limit, they would use it twice.
"""

from __future__ import annotations

import atexit
import functools
import os
import signal
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Protocol

from ds_slide.plan.memory import NOTHING_TAKEN, Taken
from ds_slide.runtime.core.context import Context


class HoldsMemory(Protocol):
    """The part of `ds_slide.runtime.parts.Parts` that this module reads."""

    context: Context

    @property
    def taken(self) -> Taken: ...
    @property
    def kept(self) -> int: ...


class Running(Protocol):
    """An engine (`ds_slide.runtime.engine.SlideRuntime`)."""

    @property
    def parts(self) -> HoldsMemory: ...
    def close(self) -> None: ...


_engines: weakref.WeakSet[Running] = weakref.WeakSet()
_at_exit: weakref.WeakKeyDictionary[Running, functools.partial[None]] = weakref.WeakKeyDictionary()


def enter(engine: Running) -> None:
    """Count the memory of `engine` until `leave` or its end."""
    _engines.add(engine)


def leave(engine: Running) -> None:
    """Stop counting the engine, and closing it at the exit; harmless when called twice."""
    _engines.discard(engine)
    if (close := _at_exit.pop(engine, None)) is not None:
        atexit.unregister(close)


def taken() -> Taken:
    """Return the sum over the engines."""
    return sum((engine.parts.taken for engine in _engines), NOTHING_TAKEN)


def on_gpu() -> int:
    """Return the bytes that the engines have on the GPU: planned memory, and activations kept for later backwards."""
    return taken().gpu + sum(engine.parts.kept for engine in _engines)


def untouched_host_bytes() -> int:
    """Return the bytes of host memory that the engines have allocated and not written yet (moments before the first
    update). The operating system still counts them as free."""
    return sum(engine.parts.context.memory.untouched_bytes() for engine in _engines)


def close_at_exit(engine: Running) -> None:
    """Close `engine` when the interpreter ends, if it lives then and has not left.

    A daemon thread that is inside C++ when the interpreter ends would be killed there, and end the process.
    """
    close = functools.partial(_close, weakref.ref(engine), os.getpid())
    _at_exit[engine] = close
    atexit.register(close)


def _close(engine: weakref.ref[Running], owner: int) -> None:
    alive = engine()
    if alive is not None and os.getpid() == owner:  # a forked child has no lanes
        alive.close()


@contextmanager
def deferred_interrupt() -> Iterator[None]:
    """Delay KeyboardInterrupt to the end of the block; a second Ctrl-C is raised at once. Nothing changes in threads
    that get no interrupt, and where the script handles the signal itself."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    has_come = False

    def note(_number: int, _frame: FrameType | None) -> None:
        nonlocal has_come
        has_come = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if has_come:
            raise KeyboardInterrupt
