"""Which engine a model belongs to: one at a time.

`Trainer.evaluate()` builds an engine and `Trainer.train()` after it another one of the same model, and nobody destroys
the first. Its hooks would run under the second's.
"""

from __future__ import annotations

import weakref
from typing import Any, Protocol

from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from ds_slide.errors import SlideError
from ds_slide.runtime.engine import SlideRuntime


class Owner(Protocol):
    """What DeepSpeed's engine calls its optimizer."""

    runtime: SlideRuntime

    def destroy(self) -> None: ...


_owners = WeakIdKeyDictionary()
"""Weak references to the owners of parameters."""


def enter(owner: Owner, module: nn.Module) -> None:
    """The parameters of `module` are `owner`'s from now on."""
    reference = weakref.ref(owner)
    for parameter in module.parameters():
        _owners[parameter] = reference
    # Where DeepSpeed registers a parameter that is used outside its module. Not the module itself, which would live for
    # ever, and with it, by its hooks, the engine.
    FWD_MODULE_STACK.append(weakref.proxy(module, _take_away))


def leave(owner: Owner, module: nn.Module) -> None:
    """Forget `owner`; harmless when it has never entered, or left before."""
    own = [parameter for parameter in module.parameters() if owner_of(parameter) is owner]
    for parameter in own:
        del _owners[parameter]
    if own:
        for entry in [entry for entry in FWD_MODULE_STACK if entry == module]:
            _take_away(entry)


def _take_away(stand_in: Any) -> None:
    FWD_MODULE_STACK[:] = [entry for entry in FWD_MODULE_STACK if entry is not stand_in]


def end_earlier_engine(module: nn.Module) -> None:
    """End the engine that has any parameter of `module`, as by its `destroy`, before another is built. Its updates run
    first; what it had in host memory stays with the parameters. SlideError where weights would go with its SSD tier."""
    for parameter in module.parameters():
        owner = owner_of(parameter)
        if owner is None:
            continue
        if any(unit.state.weights.buffer.tensor is None for unit in owner.runtime.units):
            raise SlideError(
                "the model belongs to an engine that has weights on SSD, from where another engine cannot take them; "
                "build the model again, or load it, for the second deepspeed.initialize"
            )
        owner.destroy()


def owner_of(parameter: nn.Parameter) -> Any:
    """The engine's optimizer that has `parameter`; None where none has it."""
    reference = _owners.get(parameter)
    return None if reference is None else reference()
