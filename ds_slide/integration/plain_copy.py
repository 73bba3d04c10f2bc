"""`copy.deepcopy` of a model that an engine has: a plain model with whole weights, as for an average or a reference.

The engine's additions are not copied: hooks, which lead to lanes and locks, and ZeRO-3's parameters, which are empty
between forwards. Python asks each object for its way of copying, so every module gets one, and a part of a model is
copied like the whole.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ds_slide.patching.head import StreamedLinear
from ds_slide.patching.rows import ROWS, rows_of

WholeWeights = Callable[[Sequence[nn.Parameter]], dict[nn.Parameter, torch.Tensor]]
"""New tensors with the whole weights of the parameters that the engine has."""

_COPY = "__deepcopy__"
_HOOKS = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)
_OF_ZERO3 = ("ds_id", "ds_recompute_parameters", "_external_params", "ds_external_parameters", "all_parameters")


def teach(module: nn.Module, whole: WholeWeights) -> None:
    """Make copies of `module`, of the modules in it and of their parameters plain."""
    for child in module.modules():
        vars(child)[_COPY] = functools.partial(_plain_copy, child, whole)
    for parameter in module.parameters():
        vars(parameter)[_COPY] = functools.partial(_plain_parameter, parameter, whole)


def forget(module: nn.Module) -> None:
    """Let `module` be copied as usual again."""
    for each in (*module.modules(), *module.parameters()):
        vars(each).pop(_COPY, None)


def _plain_parameter(parameter: nn.Parameter, whole: WholeWeights, memo: dict[int, Any]) -> nn.Parameter:
    (weights,) = whole([parameter]).values()
    copied = memo[id(parameter)] = nn.Parameter(weights, requires_grad=parameter.requires_grad)
    return copied


def _plain_copy(module: nn.Module, whole: WholeWeights, memo: dict[int, Any]) -> nn.Module:
    children = list(module.modules())
    parameters = [parameter for parameter in module.parameters() if id(parameter) not in memo]
    for parameter, weights in whole(parameters).items():
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
