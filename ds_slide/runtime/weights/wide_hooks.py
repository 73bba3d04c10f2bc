"""Gives modules with narrowed weights copies in the parameters' own data type while they run without autocast.

Inside autocast a linear layer takes bf16 weights beside any input. Outside of it, for instance in `model.generate()`,
which runs outside of the engine's forward, the layer uses its weights as they are, but its inputs are in fp32. So it
gets wide copies of its weights, and autograd works through them. They hide the parameters during the call: they are
attributes of the module object, which Python finds before it asks `nn.Module` for a parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ds_slide.runtime.core.unit import Unit

_KEY = "ds_slide.wide"
"""The hooks' key in their module. Dynamo traces these hooks, because the linear layers inside of a block have them, and
guards on the keys. Torch's own keys count up, so `torch.compile` would compile each block anew."""

_Place = tuple[nn.Module, str, torch.dtype]
"""A module, the name of a parameter that it owns, and the data type of the copy."""


class WideHooks:
    """Hooks of a module. They run after the hooks that bind its weights."""

    def __init__(self, module: nn.Module, places: Sequence[_Place], device_type: str) -> None:
        self._places = places
        self._device_type = device_type
        self._hidden: list[list[tuple[nn.Module, str]]] = []
        """The hidden parameters of every call under way."""
        self._module = module
        module._forward_pre_hooks[_KEY] = self._before  # type: ignore[index]
        module._forward_hooks[_KEY] = self._after  # type: ignore[index]
        module._forward_hooks_always_called[_KEY] = True  # type: ignore[index]

    @classmethod
    def on(cls, root: nn.Module, units: Sequence[Unit], device_type: str) -> list[WideHooks]:
        """Return hooks for every module that owns narrowed parameters, and for every block with such modules: a block
        checks the data types of their weights before it calls them."""
        wide = {id(p): unit.parameter_dtype for unit in units if unit.spec.precision.narrowed for p in unit.parameters}
        if not wide:
            return []
        hooks = []
        blocks = {unit.spec.module for unit in units if unit.spec.kind == "block"}
        for module in root.modules():
            inside = module.modules() if module in blocks else (module,)
            # `items` only reads; a lookup in ZeRO-3's dictionary gathers the parameter.
            named = [(owner, name, p) for owner in inside for name, p in owner._parameters.items()]
            places = [(owner, name, wide[id(p)]) for owner, name, p in named if id(p) in wide]
            if places:
                hooks.append(cls(module, places, device_type))
        return hooks

    def remove(self) -> None:
        own = self._module
        if own._forward_pre_hooks.get(_KEY) == self._before:  # type: ignore[call-overload]
            for held in (own._forward_pre_hooks, own._forward_hooks, own._forward_hooks_always_called):
                held.pop(_KEY, None)  # type: ignore[call-overload]
        self.close_left_open()

    def close_left_open(self) -> None:
        """Take away the copies of calls that an interrupt has ended: torch calls no hook then, and the module would
        compute with a left copy for ever."""
        while self._hidden:
            self._after()

    def _before(self, *_call: Any) -> None:
        hidden: list[tuple[nn.Module, str]] = []
        self._hidden.append(hidden)
        if torch.is_autocast_enabled(self._device_type):
            return
        for owner, name, dtype in self._places:
            if name not in vars(owner) and (parameter := getattr(owner, name)).dtype != dtype:
                vars(owner)[name] = parameter.to(dtype)
                hidden.append((owner, name))

    def _after(self, *_call: Any) -> None:
        if self._hidden:  # not when another hook raised before `_before`
            for owner, name in self._hidden.pop():
                vars(owner).pop(name, None)
