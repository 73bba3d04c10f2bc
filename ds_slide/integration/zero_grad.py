"""`engine.zero_grad()`: what has been accumulated since the last step is gone, and the step begins anew.

DeepSpeed's own empties `parameter.grad` alone, where ZeRO-3 keeps nothing, and goes on counting micro-batches.
"""

from __future__ import annotations

import logging
import weakref
from typing import Any

logger = logging.getLogger(__name__)


def attach(engine: Any) -> None:
    """Give `engine`, whose optimizer is a SlideZeroOptimizer, this `zero_grad`. An attribute of the object, not of the
    class."""
    engine.zero_grad = _ZeroGrad(engine)


class _ZeroGrad:
    def __init__(self, engine: Any) -> None:
        self._engine = weakref.ref(engine)  # not the engine itself, which would then own itself
        self._has_warned = False

    def __call__(self) -> None:
        """Drop the gradients of the micro-batches since the last step. SlideError where they have been applied."""
        engine: Any = self._engine()
        lost_already = engine.optimizer.runtime.interruptions.has_lost_gradients()
        engine.optimizer.zero_grad()
        micro_batches = _restart(engine)
        if micro_batches and not lost_already and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "engine.zero_grad() has dropped the gradients of %d micro-batches of a step of %d, which begins anew; "
                "call it between two steps only, if it was not meant to (stock ZeRO-3 keeps them)",
                micro_batches,
                engine.gradient_accumulation_steps(),
            )


def _restart(engine: Any) -> int:
    """Count the micro-batches of a step from the first one. -> how many had been counted."""
    counted: int
    if not engine.managed_gradient_accumulation():
        counted = engine._unmanaged_backward_count
        engine._unmanaged_backward_count = 0
        return counted
    if engine._is_gradient_accumulation_boundary is not None:  # the script counts
        return 0
    counted = engine.micro_steps % engine.gradient_accumulation_steps()
    engine.micro_steps -= counted
    return counted
