"""DeepSpeed's prologue of a backward, and its division by the number of micro-batches, for each output of the model.

DeepSpeed hangs both on the outputs of `engine.forward`, where it looks into tuples, lists and dictionaries, and calls
the prologue for the first backward of a forward only. Here the runtime's hooks on the outputs do both. They are there
in dataclasses, too, after `engine.module(x)`, and in each further backward of one forward.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from ds_slide.runtime.core.calls import NO_TASK, graph_task


def attach(engine: Any) -> None:
    """Give `engine`, whose optimizer is a SlideZeroOptimizer, these hooks. Attributes of the object, not of the
    class."""
    prologue = _Prologue(engine)
    engine._backward_prologue = prologue
    engine._backward_prologue_per_tensor = _unchanged
    engine.optimizer.runtime.prologue = prologue


def _unchanged(gradient: torch.Tensor) -> torch.Tensor:
    """What DeepSpeed's own hook on an output calls: the runtime's hook on the same output divides."""
    return gradient


class _Prologue:
    """DeepSpeed's prologue, once in each backward."""

    def __init__(self, engine: Any) -> None:
        self._engine = weakref.ref(engine)  # not the engine itself, which would then own itself
        self._task = NO_TASK

    def __call__(self) -> None:
        task = graph_task()
        if task == self._task != NO_TASK:
            return
        engine: Any = self._engine()
        type(engine)._backward_prologue(engine)
        self._task = task

    def on_output_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        """Begin the backward, and divide `gradient` where the script has not called `engine.backward`."""
        self()
        engine: Any = self._engine()
        divided: torch.Tensor = type(engine)._backward_prologue_per_tensor(engine, gradient)
        return divided
