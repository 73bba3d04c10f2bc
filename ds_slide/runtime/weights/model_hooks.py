"""All hooks of an engine in its model, and those that widen narrowed weights for a forward without autocast.

Inside autocast a linear layer takes bf16 weights beside any input. Outside of it, for instance in `model.generate()`,
which runs outside of the engine's forward, the layer uses its weights as they are, but its inputs are in fp32. So it
gets wide copies of its weights, and autograd works through them. They hide the parameters during the call: they are
attributes of the module object, which Python finds before it asks `nn.Module` for a parameter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ds_slide.runtime.activations.checkpointing import CacheHooks
from ds_slide.runtime.core.unit import Unit
from ds_slide.runtime.weights.hooks import BlockHooks, OuterHooks, RootHooks
from ds_slide.runtime.weights.saved_weights import SavedWeights

if TYPE_CHECKING:
    from ds_slide.runtime.engine import SlideRuntime

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
        narrowed = [unit for unit in units if unit.spec.precision.narrowed]
        wide = {id(p): dtype for unit in narrowed for p, dtype in zip(unit.parameters, unit.dtypes, strict=True)}
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


def _roots(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the model, and the models in it whose forwards a `generate` of a wrapper calls."""
    yield module
    yield from (each for each in module.modules() if each is not module and hasattr(type(each), "generate"))


class ModelHooks:
    """The hooks of one engine, which call `runtime`. `attached`: the hooks that are in the model now."""

    def __init__(self, module: nn.Module, runtime: SlideRuntime) -> None:
        self._module = module
        self._runtime = runtime
        window = runtime.parts.window
        self._saved = SavedWeights({} if window is None else window.by_storage, runtime.bindings.slots, runtime)
        self.attached: list[BlockHooks | RootHooks | OuterHooks | WideHooks | CacheHooks] = []

    def attach(self) -> None:
        """Put new hooks into the model, in place of the present ones. Without hooks the model computes with the content
        of its parameters (whole weights, gathered for generation)."""
        self.detach()
        runtime = self._runtime
        recorder = runtime.parts.context.recorder
        outer_units = [unit for unit in runtime.units if unit.spec.kind == "outer"]
        self.attached = [
            *(BlockHooks(unit, runtime, self._saved, runtime.root, recorder) for unit in runtime.blocks),
            *OuterHooks.on(self._module, outer_units, runtime.resident_weights),
            *WideHooks.on(self._module, runtime.units, runtime.device.torch.type),
            *(RootHooks(root, runtime.root, runtime) for root in _roots(self._module)),
            *CacheHooks.on(self._module, runtime.parts.spare.activations),
        ]

    @property
    def are_there(self) -> bool:
        """Whether the hooks are in the model: a script may have taken them out one by one."""
        return any(isinstance(hooks, RootHooks) and hooks.are_there for hooks in self.attached)

    def detach(self) -> None:
        """Take the hooks out of the model."""
        self._runtime.parts.spare.end_forward()
        for hooks in self.attached:
            hooks.remove()
        self.attached = []

    def close_left_open(self) -> None:
        """Close what a forward that an interrupt has ended has left open: torch calls no hook then."""
        for hooks in self.attached:
            if isinstance(hooks, BlockHooks | WideHooks):
                hooks.close_left_open()
