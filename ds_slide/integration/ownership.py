"""The engine that a model belongs to, the engines that train, and the engine whose step follows a backward.

A model belongs to one engine at a time. While it does, copies of it are plain models.

`Trainer.evaluate()` builds an engine and `Trainer.train()` after it another engine of the same model, and does not
destroy the first. Its hooks would run under the second's.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from deepspeed.runtime import engine as deepspeed_engine
from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK
from torch import nn
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from ds_slide.errors import SlideError
from ds_slide.integration import engine_methods, partitions, stock_modules
from ds_slide.integration.parameters import ParameterProtocol
from ds_slide.integration.partitions import allow_forwards, refuse_forwards
from ds_slide.patching.head import StreamedLinear
from ds_slide.patching.rows import ROWS, rows_of
from ds_slide.runtime.engine import SlideRuntime


class Owner(Protocol):
    """The object that DeepSpeed's engine calls its optimizer."""

    runtime: SlideRuntime
    protocol: ParameterProtocol
    engine_hooks: Sequence[RemovableHandle]
    """Hooks of DeepSpeed's engine in the model."""

    def destroy(self) -> None: ...


_owners = WeakIdKeyDictionary()
"""Weak references to the owners of parameters."""


def enter(owner: Owner, module: nn.Module) -> None:
    """Make `owner` the owner of the parameters of `module`."""
    allow_forwards(module)
    _teach_copies(module, owner.protocol)
    reference = weakref.ref(owner)
    for parameter in module.parameters():
        _owners[parameter] = reference
    # DeepSpeed registers a parameter that is used outside its module here. A proxy, since the module itself would live
    # for ever, and with it, by its hooks, the engine.
    FWD_MODULE_STACK.append(weakref.proxy(module, _take_away))


def end(owner: Owner, module: nn.Module) -> None:
    """End the ownership when the lanes of `owner` have ended. The hooks of DeepSpeed's engine would keep that engine
    and all of its states alive while the model lives."""
    for handle in owner.engine_hooks:
        handle.remove()
    if owner.runtime.access.spoiled:
        partitions.mark_spoiled(
            (parameter for unit in owner.runtime.units for parameter in unit.parameters), owner.runtime.access.spoiled
        )
    if leave(owner, module):
        refuse_forwards(module)


def leave(owner: Owner, module: nn.Module) -> bool:
    """Forget `owner`; harmless when it has never entered, or has left before. -> whether it had the model."""
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
    updates run first; weights in host memory stay with the parameters. SlideError, and nothing is ended, where weights
    would go with an SSD tier, or are no weights of a step."""
    owners = _owners_of(module)
    for owner in owners:
        _require_whole_weights(owner)
    if owners:
        partitions.require_own_partitions(module)
    for owner in owners:
        for unit in owner.runtime.units:
            owner.runtime.access.settle(unit)
        owner.destroy()


def leave_to_stock(module: nn.Module) -> None:
    """End the engines that have `module`, and leave its parameters and its copies as stock has them. Raises SlideError
    as `end_earlier_engine` does, or where weights went with an engine's SSD."""
    end_earlier_engine(module)
    partitions.leave_to_stock(module)
    for each in (*module.modules(), *module.parameters()):
        vars(each).pop(_COPY, None)


def _require_whole_weights(owner: Owner) -> None:
    if any(unit.state.weights.buffer.tensor is None for unit in owner.runtime.units):
        raise SlideError(
            "the model belongs to an engine that has weights on SSD, from where another engine cannot take them; "
            "build the model again, or load it, for the second deepspeed.initialize"
        )
    if why := owner.runtime.access.why_spoiled():
        raise SlideError(
            f"the model belongs to an engine that has no whole weights to leave to another one, because {why}; call "
            "load_checkpoint() of that engine, or build the model again, before the second deepspeed.initialize"
        )


def _owners_of(module: nn.Module) -> list[Owner]:
    found = {id(owner): owner for owner in map(owner_of, module.parameters()) if owner is not None}
    return list(found.values())


def owner_of(parameter: nn.Parameter) -> Any:
    """Return the engine's optimizer that has `parameter`; None where none has it."""
    reference = _owners.get(parameter)
    return None if reference is None else reference()


# ----------------------------------------------------------------------------------------------------------------------
# The living engines that train, and `nn.Module.zero_grad` while there is one.
#
# A script empties gradients through any module: the model, a wrapper around it, a part of it. All of them call
# `nn.Module.zero_grad`, so this method is replaced once, from the first engine with the key to the end of the last.
# Nothing is put into modules, which remain picklable and can be copied.

_living: weakref.WeakSet[Any] = weakref.WeakSet()
"""The optimizers of these engines."""
_stock = nn.Module.zero_grad


def enter_training(optimizer: Any) -> None:
    """Note that `optimizer`, a SlideZeroOptimizer with an engine, begins to train."""
    _living.add(optimizer)
    if nn.Module.zero_grad is _stock:
        nn.Module.zero_grad = _zero_grad  # type: ignore[method-assign]
    weakref.finalize(optimizer, _restore).atexit = False


def leave_training(optimizer: Any) -> None:
    """Forget `optimizer`; harmless when it has never entered, or has left before."""
    _living.discard(optimizer)
    _restore()


def living_trainers() -> list[Any]:
    """Return the optimizers of the living engines that train."""
    return list(_living)


def _restore() -> None:
    # A script may have replaced our function by its own: then ours stays below it, and finds no engine.
    if not living_trainers() and nn.Module.zero_grad is _zero_grad:
        nn.Module.zero_grad = _stock  # type: ignore[method-assign]


@functools.wraps(_stock)
def _zero_grad(self: nn.Module, set_to_none: bool = True) -> None:
    _stock(self, set_to_none)
    given: dict[Any, list[nn.Parameter]] = {}
    for parameter in self.parameters():
        owner = owner_of(parameter)
        if owner in _living:
            given.setdefault(owner, []).append(parameter)
    for optimizer, parameters in given.items():
        if (engine := optimizer.engine()) is not None:
            engine_methods.drop_some(engine, parameters, set_to_none=set_to_none)


# ----------------------------------------------------------------------------------------------------------------------
# The engine whose step follows a backward that runs through the outputs of several engines.
#
# The generator's loss of a GAN passes the discriminator, which then gets gradients that its own next step must not use.


def part_in_backward(engine: Any) -> str | None:
    """Return why the next step may be another engine's, as a clause; None where the backward is this engine's own.
    Called while a backward through an output of `engine` runs."""
    if engine._running_engine_backward or engine._manual_backward_expected:
        return None
    if deepspeed_engine._ENGINE_BACKWARD_GRAPH_TRACKER.is_current_graph_registered():
        return "the backward of another engine ran through this one's model"
    if _another_may_take_part(engine):
        return "one loss.backward() ran through the models of two engines"
    return None


def _another_may_take_part(engine: Any) -> bool:
    own = engine.optimizer
    owners = [owner for owner in living_trainers() if owner is not own]
    # A checkpointed block's parameters are in graphs that backward makes, so a graph that waits counts, too.
    if any(unit.awaits_backward for owner in owners for unit in owner.runtime.units):
        return True
    modules = [owner.module for owner in owners] + [module for module in stock_modules() if module is not own.module]
    return any(_is_in_graph(parameter) for module in modules for parameter in module.parameters())


def _is_in_graph(parameter: nn.Parameter) -> bool:
    """Whether the backward under way gives the parameter a gradient."""
    if not parameter.requires_grad:
        return False
    with torch.enable_grad():
        node: Any = torch.autograd.graph.get_gradient_edge(parameter).node
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # the parameter is one of the inputs of torch.autograd.grad
        return True


# ----------------------------------------------------------------------------------------------------------------------
# `copy.deepcopy` of a model that an engine has: a plain model with whole weights, as for an average or a reference.
#
# The engine's additions are not copied: hooks, which lead to lanes and locks, and ZeRO-3's parameters, which are empty
# between forwards. Python asks each object for its way of copying, so every module gets one, and a part of a model is
# copied like the whole.

_COPY = "__deepcopy__"
_HOOKS = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)
_OF_ZERO3 = ("ds_id", "ds_recompute_parameters", "_external_params", "ds_external_parameters", "all_parameters")


def _teach_copies(module: nn.Module, protocol: ParameterProtocol) -> None:
    """Make copies of `module`, of the modules in it and of their parameters plain."""
    for child in module.modules():
        vars(child)[_COPY] = functools.partial(_plain_copy, child, protocol)
    for parameter in module.parameters():
        vars(parameter)[_COPY] = functools.partial(_plain_parameter, parameter, protocol)


def _plain_parameter(parameter: nn.Parameter, protocol: ParameterProtocol, memo: dict[int, Any]) -> nn.Parameter:
    (weights,) = protocol.whole_weights([parameter]).values()
    copied = memo[id(parameter)] = nn.Parameter(weights, requires_grad=parameter.requires_grad)
    return copied


def _plain_copy(module: nn.Module, protocol: ParameterProtocol, memo: dict[int, Any]) -> nn.Module:
    children = list(module.modules())
    parameters = [parameter for parameter in module.parameters() if id(parameter) not in memo]
    for parameter, weights in protocol.whole_weights(parameters).items():
        memo[id(parameter)] = nn.Parameter(weights, requires_grad=parameter.requires_grad)
    for child in children:
        _leave_hooks_out(child, memo)
        if (rows := rows_of(child)) is not None:
            memo[id(rows)] = None
    with _untaught(children):
        copied: nn.Module = copy.deepcopy(module, memo)
    for child in copied.modules():
        for name in (*_OF_ZERO3, ROWS):
            vars(child).pop(name, None)
        if type(child) is StreamedLinear:
            child.__class__ = nn.Linear  # type: ignore[assignment]
        if type(child._parameters) is not dict:  # stock's dictionary gathers a parameter that is read
            child._parameters = dict(child._parameters)
    return copied


def _leave_hooks_out(module: nn.Module, memo: dict[int, Any]) -> None:
    """Put into `memo` the hooks that a copy of `module` has: the script's own."""
    tables = [getattr(module, name) for name in _HOOKS]
    ours = {number for table in tables for number, hook in table.items() if _is_of_engine(hook)}
    for table in tables if ours else ():
        kept = type(table)((number, hook) for number, hook in table.items() if number not in ours)
        memo[id(table)] = copy.deepcopy(kept, memo)


def _is_of_engine(hook: Any) -> bool:
    where = str(getattr(getattr(hook, "func", hook), "__module__", ""))
    return where.startswith(("ds_slide.", "deepspeed."))


@contextmanager
def _untaught(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Let Python copy the modules by itself, each with its class's own way where it has one."""
    taught = [(module, vars(module).pop(_COPY)) for module in modules if _COPY in vars(module)]
    try:
        yield
    finally:
        for module, way in taught:
            vars(module)[_COPY] = way
