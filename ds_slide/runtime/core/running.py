"""The engines of this process, and what they hold of the limits that are for all of them together.

A reference model beside the one that is trained, an actor and a critic: each has an engine, built one after the other
from the same configuration. Two of them that each take the whole of a limit would take it twice.
"""

from __future__ import annotations

import atexit
import functools
import os
import weakref
from collections.abc import Callable
from typing import Protocol

from ds_slide.plan.memory import NOTHING_TAKEN, Taken
from ds_slide.runtime.core.context import Context


class HoldsMemory(Protocol):
    """What `ds_slide.runtime.parts.Parts` tells of an engine."""

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


def enter(engine: Running) -> None:
    """`engine` holds memory from now on, until `leave` or its end."""
    _engines.add(engine)


def leave(engine: Running) -> None:
    """Take the engine off the list; harmless when called twice."""
    _engines.discard(engine)


def taken() -> Taken:
    """Sum over the engines."""
    return sum((engine.parts.taken for engine in _engines), NOTHING_TAKEN)


def on_gpu() -> int:
    """Bytes that the engines have placed on the GPU, and of activations that they keep there for backwards to come."""
    return taken().gpu + sum(engine.parts.kept for engine in _engines)


def untouched_host_bytes() -> int:
    """What the engines have set aside in host memory and not written yet (moments before the first update), so that the
    operating system still counts it as free."""
    return sum(engine.parts.context.memory.untouched_bytes() for engine in _engines)


def close_at_exit(engine: Running) -> Callable[[], None]:
    """Close `engine` when the interpreter ends, if it lives by then. -> for `atexit.unregister`.

    A daemon thread that is inside C++ when the interpreter ends would be torn down there, and take the process along.
    """
    close = functools.partial(_close, weakref.ref(engine), os.getpid())
    atexit.register(close)
    return close


def _close(engine: weakref.ref[Running], owner: int) -> None:
    alive = engine()
    if alive is not None and os.getpid() == owner:  # a forked child has no lanes
        alive.close()
