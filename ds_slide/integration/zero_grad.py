"""`engine.zero_grad()`: stock's, and after an exception the way to begin the step anew.

Under ZeRO-3 DeepSpeed's own empties `parameter.grad`, where nothing is kept, and leaves the sum of the micro-batches
alone; scripts that call it before every micro-batch train all the same. So it does here, except where an exception has
spoilt that sum: then the sum goes, and the step begins with its first micro-batch.
"""

from __future__ import annotations

import weakref
from typing import Any


def attach(engine: Any) -> None:
    """Give `engine`, whose optimizer is a SlideZeroOptimizer, this `zero_grad`. An attribute of the object, not of the
    class."""
    engine.zero_grad = _ZeroGrad(engine)


class _ZeroGrad:
    def __init__(self, engine: Any) -> None:
        self._engine = weakref.ref(engine)  # not the engine itself, which would then own itself

    def __call__(self) -> None:
        """Empty `parameter.grad`; drop the sum of the micro-batches since the last step where an exception has spoilt
        it. SlideError where weights have been updated from it."""
        engine: Any = self._engine()
        for parameter in engine.module.parameters():
            parameter.grad = None
        if engine.optimizer.runtime.interruptions.has_lost_gradients():
            engine.optimizer.zero_grad()
            _restart(engine)


def _restart(engine: Any) -> None:
    """Count the micro-batches of a step from the first one, where the script does not count them itself."""
    if not engine.managed_gradient_accumulation():
        engine._unmanaged_backward_count = 0
    elif engine._is_gradient_accumulation_boundary is None:
        engine.micro_steps -= engine.micro_steps % engine.gradient_accumulation_steps()
