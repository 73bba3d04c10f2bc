"""Puts the stand-ins into the modules of the engine, from outside, and takes them out again."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch.distributed

import ds_slide.report
import ds_slide.runtime
import ds_slide.store
from liveness import primitives
from liveness.disk import Disk

ENGINE = (ds_slide.runtime, ds_slide.store, ds_slide.report)


def engine_modules() -> list[Any]:
    """All modules of the engine that have threads, imported."""
    for package in ENGINE:
        for found in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
            importlib.import_module(found.name)
    prefixes = tuple(package.__name__ for package in ENGINE)
    return [module for name, module in sorted(sys.modules.items()) if name.startswith(prefixes)]


class Replaceable:
    """What a run may set: `Disk` with its arguments, and the collectives."""

    def __init__(self) -> None:
        self.make_disk: Callable[..., Any] = Disk
        self.collectives: Any = torch.distributed

    def store(self, *args: Any, **kwargs: Any) -> Any:
        return self.make_disk(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.collectives, name)


@contextmanager
def patched_engine() -> Iterator[Replaceable]:
    """Threads, queues, clocks, the store and collectives of the engine are those of this package."""
    replaceable = Replaceable()
    stand_ins = {
        id(primitives.real_threading): primitives.threading,
        id(primitives.real_queue): primitives.queue,
        id(primitives.real_time): primitives.time,
        id(sys.modules["atexit"]): primitives.atexit,
        id(torch.distributed): replaceable,
    }
    # For modules that import names: `from threading import Event`.
    for real, fake in (
        (primitives.real_threading, primitives.threading),
        (primitives.real_queue, primitives.queue),
        (primitives.real_time, primitives.time),
    ):
        for name, value in vars(fake).items():
            if not name.startswith("_") and hasattr(real, name):
                stand_ins[id(getattr(real, name))] = value
    with pytest.MonkeyPatch.context() as patch:
        for module in engine_modules():
            statistics = module.__name__.startswith("ds_slide.report")
            for name, value in list(vars(module).items()):
                if name == "SsdStore" and module.__name__.startswith("ds_slide.runtime"):
                    patch.setattr(module, name, replaceable.store)
                elif id(value) in stand_ins:
                    stand_in = stand_ins[id(value)]
                    quiet = statistics and value is primitives.real_threading
                    patch.setattr(module, name, primitives.quiet_threading if quiet else stand_in)
        yield replaceable
