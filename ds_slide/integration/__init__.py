"""The only room that knows private names of DeepSpeed."""

import weakref
from typing import Any

STOCKS: weakref.WeakKeyDictionary[Any, weakref.ref[Any]] = weakref.WeakKeyDictionary()
"""Stock's stage-3 engines, by the models that have their hooks. Here, because they are noted without the key, when
nothing else of DS-Slide is imported."""


def stock_modules() -> list[Any]:
    """The models of stock's engines that are alive."""
    return [module for module, optimizer in STOCKS.items() if optimizer() is not None]
