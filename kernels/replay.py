"""Replays of launches: what a wrapper around kernels decides is decided once for each kind of inputs.

A wrapper chooses tiles, computes strides, allocates results and launches. That takes 35 to 80 us of the host, and
Triton's search for the compiled kernel 14 to 35 us more, while a block launches ten kernels. All of it depends on the
layouts of the tensors and on the other arguments alone. So the first call of a kind is recorded: the tensors that it
allocates, and its launches. Later calls of that kind allocate alike and launch the same compiled kernels.

A call is recorded only if it does nothing else: a dispatcher mode sees each operator of torch, and a call that copies
or fills a tensor is never replayed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from ds_slide.kernels.launch import POINTER_BYTES

# Kinds that an operator remembers. All blocks of a model share theirs; each shape of a batch has its own.
MOST_KINDS = 1024

_EMPTY = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.empty_like.default,
}

_under_way = threading.local()


def start(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Launch a kernel, and note the launch where a call is being recorded. `constants`: its compile-time constants and
    Triton's options."""
    recorder: _Recorder | None = getattr(_under_way, "recorder", None)
    if recorder is None:
        kernel[grid](*arguments, **constants)
        return
    with _disable_current_modes():  # Triton's interpreter copies tensors
        compiled = kernel[grid](*arguments, **constants)
    recorder.note(kernel, compiled, grid, arguments, constants)


@dataclass(frozen=True)
class _Part:
    """A tensor as a part of another one. `source`: the index of that tensor among the inputs and the allocated ones.
    `layout`: size, stride and distance from its first element; None for the whole of it."""

    source: int
    layout: tuple[tuple[int, ...], tuple[int, ...], int] | None

    def of(self, tensors: Sequence[Any]) -> torch.Tensor:
        whole: torch.Tensor = tensors[self.source]
        if self.layout is None:
            return whole
        size, stride, distance = self.layout
        return whole.as_strided(size, stride, whole.storage_offset() + distance)


@dataclass(frozen=True)
class _Launch:
    """`arguments`: all arguments in the kernel's order, with None at the places of `tensors`."""

    start: Any
    """The compiled kernel, or the kernel itself where Triton interprets it."""
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    tensors: tuple[tuple[int, _Part], ...]
    options: dict[str, Any]
    """Triton's options for the interpreter."""

    def replay(self, tensors: Sequence[Any]) -> None:
        arguments = list(self.arguments)
        for place, part in self.tensors:
            arguments[place] = tensors[part.source] if part.layout is None else part.of(tensors)
        self.start[self.grid](*arguments, **self.options)


@dataclass(frozen=True)
class _Recording:
    """`allocated`: size, stride and data type of each tensor that a call allocates, in their order."""

    allocated: tuple[tuple[tuple[int, ...], tuple[int, ...], torch.dtype], ...]
    launches: tuple[_Launch, ...]
    results: tuple[_Part | None, ...]
    is_tuple: bool

    def replay(self, inputs: Sequence[Any]) -> Any:
        device = inputs[0].device
        tensors = [*inputs]
        for size, stride, dtype in self.allocated:
            tensors.append(torch.empty_strided(size, stride, dtype=dtype, device=device))
        for launch in self.launches:
            launch.replay(tensors)
        results = [None if part is None else part.of(tensors) for part in self.results]
        return tuple(results) if self.is_tuple else results[0]


@dataclass
class _Recorder(TorchDispatchMode):
    """Watches one call. `inputs`: the call's arguments."""

    inputs: Sequence[Any]
    allocated: list[torch.Tensor] = field(default_factory=list)
    launches: list[_Launch] = field(default_factory=list)
    is_replayable: bool = True

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function in _EMPTY:
            self.allocated.append(result)
        elif function is not torch.ops.aten.promote_types.default:
            returns = function._schema.returns
            self.is_replayable &= bool(returns) and all(
                each.alias_info is not None and not each.alias_info.is_write for each in returns
            )
        return result

    def note(self, kernel: Any, compiled: Any, grid: tuple[int, ...], given: Sequence[Any], constants: Any) -> None:
        """Note a launch with its arguments `given`."""
        names = kernel.arg_names
        arguments: list[Any] = [*given, *(constants.get(name) for name in names[len(given) :])]
        tensors = []
        for place, each in enumerate(arguments):
            if isinstance(each, torch.Tensor):
                part = self.part(each)
                if part is None:
                    self.is_replayable = False
                    return
                tensors.append((place, part))
                arguments[place] = None
        options = {} if compiled else {name: value for name, value in constants.items() if name not in names}
        whole_grid = (*grid, 1, 1)[:3]
        self.launches.append(_Launch(compiled or kernel, whole_grid, tuple(arguments), tuple(tensors), options))

    def part(self, tensor: torch.Tensor) -> _Part | None:
        """Return where `tensor` comes from. None if it is no part of a known tensor, or of several: inputs that share
        a storage may lie at another distance in the next call."""
        known = [*self.inputs, *self.allocated]
        for index, each in enumerate(known):
            if each is tensor:
                return _Part(index, None)
        sharing = [index for index, each in enumerate(known) if isinstance(each, torch.Tensor) and _share(each, tensor)]
        if len(sharing) != 1:
            return None
        whole = known[sharing[0]]
        distance = tensor.storage_offset() - whole.storage_offset()
        return _Part(sharing[0], (tuple(tensor.shape), tensor.stride(), distance))

    def recording(self, result: Any) -> _Recording | None:
        """Return what is to be replayed for calls with this `result`; None if they have to run."""
        results = result if isinstance(result, tuple) else (result,)
        parts = [None if each is None else self.part(each) for each in results]
        if not self.is_replayable or any(
            part is None and each is not None for part, each in zip(parts, results, strict=True)
        ):
            return None
        allocated = tuple((tuple(each.shape), each.stride(), each.dtype) for each in self.allocated)
        return _Recording(allocated, tuple(self.launches), tuple(parts), isinstance(result, tuple))


def _share(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and one.untyped_storage()._cdata == other.untyped_storage()._cdata


class Replayed:
    """A function that launches kernels, with the recordings of its calls. The first argument is a tensor, and the
    other arguments are tensors or values that can be hashed."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._recordings: dict[Hashable, _Recording | None] = {}

    def __call__(self, *inputs: Any) -> Any:
        pointers = 0
        kind: list[Hashable] = []
        for each in inputs:
            if isinstance(each, torch.Tensor):
                pointers |= each.data_ptr()
                kind += (each.shape, each.stride(), each.dtype)
            else:
                kind.append(each)
        if pointers % POINTER_BYTES:
            return self._function(*inputs)
        key = (inputs[0].device, *kind)
        recording = self._recordings.get(key)
        if recording is not None:
            return recording.replay(inputs)
        if key in self._recordings:
            return self._function(*inputs)
        return self._record(key, inputs)

    def _record(self, key: Hashable, inputs: Sequence[Any]) -> Any:
        if len(self._recordings) >= MOST_KINDS:
            self._recordings.clear()
        with _Recorder(inputs) as recorder:
            _under_way.recorder = recorder
            try:
                result = self._function(*inputs)
            finally:
                _under_way.recorder = None
            self._recordings[key] = recorder.recording(result)
        return result
