"""The only room that knows private names of DeepSpeed."""

import weakref
from typing import Any

STOCKS: weakref.WeakKeyDictionary[Any, weakref.ref[Any]] = weakref.WeakKeyDictionary()
"""Stock's stage-3 engines, by the models that have their hooks. They are noted here because nothing else of DS-Slide is
imported for an engine without the key."""


def stock_modules() -> list[Any]:
    """Return the models of stock's engines that are alive."""
    return [module for module, optimizer in STOCKS.items() if optimizer() is not None]
