"""An operator that finds no GPU memory runs again, when memory that can be spared has been given up.

A mode of torch's dispatcher sees each operator below autograd, in the forward and in the backward, in blocks, in the
head and in the loss. Torch allocates the results and the workspace of an operator before it computes, so the operator
that has failed has done nothing yet. A mode costs the host 5 to 10 us an operator, and more for our own kernels, which
torch then has to be told about. So it is in force only until enough memory has been shown.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch._C import _len_torch_dispatch_stack
from torch.utils._python_dispatch import (
    _get_current_dispatch_mode,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)

from ds_slide.plan.operations import tensors_of
from ds_slide.plan.spare import GPU_SHARES, Shape
from ds_slide.report.log import log, size
from ds_slide.runtime.activations.activations import Activations
from ds_slide.runtime.activations.kept_calls import OperatorMode
from ds_slide.runtime.core.calls import in_backward
from ds_slide.runtime.core.device import default_generator, is_shortage
from ds_slide.runtime.core.ranks.collectives import Ranks
from ds_slide.runtime.memory.gpu_room import GpuRoom

CLEAN_STEPS = 2
"""Steps in which torch has to find all memory at once. The first step after a decision makes room for it."""
ALIKE = 1.02
"""A batch of up to this multiple of the shown bytes counts as shown."""


class Shortage:
    """What is given up where an operator finds no memory, and what is left free from then on. The thread that computes
    calls all methods."""

    def __init__(self, activations: Activations, room: GpuRoom, ranks: Ranks) -> None:
        self._activations = activations
        self._room = room
        self._ranks = ranks
        self.retrying = Retries(self)
        self._proof = Proof()
        self._trains = False
        """Whether the newest forward has gradients."""
        self._left = 0.0
        """Bytes of the predicted room that the newest forward has not filled."""
        self._freed_in_training = 0
        """Bytes of states that have made room for a forward with gradients, or its backward. Later batches leave these
        bytes free; an evaluation takes them for its own time only."""
        self._has_told_parked = False
        self._was_there = False
        """Whether memory was short since the last step."""

    # ---- a forward ---------------------------------------------------------------------------------------------------

    def begin_training(self, shape: Shape | None, room: float) -> None:
        """Begin a forward with gradients, which leaves `room` bytes. Operators that find no memory run again, in this
        forward and its backward, where little is left and no steps have shown yet that it is enough."""
        self._trains = True
        kept, need, gpu_room = self._activations.kept_bytes, self._room.need, self._room
        self._left = max(0.0, room - kept)
        is_tight = room - kept < GPU_SHARES.roomy * (gpu_room.usable or gpu_room.budget.limit or 0)
        if is_tight and need.is_known and not self._proof.covers(need.peaks.allocated() + need.at(shape) + kept):
            self._activations.allow_giving_up()
            self.retrying.enter()
        else:
            self._proof.is_open = False

    def begin_evaluation(self, shape: Shape | None) -> None:
        """Begin a forward without gradients."""
        self._trains = False
        states = self._room.states
        if states is not None and states.may_park() and self._room.is_tight_for_evaluation(shape):
            self.retrying.enter()

    def end_forward(self) -> None:
        """End the forward."""
        self.retrying.leave()
        if not self._trains:
            self._activations.kept_calls.take_given_up()  # it belongs to a graph that waits for its backward meanwhile

    def around_backward(self) -> AbstractContextManager[None]:
        """Return the context for a backward that the engine's caller asks for."""
        return self.retrying.around_backward() if self._proof.is_open else nullcontext()

    # ---- an operator that finds no memory ----------------------------------------------------------------------------

    def make_room(self) -> bool:
        """Give up kept activations, then slots of the window, and then the places of states, for an operator that has
        found no memory. -> whether it may find some now."""
        if self._activations.give_up():
            return True
        states = self._room.states
        if states is not None and (freed := states.give_up_slot() or states.give_up_sum()):
            self._freed_in_training += freed if self._trains or in_backward() else 0
            return True
        parked = states.park() if states is not None and states.may_park() else 0
        if parked and not self._has_told_parked:
            self._has_told_parked = True
            log.info(
                f"the GPU of rank {self._ranks.rank} had no memory left: optimizer states wait in host memory until "
                f"their update, {size(parked)} of them at first"
            )
        if self._trains or in_backward():
            self._freed_in_training += parked
        return bool(parked)

    def explain_shortage(self) -> str:
        """Return the end of a message that says what is missing where nothing more can be given up."""
        shape = self._room.need.under_way
        if shape is None:
            return ""
        given_up = f" ds_slide has nothing left to give up on the GPU for a batch of {shape.tokens:,} tokens"
        if not self._trains:
            return f"{given_up} without gradients; use fewer tokens at once, or more GPU memory."
        fitting = self._room.fitting_tokens(shape)
        about = f", of which about {fitting:,} would fit" if fitting < shape.tokens else ""
        return f"{given_up}{about}; use fewer tokens a micro-batch and more micro-batches, or more GPU memory."

    def release_cached(self) -> None:
        """Give unused memory back to the driver."""
        if self._room.budget.gpu is not None:
            self._room.budget.gpu.release_cached()

    # ---- afterwards --------------------------------------------------------------------------------------------------

    def notice(self) -> None:
        """Keep less from now on, where memory was short. With several ranks states cannot go back for it, and are
        parked again."""
        given, parked = self._activations.kept_calls.take_given_up(), self._freed_in_training
        self._freed_in_training = 0
        if given or (parked and self._ranks.world_size == 1):
            self._room.reserve += given + parked + self._left
            self._left = 0.0
            self._proof.begin()
            self._was_there = True
        if given:
            log.info(
                f"the GPU of rank {self._ranks.rank} had no memory left: {size(given)} of kept activations were given "
                "up and recomputed, and as much is left free from now on"
            )

    def end_step(self) -> bool:
        """End a step. -> whether torch had to look for memory, and more has to be left free than already is."""
        self.notice()
        found, has_less = self._room.end_step()
        self._proof.end_step(went_well=found and not has_less)
        was_there, self._was_there = self._was_there, False
        return not (found or was_there)  # the bytes that were short are left free already


class Proof:
    """Remembers the bytes of the batches that have found all their GPU memory, so that nothing need be given up in
    such batches."""

    def __init__(self) -> None:
        self._shown = 0.0
        """The most bytes that batches of clean steps were expected to take."""
        self._expected = 0.0
        """The most expected bytes of clean steps that are still too few to count as shown."""
        self._clean = 0
        self.is_open = False
        """Whether the newest batch takes more than has been shown."""

    def begin(self) -> None:
        """Forget what has been shown: memory was short, or is shared out in another way."""
        self._shown, self._expected, self._clean = 0.0, 0.0, 0

    def covers(self, expected: float) -> bool:
        """Return whether a batch that begins takes no more bytes than were shown. `expected`: all bytes on the GPU that
        are expected with this batch."""
        self.is_open = expected > ALIKE * self._shown
        if self.is_open:
            self._expected = max(self._expected, expected)
        return not self.is_open

    def end_step(self, *, went_well: bool) -> None:
        """End a step. `went_well`: torch has found all memory at once."""
        if not went_well:
            self.begin()
        elif self._expected:
            self._clean += 1
            if self._clean >= CLEAN_STEPS:
                self._shown, self._expected, self._clean = max(self._shown, self._expected), 0.0, 0


class Retries(OperatorMode):
    """A dispatcher mode, in force between `enter` and `leave`, which one thread calls, and in `around_backward`."""

    lets_replay = True  # it takes no memory

    def __init__(self, shortage: Shortage) -> None:
        super().__init__()
        self._shortage = shortage

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        before = _states_of_generators(args, kwargs) if _is_random(function) else ()
        while True:
            try:
                return function(*args, **kwargs)
            except RuntimeError as error:  # also torch.OutOfMemoryError, a subclass
                if not is_shortage(error) or _writes_several(function, args):
                    raise
                if not self._make_room(error):
                    raise torch.OutOfMemoryError(f"{error}{self._shortage.explain_shortage()}") from None
            for generator, state in before:
                generator.set_state(state)

    def _make_room(self, error: RuntimeError) -> bool:
        if not self._shortage.make_room():
            return False
        if not isinstance(error, torch.OutOfMemoryError):
            self._shortage.release_cached()
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
        given = [default_generator(device) for device in devices if device is not None]
    return [(generator, generator.get_state()) for generator in given]


def _device_of(kwargs: dict[str, Any]) -> torch.device | None:
    device = kwargs.get("device")
    return None if device is None else torch.device(device)
