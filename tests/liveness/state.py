"""A number that stands for the whole state of the engine at a point: two runs in one state have the same futures.

It is made from the stack of every logical thread (function, instruction, local variables) and all that can be reached
from there: containers, objects of the engine, closures, locks, events and queues. Memory is known by its identity and
not by its bytes, identities are numbered as they are met, and times and statistics are left out: nothing that anybody
waits for depends on them. What Python keeps on the evaluation stack of a frame alone (iterators of loops) is not seen;
in this code the local variables tell the same. `test_explorer` has a test that random schedules do not leave the states
that were explored.

The walk is that of pickle, which is written in C; nothing is ever loaded from its bytes.
"""

from __future__ import annotations

import io
import itertools
import operator
import pickle
import sys
import types
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from ds_slide import _native
from ds_slide.runtime.core.futures import Failures
from ds_slide.store.ssd.files import TransferPart
from liveness import locks, stand_ins
from liveness.collectives import Collectives, Group, Meeting
from liveness.disk import Disk, Transfer
from liveness.scheduler import Choice, LogicalThread, Scheduler
from liveness.weights import Generations

_FIXED_MODULES = (
    "ds_slide.model",
    "ds_slide.plan",
    "ds_slide.optim",
    "ds_slide.config",
    "ds_slide.compression.codec",
    "ds_slide.report",
    "ds_slide.store.state_buffers",
    "ds_slide.store.ssd.extents",
    "ds_slide.runtime.core.settings",
    "ds_slide.runtime.core.calls",
    "ds_slide.runtime.weights.hooks",
    "ds_slide.runtime.weights.uses",
    "ds_slide.runtime.weights.passed",
    "torch",
    "logging",
)
"""What never changes, or decides nothing."""
_COUNTERS = {"misses", "waits", "waited_s"}
_DRIVER = "/liveness/training.py"


def state_of(scheduler: Scheduler, choices: list[Choice]) -> int:
    """Called by a chooser. `choices`: what can go on, which belongs to the state."""
    threads: list[Any] = []
    for thread in scheduler.threads:
        if thread.finished:
            threads.append(thread.number)
            continue
        frame = sys._getframe(1) if thread is scheduler.current else thread.greenlet.gr_frame
        threads.append((thread.number, thread.pending.kind, thread.pending.target, _stack(frame)))
    options = [(c.thread.number, 0 if c.option is None else c.option.key) for c in choices]
    file = io.BytesIO()
    _Walk(file, protocol=5).dump((threads, options))
    return hash(file.getvalue())


def _stack(frame: types.FrameType | None) -> list[Any]:
    stack: list[Any] = []
    while frame is not None:
        code = frame.f_code
        ours = "/ds_slide/" in code.co_filename or code.co_filename.endswith(_DRIVER)
        if ours or "/liveness/" not in code.co_filename:
            # By name: the order in a frame's dictionary tells when somebody has looked at it before.
            names = sorted(frame.f_locals.items(), key=operator.itemgetter(0)) if ours else None
            if names is not None and code.co_qualname == "Failures.waiting":
                names = [item for item in names if item[0] != "number"]
            stack.append((code.co_name, code.co_firstlineno, frame.f_lasti, names))
        frame = frame.f_back
    return stack


def _object(*_args: Any) -> None:
    """Stands in the bytes for whatever an object is."""


class _Walk(pickle.Pickler):
    def __init__(self, file: io.BytesIO, protocol: int) -> None:
        super().__init__(file, protocol=protocol)
        self._storages: dict[int, int] = {}

    def reducer_override(self, value: Any) -> Any:
        kind = type(value)
        if value is _object:
            return NotImplemented
        contents = _CONTENTS.get(kind)
        if contents is None:
            contents = _CONTENTS[kind] = _contents_of(kind)
        return _object, (kind.__name__,), contents(self, value)

    def tensor(self, value: torch.Tensor) -> Any:
        # The storage by the order in which it is met: buffers of a pool are as good as each other.
        storage = self._storages.setdefault(value.untyped_storage().data_ptr(), len(self._storages))
        return storage, value.storage_offset(), value.numel(), value.grad is not None


Contents = Callable[[_Walk, Any], Any]


def _nothing(_walk: _Walk, _value: Any) -> Any:
    return None


def _function(_walk: _Walk, value: Any) -> Any:
    cells = []
    for cell in value.__closure__ or ():
        try:
            cells.append(cell.cell_contents)
        except ValueError:
            cells.append("empty")
    return value.__qualname__, value.__code__.co_firstlineno, cells, value.__defaults__


def _has_addresses(item: Any) -> bool:
    """A dictionary by the addresses of memory, which are others in every run."""
    return type(item) is dict and bool(item) and type(first := next(iter(item))) is int and first > 1 << 32


def _attributes(names: tuple[str, ...]) -> Contents:
    def contents(_walk: _Walk, value: Any) -> Any:
        found = {
            name: list(item.values()) if _has_addresses(item) else item
            for name, item in getattr(value, "__dict__", {}).items()
            if name not in _COUNTERS
        }
        for name in names:
            if hasattr(value, name):
                found[name] = getattr(value, name)
        return found

    return contents


_CONTENTS: dict[type, Contents] = {
    types.FunctionType: _function,
    types.MethodType: lambda _walk, value: (value.__func__.__qualname__, value.__self__),
    types.BuiltinMethodType: lambda _walk, value: (value.__name__, getattr(value, "__self__", None)),
    types.GeneratorType: lambda _walk, value: (value.__qualname__, _stack(value.gi_frame)),
    partial: lambda _walk, value: (value.func, value.args, value.keywords),
    deque: lambda _walk, value: list(value),
    itertools.count: lambda _walk, value: repr(value),
    TransferPart: lambda _walk, value: (value.offset, value.nbytes),
    slice: lambda _walk, value: (value.start, value.stop),
    range: lambda _walk, value: repr(value),
    # Who waits is told by the stacks; how often somebody has waited, and how much was handed over, decides nothing.
    Failures: lambda _walk, value: (value._first is None, getattr(value, "_outstanding", None)),
    Scheduler: _nothing,
    LogicalThread: lambda _walk, value: value.number,
    locks.Lock: lambda _walk, value: (None if value.owner is None else value.owner.number, value.count),
    locks.RLock: lambda _walk, value: (None if value.owner is None else value.owner.number, value.count),
    locks.Condition: lambda _walk, value: (value.lock, [waiter.notified for waiter in value._waiting]),
    locks.Event: lambda _walk, value: value._set,
    locks.SimpleQueue: lambda _walk, value: list(value.items),
    stand_ins.Thread: lambda _walk, value: value.logical,
    # What is lent is told by the leases.
    _native.Pool: lambda _walk, value: value.stats()["free"],
    Disk: lambda _walk, value: (value.rank, value.closed, value.pending),
    Transfer: lambda _walk, value: (value.key, value.then, value.told),
    Collectives: lambda _walk, value: (value._groups, value._queues),
    Generations: lambda _walk, value: (value._counters, value._interrupted),
    Group: lambda _walk, value: (value.name, list(value.issued.values())),
    Meeting: lambda _walk, value: (value.what, sorted(value.calls), value.over),
}


def _contents_of(kind: type) -> Contents:
    """What of an object of this type belongs to the state."""
    if issubclass(kind, torch.Tensor):
        return _Walk.tensor
    if issubclass(kind, dict):
        return lambda _walk, value: dict(value)
    if issubclass(kind, type | types.ModuleType | nn.Module) or kind.__module__.startswith(_FIXED_MODULES):
        return _nothing
    slots = [base.__dict__.get("__slots__", ()) for base in kind.__mro__]
    names = [name for each in slots for name in ((each,) if isinstance(each, str) else each)]
    return _attributes(tuple(name for name in names if name != "__weakref__"))
