"""A number that stands for the whole state of the engine at a point: two runs in one state have the same futures.

It is made from the stack of every logical thread (function, instruction, local variables) and all that can be reached
from there: containers, objects of the engine, closures, locks, events and queues. Memory is known by its identity and
not by its bytes, identities are numbered as they are met, and times and statistics are left out: nothing that anybody
waits for depends on them. What Python keeps on the evaluation stack of a frame alone (iterators of loops) is not seen;
in this code the local variables tell the same.
"""

from __future__ import annotations

import itertools
import sys
import types
from collections import Counter, OrderedDict, defaultdict, deque
from functools import partial
from typing import Any

import torch
from torch import nn

from liveness import primitives
from liveness.collectives import Collectives, Group, Meeting
from liveness.disk import Disk, Transfer
from liveness.scheduler import Choice, LogicalThread, Scheduler

_SIMPLE = (int, float, str, bytes, bool, complex, type(None))
_FIXED_MODULES = (
    "ds_slide.model",
    "ds_slide.plan",
    "ds_slide.optim",
    "ds_slide.config",
    "ds_slide.report",
    "ds_slide.store.planes",
    "ds_slide.store.ssd_places",
    "ds_slide.runtime.settings",
    "torch",
    "logging",
)
"""What never changes, or decides nothing."""
_COUNTERS = {"misses"}
_HERE = ("scheduler.py", "primitives.py", "disk.py", "collectives.py", "explore.py", "state.py", "strategies.py")


def state_of(scheduler: Scheduler, choices: list[Choice]) -> int:
    """Called by a chooser. `choices`: what can go on, which belongs to the state."""
    walk = _Walk()
    for thread in scheduler.threads:
        if thread.finished:
            walk.out.append(-1)
            continue
        walk.out.append(thread.number)
        walk.out.append(thread.pending.kind)
        walk.value(thread.pending.target)
        frame = sys._getframe(1) if thread is scheduler.current else thread.greenlet.gr_frame
        while frame is not None:
            walk.frame(frame)
            frame = frame.f_back
    walk.out.append(
        tuple((choice.thread.number, 0 if choice.option is None else choice.option.key) for choice in choices)
    )
    walk.finish()
    return hash(tuple(walk.out))


class _Walk:
    def __init__(self) -> None:
        self.out: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._todo: deque[Any] = deque()
        self._alive: list[Any] = []

    def finish(self) -> None:
        while self._todo:
            self._open(self._todo.popleft())

    def frame(self, frame: types.FrameType) -> None:
        code = frame.f_code
        if code.co_filename.endswith(_HERE) and "/liveness/" in code.co_filename:
            return
        self.out.append((code.co_name, code.co_firstlineno, frame.f_lasti))
        for name, value in frame.f_locals.items():
            self.out.append(name)
            self.value(value)

    def value(self, value: Any) -> None:
        """Note a simple value, or the number of an object, which is opened when it is met first."""
        if isinstance(value, _SIMPLE):
            self.out.append(value)
            return
        number = self._numbers.get(id(value))
        if number is not None:
            self.out.append(("is", number))
            return
        self._numbers[id(value)] = len(self._numbers)
        self._alive.append(value)  # or another object could get its id
        self.out.append(("new", type(value).__name__))
        self._todo.append(value)

    def values(self, values: Any) -> None:
        for value in values:
            self.value(value)

    def _open(self, value: Any) -> None:
        out = self.out
        kind = type(value)
        if isinstance(value, torch.Tensor):
            out.append((self._storage(value), value.storage_offset(), value.numel(), value.grad is not None))
        elif kind in (dict, defaultdict, OrderedDict, Counter):
            out.append(len(value))
            for key, item in value.items():
                self.value(key)
                self.value(item)
        elif kind in (list, tuple, deque):
            out.append(len(value))
            self.values(value)
        elif kind in (set, frozenset):
            out.append(tuple(sorted(map(repr, value))))
        elif kind is types.MethodType:
            out.append(value.__func__.__qualname__)
            self.value(value.__self__)
        elif kind is types.FunctionType:
            out.append((value.__qualname__, value.__code__.co_firstlineno))
            for cell in value.__closure__ or ():
                self.value(_contents(cell))
            self.values(value.__defaults__ or ())
        elif kind is partial:
            self.value(value.func)
            self.values(value.args)
            self.values(value.keywords.values())
        elif kind is types.GeneratorType:
            out.append(value.__qualname__)
            if value.gi_frame is not None:
                self.frame(value.gi_frame)
        elif kind in (itertools.count, slice, range):
            out.append(repr(value))
        else:
            self._object(value)

    def _object(self, value: Any) -> None:
        if isinstance(value, LogicalThread):
            self.out.append(value.number)
        elif isinstance(value, primitives.Lock):
            self.out.append((None if value.owner is None else value.owner.number, value.count))
        elif isinstance(value, primitives.Condition):
            self.value(value.lock)
            self.out.append(tuple(waiter.notified for waiter in value._waiting))
        elif isinstance(value, primitives.Event):
            self.out.append(value._set)
        elif isinstance(value, primitives.SimpleQueue):
            self.values(value.items)
        elif isinstance(value, primitives.Thread):
            self.value(value.logical)
        elif isinstance(value, Disk):
            self.out.append((value.rank, value.closed))
            self.values(value.pending)
        elif isinstance(value, Transfer):
            self.out.append(value.key)
            self.value(value.then)
            self.value(value.told)
        elif isinstance(value, Collectives):
            self.values(value._groups.values())
            self.values(value._queues.values())
        elif isinstance(value, Group):
            self.out.append((value.name, tuple(value.issued.values())))
        elif isinstance(value, Meeting):
            self.out.append((value.what, tuple(sorted(value.calls)), value.over))
        elif not isinstance(value, type | types.ModuleType | nn.Module):
            self._attributes(value)

    def _attributes(self, value: Any) -> None:
        if type(value).__module__.startswith(_FIXED_MODULES):
            return
        for name, item in getattr(value, "__dict__", {}).items():
            if name not in _COUNTERS:
                self.out.append(name)
                self.value(item)
        for kind in type(value).__mro__:
            slots = kind.__dict__.get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                if name != "__weakref__" and hasattr(value, name):
                    self.value(getattr(value, name))

    def _storage(self, tensor: torch.Tensor) -> int:
        key = -1 - tensor.untyped_storage().data_ptr()  # no id is negative
        return self._numbers.setdefault(key, len(self._numbers))


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return "empty"
