"""The living engines that train, and `nn.Module.zero_grad` while there is one.

A script empties gradients through whatever module it has at hand: the model, a wrapper around it, a part of it. All of
them call `nn.Module.zero_grad`, so that is replaced, once, from the first engine with the key to the end of the last.
Nothing is put into modules, which remain picklable and can be copied.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

from torch import nn

from ds_slide.integration import ownership, zero_grad

_living: weakref.WeakSet[Any] = weakref.WeakSet()
"""Their optimizers."""
_stock = nn.Module.zero_grad


def enter(optimizer: Any) -> None:
    """`optimizer`, a SlideZeroOptimizer with an engine, begins to train."""
    _living.add(optimizer)
    if nn.Module.zero_grad is _stock:
        nn.Module.zero_grad = _zero_grad  # type: ignore[method-assign]
    weakref.finalize(optimizer, _restore).atexit = False


def leave(optimizer: Any) -> None:
    """Forget `optimizer`; harmless when it has never entered, or left before."""
    _living.discard(optimizer)
    _restore()


def living() -> list[Any]:
    """Their optimizers."""
    return list(_living)


def _restore() -> None:
    # A script may have put a function of its own in place of ours: then ours stays below it, and finds no engine.
    if not living() and nn.Module.zero_grad is _zero_grad:
        nn.Module.zero_grad = _stock  # type: ignore[method-assign]


@functools.wraps(_stock)
def _zero_grad(self: nn.Module, set_to_none: bool = True) -> None:
    _stock(self, set_to_none)
    given: dict[Any, list[nn.Parameter]] = {}
    for parameter in self.parameters():
        owner = ownership.owner_of(parameter)
        if owner in _living:
            given.setdefault(owner, []).append(parameter)
    for optimizer, parameters in given.items():
        if (engine := optimizer.engine()) is not None:
            zero_grad.drop_some(engine, parameters, set_to_none=set_to_none)
