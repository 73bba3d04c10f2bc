"""`engine.backward` in which an operator that finds no GPU memory runs again (`ds_slide.runtime.memory.retries`).

A script that calls `loss.backward()` is not seen before its backward has begun, when it is too late.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any


def attach(engine: Any) -> None:
    """Give `engine`, whose optimizer is a SlideZeroOptimizer, such a backward. An attribute of the object, not of the
    class."""
    found = weakref.ref(engine)  # not the engine itself, which would then own itself
    backward = type(engine).backward

    @functools.wraps(backward)
    def retrying(*args: Any, **kwargs: Any) -> Any:
        engine: Any = found()
        with engine.optimizer.runtime.parts.spare.around_backward():
            return backward(engine, *args, **kwargs)

    engine.backward = retrying
