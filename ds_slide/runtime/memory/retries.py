"""An operator that finds no GPU memory runs again, when what can be spared has been given up.

A mode of torch's dispatcher sees each operator below autograd, in the forward and in the backward, in blocks, in the
head and in the loss. Torch allocates what an operator makes, and the space that it works in, before it computes, so the
operator that has failed has done nothing yet. A mode costs the host 5 to 10 us an operator, and more for kernels of our
own, which torch then has to be told of. So it is in force only while it is not known yet that there is enough memory.
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
"""In the errors of what takes memory from the driver, past torch."""


class MakesRoom(Protocol):
    """What has memory to spare (`ds_slide.runtime.memory.spare_memory.SpareMemory`)."""

    def make_room(self) -> bool:
        """Give up something. -> whether there was anything."""

    def release_cached(self) -> None:
        """Give unused memory back to the driver."""

    def explain_shortage(self) -> str:
        """What is missing, where nothing more can be given up, as the end of a message."""


class Retries(OperatorMode):
    """In force between `enter` and `leave`, which the same thread calls, and in each `around_backward`."""

    def __init__(self, room: MakesRoom) -> None:
        super().__init__()
        self._room = room

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        before = _states_of_generators(args, kwargs) if _is_random(function) else ()
        while True:
            try:
                return function(*args, **kwargs)
            except RuntimeError as error:  # of which torch.OutOfMemoryError is one
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
        """Harmless when called twice."""
        if not self.is_in_force:
            self.__enter__()

    @property
    def is_in_force(self) -> bool:
        """Whether it is, in this thread."""
        return bool(_len_torch_dispatch_stack()) and any(each is self for each in _get_current_dispatch_mode_stack())

    def leave(self) -> None:
        """Harmless when called twice. Modes that were entered since, and not left, stay in force."""
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
        """Autograd takes the modes of the thread that calls it along, to its own threads."""
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
    """Whether the operator writes into several tensors, and may have come to some of them before it failed."""
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
