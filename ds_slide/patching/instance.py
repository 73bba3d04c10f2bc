"""Replacing the forward of one module object, and taking it back."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

Forward = Callable[..., Any]
_MARK = "_slide_kernel"


def own_forward(module: nn.Module) -> Forward | None:
    """The forward of the module's class; None where the object has another one (by a hook of accelerate, say)."""
    return None if "forward" in module.__dict__ else type(module).forward


def replaced_kind(module: nn.Module) -> str | None:
    """The kind of the kernel in the module's forward; None where the forward is not one of ours."""
    return getattr(module.__dict__.get("forward"), _MARK, None)


@dataclass(frozen=True)
class ForwardPatch:
    """A forward in the place of the one that `module` had."""

    module: nn.Module
    function: Forward
    before: Any
    """The attribute of the object that was there before; None where there was none."""

    def undo(self) -> None:
        current = self.module.__dict__.get("forward")
        if getattr(current, "__func__", None) is not self.function:
            # Somebody has wrapped ours meanwhile (accelerate does): theirs must stay, and ours calls the original.
            setattr(self.function, _MARK, None)
        elif self.before is None:
            del self.module.__dict__["forward"]
        else:
            self.module.__dict__["forward"] = self.before


def replace_forward(module: nn.Module, kind: str, build: Callable[[Forward], Forward]) -> ForwardPatch:
    """Give `module` the forward `build(original)`; both are functions whose first argument is the module.

    A bound method, because a deep copy of the model binds it to the copied module.
    """
    before = module.__dict__.get("forward")
    original: Forward = type(module).forward if before is None else _unbound(before)
    replacement = build(original)

    @functools.wraps(original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if getattr(forward, _MARK) is not None:
            return replacement(self, *args, **kwargs)
        return original(self, *args, **kwargs)

    setattr(forward, _MARK, kind)
    module.__dict__["forward"] = types.MethodType(forward, module)
    return ForwardPatch(module, forward, before)


def _unbound(forward: Any) -> Forward:
    function = getattr(forward, "__func__", None)
    if function is not None:
        return function
    return lambda _, *args, **kwargs: forward(*args, **kwargs)


def plain_attributes(module: nn.Module) -> tuple[tuple[str, Any], ...]:
    """Numbers, flags and names that the object carries: with its class, what its behaviour can depend on."""
    return tuple(
        sorted(
            (name, value)
            for name, value in module.__dict__.items()
            if name != "training" and isinstance(value, int | float | bool | str | None)
        )
    )
