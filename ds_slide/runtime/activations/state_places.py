"""The places where a block can keep its own state: attributes, buffers, containers, random generators, class names.

`found` walks from the modules of a block to all of these. Each place can be read, compared with what was read before,
and written back. Values are compared by identity, and numbers and strings also by value. Tensors are values of
places here; `block_state` compares their contents.
"""

from __future__ import annotations

import pickle
import random
import sys
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter, is_
from types import CellType, FunctionType, SimpleNamespace
from typing import Any

import torch
from torch import nn

from ds_slide.plan.trace import FUNCTION
from ds_slide.runtime.activations.checkpointing import FLAG

MOST_PLACES = 200
"""A walk stops at this number of places: the attributes of a layer may lead to a whole data set."""
MOST_DEPTH = 4
MOST_ENTRIES = 1_000
"""A longer container is compared by its length alone."""

_OURS = frozenset((FLAG, FUNCTION))
"""Names that the engine itself sets in a block for the length of a forward."""
_is_training = attrgetter("training")
_OF_EACH_MODULE = frozenset(vars(nn.Module()))
_SCALARS = frozenset((bool, int, float, complex, str, bytes, type(None)))
_ENGINES = frozenset(("ds_slide", "deepspeed"))
_LIBRARIES = frozenset(("torch", "transformers", *sys.stdlib_module_names)) | _ENGINES
"""Their classes and objects (configurations, process groups, loggers) hold no state that a layer's numbers depend
on."""


def same(one: Any, other: Any) -> bool:
    """Whether two values of one name are the same."""
    return one is other or (type(one) is type(other) and type(one) in _SCALARS and one == other)


def _all_same(one: Iterable[Any], other: Iterable[Any]) -> bool:
    return all(map(same, one, other))


class Place:
    """One place. `label`: its name for users."""

    __slots__ = ("holder", "label")

    def __init__(self, holder: Any, label: str) -> None:
        self.holder = holder
        self.label = label

    def read(self) -> Any:
        raise NotImplementedError

    def write(self, value: Any) -> None:
        raise NotImplementedError

    def is_same(self, value: Any) -> bool:
        """Whether the place holds `value`, which `read` has returned."""
        return bool(self.read() == value)

    def difference(self, _value: Any) -> str:
        """Return the name of the value that differs from the result of `read`."""
        return self.label


class Attributes(Place):
    """The dictionary of a module, of an object, or any other. `Before` compares all of them in one go."""

    __slots__ = ()

    def read(self) -> dict[Any, Any]:
        return dict(self.holder)

    def is_same(self, value: dict[Any, Any]) -> bool:
        holder = self.holder
        if len(holder) == len(value) and all(map(is_, holder.values(), value.values())):
            return True
        return self._differing(value) is None

    def _differing(self, value: dict[Any, Any]) -> Any:
        """Return the first name whose value has changed; None where none has."""
        now = self.read()
        for name in [*value, *(name for name in now if name not in value)]:
            if name not in now or name not in value or not same(now[name], value[name]):
                return name
        return None

    def difference(self, value: dict[Any, Any]) -> str:
        return f"{self.label}.{self._differing(value)}".lstrip(".")

    def write(self, value: dict[Any, Any]) -> None:
        self.holder.clear()
        self.holder.update(value)


class _OfBlock(Attributes):
    """The dictionary of the block's own module, without what the engine sets there."""

    __slots__ = ()

    def read(self) -> dict[Any, Any]:
        return {name: value for name, value in self.holder.items() if name not in _OURS}

    def is_same(self, value: dict[Any, Any]) -> bool:
        now = [value for name, value in self.holder.items() if name not in _OURS]
        return (len(now) == len(value) and all(map(is_, now, value.values()))) or self._differing(value) is None

    def write(self, value: dict[Any, Any]) -> None:
        super().write(value | {name: self.holder[name] for name in _OURS if name in self.holder})


class _Class(Attributes):
    """The attributes of a class of the script's own."""

    __slots__ = ("kind",)

    def __init__(self, kind: type, label: str) -> None:
        super().__init__(vars(kind), label)
        self.kind = kind

    def write(self, value: dict[Any, Any]) -> None:
        for name in [name for name in self.holder if name not in value]:
            delattr(self.kind, name)
        for name, each in value.items():
            if not same(self.holder.get(name), each):
                setattr(self.kind, name, each)


class _Globals(Place):
    """Global names that a function of the script's own uses. `holder`: all names of its file."""

    __slots__ = ("names",)

    def __init__(self, holder: dict[str, Any], label: str, names: Sequence[str]) -> None:
        super().__init__(holder, label)
        self.names = names

    def read(self) -> list[Any]:
        return [self.holder.get(name) for name in self.names]

    def is_same(self, value: list[Any]) -> bool:
        return _all_same(self.read(), value)

    def difference(self, value: list[Any]) -> str:
        return next(name for name, was in zip(self.names, value, strict=True) if not same(self.holder.get(name), was))

    def write(self, value: list[Any]) -> None:
        self.holder.update(zip(self.names, value, strict=True))


class _Cell(Place):
    """A variable of the function around a function of the script's own."""

    __slots__ = ()

    def read(self) -> Any:
        return self.holder.cell_contents

    def is_same(self, value: Any) -> bool:
        return same(self.holder.cell_contents, value)

    def write(self, value: Any) -> None:
        self.holder.cell_contents = value


class _Sequence(Place):
    """A list or a deque."""

    __slots__ = ()

    def read(self) -> list[Any]:
        return list(self.holder)

    def is_same(self, value: list[Any]) -> bool:
        return len(self.holder) == len(value) and _all_same(self.holder, value)

    def write(self, value: list[Any]) -> None:
        self.holder.clear()
        self.holder.extend(value)


class _Set(Place):
    __slots__ = ()

    def read(self) -> set[Any]:
        return set(self.holder)

    def write(self, value: set[Any]) -> None:
        self.holder.clear()
        self.holder.update(value)


class _Random(Place):
    """A random generator of torch, of Python or of numpy."""

    __slots__ = ()

    def read(self) -> Any:
        # Arrays and tensors do not compare to one answer; their bytes do.
        if isinstance(self.holder, torch.Generator):
            return self.holder.get_state().numpy().tobytes()
        if isinstance(self.holder, random.Random):
            return self.holder.getstate()
        return pickle.dumps(self.holder.__getstate__() if _is_numpy_state(self.holder) else self.holder.state)

    def write(self, value: Any) -> None:
        if isinstance(self.holder, torch.Generator):
            self.holder.set_state(torch.frombuffer(bytearray(value), dtype=torch.uint8))
        elif isinstance(self.holder, random.Random):
            self.holder.setstate(value)
        elif _is_numpy_state(self.holder):
            self.holder.__setstate__(pickle.loads(value))
        else:
            self.holder.state = pickle.loads(value)


def _is_numpy_state(holder: Any) -> bool:
    return type(holder).__name__ == "RandomState"


class _Training(Place):
    """Return which modules of the block are in training. `holder`: modules whose dictionaries are no places."""

    __slots__ = ()

    def read(self) -> list[bool]:
        return list(map(_is_training, self.holder))

    def write(self, value: list[bool]) -> None:
        for module, training in zip(self.holder, value, strict=True):
            module.training = training


@dataclass
class Found:
    """The places that a walk has found. `tensors`: values of the places, without parameters and results of a graph.
    `buffers`: the number of registered buffers of the block's modules, which come first in `tensors`."""

    places: list[Place] = field(default_factory=list)
    tensors: list[tuple[torch.Tensor, str]] = field(default_factory=list)
    buffers: int = 0
    of_block: int = 0
    """Identity of the dictionary of the block's own module."""
    _seen: set[int] = field(default_factory=set)

    def add(self, holder: Any, place: Place) -> bool:
        """Add `place` if `holder` is new. -> whether it is, and its values are to be walked through."""
        if id(holder) in self._seen or len(self.places) >= MOST_PLACES:
            return False
        self._seen.add(id(holder))
        self.places.append(place)
        return True

    # ---- a value -----------------------------------------------------------------------------------------------------

    def walk(self, value: Any, label: str, depth: int = 0) -> None:
        """Add what `value` holds."""
        kind = type(value)
        if kind in _SCALARS or depth > MOST_DEPTH:
            return
        if kind is torch.Tensor:
            if id(value) not in self._seen and not value.requires_grad and value.layout is torch.strided:
                self._seen.add(id(value))
                self.tensors.append((value, label))
        elif isinstance(value, tuple):
            self._walk_all(enumerate(value), label, depth)
        elif isinstance(value, dict):
            if self.add(value, Attributes(value, label)):
                self._walk_all(value.items(), label, depth)
        elif isinstance(value, list | deque):
            if self.add(value, _Sequence(value, label)):
                self._walk_all(enumerate(value), label, depth)
        elif isinstance(value, set):
            self.add(value, _Set(value, label))
        elif isinstance(value, torch.Generator | random.Random):
            self.add(value, _Random(value, label))
        elif kind.__module__.startswith("numpy.random"):
            value = getattr(value, "bit_generator", value)
            self.add(value, _Random(value, label))
        elif isinstance(value, nn.Module):
            if _library(kind) not in _ENGINES:
                self.module(value, label, depth)
        elif not isinstance(value, type | FunctionType) and (
            _library(kind) not in _LIBRARIES or kind is SimpleNamespace
        ):
            own = getattr(value, "__dict__", None)
            if type(own) is dict and self.add(own, Attributes(own, label)):
                self._walk_all(own.items(), label, depth)

    def _walk_all(self, values: Iterable[tuple[Any, Any]], label: str, depth: int) -> None:
        for count, (name, each) in enumerate(values):
            if count == MOST_ENTRIES:
                return
            self.walk(each, f"{label}.{name}".lstrip("."), depth + 1)

    # ---- modules and what they are made of ---------------------------------------------------------------------------

    def buffers_of(self, module: nn.Module, label: str) -> None:
        """Add the registered buffers of `module`; an empty dictionary of a layer of torch's gets none later."""
        buffers = module._buffers
        if (buffers or not _is_plain_module(module)) and self.add(buffers, Attributes(buffers, label)):
            self._walk_all(buffers.items(), label, MOST_DEPTH - 1)

    def module(self, module: nn.Module, label: str, depth: int = 0) -> None:
        """Add the attributes and buffers of `module` itself, not of its submodules."""
        own = vars(module)
        self.buffers_of(module, label)
        place = _OfBlock if id(own) == self.of_block else Attributes
        if _is_plain_module(module) or not self.add(own, place(own, label)):
            return
        self._walk_all(((name, each) for name, each in own.items() if name not in _OF_EACH_MODULE), label, depth)
        for kind in type(module).__mro__:
            if _library(kind) not in _LIBRARIES and self.add(kind, _Class(kind, kind.__name__)):
                for name, each in list(vars(kind).items()):
                    if isinstance(each, FunctionType):
                        self._function(each)
                    elif not name.startswith("__"):
                        self.walk(each, f"{kind.__name__}.{name}", depth + 1)

    def _function(self, function: FunctionType) -> None:
        """Add the global names and the variables around it that `function` uses."""
        while isinstance(inner := getattr(function, "__wrapped__", None), FunctionType):
            function = inner
        if _library(function) in _LIBRARIES:
            return
        code, names = function.__code__, function.__globals__
        used = [name for name in code.co_names if _is_state(names.get(name, type))]
        if used:
            place = _Globals(names, "global", used)
            self.add(code, place)
            self._walk_all(((name, names[name]) for name in used), "", MOST_DEPTH - 2)
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            if isinstance(cell, CellType) and _is_state(_contents(cell)) and self.add(cell, _Cell(cell, name)):
                self.walk(cell.cell_contents, name, MOST_DEPTH - 2)


def found(modules: Mapping[str, nn.Module]) -> Found:
    """Return all places of a block. `modules`: its own module and the modules in it, by their names for users."""
    places = Found()
    plain = [module for module in modules.values() if _is_plain_module(module)]
    places.add(modules, _Training(plain, "training"))
    places.of_block = id(vars(next(iter(modules.values()))))
    for label, module in modules.items():
        places.buffers_of(module, label)
    places.buffers = len(places.tensors)
    for label, module in modules.items():
        places.module(module, label)
    return places


def globals_of_random() -> list[Place]:
    """Return the generators that a whole process uses, except torch's, which checkpointing restores by itself."""
    places: list[Place] = [_Random(random._inst, "random")]  # the generator behind `random.random()`
    if (numpy := sys.modules.get("numpy.random")) is not None:
        places.append(_Random(numpy.mtrand._rand, "numpy.random"))
    return places


def _is_plain_module(module: nn.Module) -> bool:
    """Whether it is a module of torch that writes nothing in its forward: a linear layer, a norm without statistics."""
    return not module._buffers and type(module).__module__.startswith("torch.nn.modules.")


def _is_state(value: Any) -> bool:
    """Whether a name's value may be state, and is no module, function or class that a name usually stands for."""
    return type(value) in _SCALARS or isinstance(value, list | dict | set | deque | torch.Tensor | torch.Generator)


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a variable that has no value yet
        return type


def _library(kind: Any) -> str:
    return (getattr(kind, "__module__", None) or "builtins").partition(".")[0]
