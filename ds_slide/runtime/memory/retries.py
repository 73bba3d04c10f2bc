"""An operator that finds no GPU memory runs again, when memory that can be spared has been given up.

A mode of torch's dispatcher sees each operator below autograd, in the forward and in the backward, in blocks, in the
head and in the loss. Torch allocates the results and the workspace of an operator before it computes, so the operator
that has failed has done nothing yet. A mode costs the host 5 to 10 us an operator, and more for our own kernels, which
torch then has to be told about. So it is in force only until enough memory has been shown.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch._C import _len_torch_dispatch_stack
from torch.utils._python_dispatch import (
    _get_current_dispatch_mode,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)

from ds_slide.plan.operations import tensors_of
from ds_slide.runtime.activations.mixing import OperatorMode

DRIVERS_OWN = ("CUBLAS_STATUS_ALLOC_FAILED", "CUDA error: out of memory", "Triton Error [CUDA]: out of memory")
"""Texts in the errors of libraries that take memory from the driver, past torch."""


class MakesRoom(Protocol):
    """The part that has memory to spare (`ds_slide.runtime.memory.spare_memory.SpareMemory`)."""

    def make_room(self) -> bool:
        """Give up something. -> whether there was anything."""

    def release_cached(self) -> None:
        """Give unused memory back to the driver."""

    def explain_shortage(self) -> str:
        """Return the end of a message that says what is missing where nothing more can be given up."""


class Retries(OperatorMode):
    """A dispatcher mode, in force between `enter` and `leave`, which one thread calls, and in `around_backward`."""

    def __init__(self, room: MakesRoom) -> None:
        super().__init__()
        self._room = room

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        before = _states_of_generators(args, kwargs) if _is_random(function) else ()
        while True:
            try:
                return function(*args, **kwargs)
            except RuntimeError as error:  # also torch.OutOfMemoryError, a subclass
                if not _is_shortage(error) or _writes_several(function, args):
                    raise
                if not self._make_room(error):
                    raise torch.OutOfMemoryError(f"{error}{self._room.explain_shortage()}") from None
            for generator, state in before:
                generator.set_state(state)

    def _make_room(self, error: RuntimeError) -> bool:
        if not self._room.make_room():
            return False
        if not isinstance(error, torch.OutOfMemoryError):
            self._room.release_cached()
        return True

    def enter(self) -> None:
        """Put the mode into force. Harmless when called twice."""
        if not self.is_in_force:
            self.__enter__()

    @property
    def is_in_force(self) -> bool:
        """Whether the mode is in force in this thread."""
        return bool(_len_torch_dispatch_stack()) and any(each is self for each in _get_current_dispatch_mode_stack())

    def leave(self) -> None:
        """End the mode. Harmless when called twice. Modes that were entered since, and not left, stay in force."""
        if not self.is_in_force:
            return
        above = []
        while (top := _get_current_dispatch_mode()) is not None and top is not self:
            above.append(_pop_mode())
        if top is self:
            self.__exit__(None, None, None)
        for mode in reversed(above):
            _push_mode(mode)

    @contextmanager
    def around_backward(self) -> Iterator[None]:
        """Put the mode into force for a backward: autograd takes the caller's modes to its own threads."""
        if self.is_in_force:  # the backward of a graph inside of a forward
            yield
            return
        self.enter()
        try:
            yield
        finally:
            self.leave()


def _is_shortage(error: RuntimeError) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or any(each in str(error) for each in DRIVERS_OWN)


def _is_random(function: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(function, "tags", ())


def _writes_several(function: Any, args: Sequence[Any]) -> bool:
    """Whether the operator writes into several tensors, and may have written some of them before it failed."""
    schema = getattr(function, "_schema", None)
    if schema is None or not schema.is_mutable:
        return False
    pairs = zip(schema.arguments, args, strict=False)
    written = [given for argument, given in pairs if argument.alias_info is not None and argument.alias_info.is_write]
    return len(written) > 1 or any(isinstance(given, list | tuple) for given in written)


def _states_of_generators(args: Sequence[Any], kwargs: dict[str, Any]) -> list[tuple[torch.Generator, torch.Tensor]]:
    """Return the generators that an operator may draw from, with their states: it may draw before it fails."""
    given = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Generator)]
    if not given:
        devices = {each.device for each in tensors_of((args, kwargs))} | {_device_of(kwargs)}
        given = [_default_generator(device) for device in devices if device is not None]
    return [(generator, generator.get_state()) for generator in given]


def _device_of(kwargs: dict[str, Any]) -> torch.device | None:
    device = kwargs.get("device")
    return None if device is None else torch.device(device)


def _default_generator(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
    return torch.default_generator
