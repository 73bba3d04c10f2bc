"""Which engine a model belongs to: one at a time.

`Trainer.evaluate()` builds an engine and `Trainer.train()` after it another one of the same model, and nobody destroys
the first. Its hooks would run under the second's.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Protocol

from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK
from torch import nn
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from ds_slide.errors import SlideError
from ds_slide.integration import parameters as protocol
from ds_slide.integration import without_engine
from ds_slide.runtime.engine import SlideRuntime


class Owner(Protocol):
    """What DeepSpeed's engine calls its optimizer."""

    runtime: SlideRuntime
    engine_hooks: Sequence[RemovableHandle]
    """Of DeepSpeed's engine, in the model."""

    def destroy(self) -> None: ...


_owners = WeakIdKeyDictionary()
"""Weak references to the owners of parameters."""


def enter(owner: Owner, module: nn.Module) -> None:
    """The parameters of `module` are `owner`'s from now on."""
    without_engine.allow_forwards(module)
    reference = weakref.ref(owner)
    for parameter in module.parameters():
        _owners[parameter] = reference
    # Where DeepSpeed registers a parameter that is used outside its module. Not the module itself, which would live for
    # ever, and with it, by its hooks, the engine.
    FWD_MODULE_STACK.append(weakref.proxy(module, _take_away))


def end(owner: Owner, module: nn.Module) -> None:
    """Do what is left when the lanes of `owner` have ended. The hooks of DeepSpeed's engine would keep that engine, and
    with it all of its states, for as long as there is the model."""
    for handle in owner.engine_hooks:
        handle.remove()
    if owner.runtime.spoiled:
        protocol.mark_spoiled(
            (parameter for unit in owner.runtime.units for parameter in unit.parameters), owner.runtime.spoiled
        )
    if leave(owner, module):
        without_engine.refuse_forwards(module)


def leave(owner: Owner, module: nn.Module) -> bool:
    """Forget `owner`; harmless when it has never entered, or left before. -> whether it had the model."""
    own = [parameter for parameter in module.parameters() if owner_of(parameter) is owner]
    for parameter in own:
        del _owners[parameter]
    if own:
        for entry in [entry for entry in FWD_MODULE_STACK if entry == module]:
            _take_away(entry)
    return bool(own)


def _take_away(stand_in: Any) -> None:
    FWD_MODULE_STACK[:] = [entry for entry in FWD_MODULE_STACK if entry is not stand_in]


def end_earlier_engine(module: nn.Module) -> None:
    """End the engines that have any parameter of `module`, as by their `destroy`, before another is built. Their
    updates run first; what they had in host memory stays with the parameters. SlideError, and nothing is ended, where
    their weights would go with an SSD tier, or are no weights of a step."""
    owners = _owners_of(module)
    for owner in owners:
        _require_whole_weights(owner)
    if owners:
        protocol.require_own_partitions(module)
    for owner in owners:
        for unit in owner.runtime.units:
            owner.runtime.settle(unit)
        owner.destroy()


def _require_whole_weights(owner: Owner) -> None:
    if any(unit.state.weights.buffer.tensor is None for unit in owner.runtime.units):
        raise SlideError(
            "the model belongs to an engine that has weights on SSD, from where another engine cannot take them; "
            "build the model again, or load it, for the second deepspeed.initialize"
        )
    if why := owner.runtime.why_spoiled():
        raise SlideError(
            f"the model belongs to an engine that has no whole weights to leave to another one, because {why}; call "
            "load_checkpoint() of that engine, or build the model again, before the second deepspeed.initialize"
        )


def _owners_of(module: nn.Module) -> list[Owner]:
    found = {id(owner): owner for owner in map(owner_of, module.parameters()) if owner is not None}
    return list(found.values())


def owner_of(parameter: nn.Parameter) -> Any:
    """The engine's optimizer that has `parameter`; None where none has it."""
    reference = _owners.get(parameter)
    return None if reference is None else reference()
