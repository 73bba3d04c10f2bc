"""DS-Slide's methods around an engine's gradients: `zero_grad`, the prologue of a backward, and `backward`.

Every `zero_grad` drops the gradients that DS-Slide holds, as in plain torch.

`parameter.grad` is empty after a backward, because its gradient waits elsewhere for the step. So `engine.zero_grad()`
and `zero_grad` of the model, a wrapper, a submodule or the client's optimizer drop the waiting gradients. Micro-batches
of an accumulation under way stay: scripts call `engine.zero_grad()` before each of them, and DeepSpeed keeps them.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ds_slide.runtime.core.calls import NO_TASK, graph_task


def attach(engine: Any) -> None:
    """Give `engine`, whose optimizer is a SlideZeroOptimizer, and the client's optimizer this `zero_grad`. The engine
    also gets a prologue and a `backward`. All are attributes of the objects, not of their classes; modules get their
    `zero_grad` from `ownership`."""
    # Not the engine itself, which would then own itself.
    engine.optimizer.engine = reference = weakref.ref(engine)
    engine.zero_grad = _ZeroGrad(reference)
    client = engine.optimizer.optimizer
    client.zero_grad = _ClientZeroGrad(reference, type(client).zero_grad, weakref.ref(client))
    _attach_prologue(engine)
    _attach_retries(engine)


def detach(client: Any) -> None:
    """Give the client's optimizer its own `zero_grad` back."""
    if isinstance(vars(client).get("zero_grad"), _ClientZeroGrad):
        del client.zero_grad


class _ZeroGrad:
    """`engine.zero_grad()`."""

    def __init__(self, engine: weakref.ref[Any]) -> None:
        self._engine = engine

    def __call__(self) -> None:
        engine: Any = self._engine()
        for parameter in engine.module.parameters():
            parameter.grad = None
        drop_all(engine)


class _ClientZeroGrad:
    """`zero_grad` of the optimizer that was given to `deepspeed.initialize`, whose groups DeepSpeed has emptied."""

    def __init__(self, engine: weakref.ref[Any], original: Any, client: weakref.ref[Any]) -> None:
        self._engine, self._original, self._client = engine, original, client

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self._original(self._client(), *args, **kwargs)
        if (engine := self._engine()) is not None:
            drop_all(engine)


def drop_all(engine: Any) -> None:
    """Drop all gradients since the last step, except micro-batches of an accumulation under way. A sum that an
    exception has spoilt is dropped, too; the step then begins with its first micro-batch. SlideError where weights have
    been updated from these gradients."""
    if engine.optimizer.runtime.interruptions.has_lost_gradients():
        engine.optimizer.zero_grad()
        _restart(engine)
    elif not _is_accumulating(engine):
        engine.optimizer.zero_grad()


def _is_accumulating(engine: Any) -> bool:
    accumulation = engine.optimizer.runtime.accumulation
    if not accumulation.micro_batches:
        return False
    if engine.managed_gradient_accumulation() and engine._is_gradient_accumulation_boundary is None:
        # A backward without an engine.step() after it, as in an evaluation, is no micro-batch of the accumulation.
        return bool(engine.micro_steps % engine.gradient_accumulation_steps())
    return not accumulation.ended_at_boundary


def _restart(engine: Any) -> None:
    """Count the micro-batches of a step from the first one, where the script does not count them itself."""
    if not engine.managed_gradient_accumulation():
        engine._unmanaged_backward_count = 0
    elif engine._is_gradient_accumulation_boundary is None:
        engine.micro_steps -= engine.micro_steps % engine.gradient_accumulation_steps()


def drop_some(engine: Any, parameters: Sequence[nn.Parameter], *, set_to_none: bool) -> None:
    """Drop the gradients of some of the model's parameters in the same way."""
    runtime = engine.optimizer.runtime
    given = {id(parameter) for parameter in parameters}
    if all(id(parameter) in given for unit in runtime.units for parameter, _ in unit.trainable):
        drop_all(engine)
    elif not _is_accumulating(engine):
        runtime.access.drop_gradients(given, to_none=set_to_none)


# ----------------------------------------------------------------------------------------------------------------------
# DeepSpeed's prologue of a backward, and its division by the number of micro-batches, for each output of the model.
#
# DeepSpeed puts both on the outputs of `engine.forward`, only in tuples, lists and dictionaries, and calls the prologue
# for the first backward of a forward only. Here the runtime's hooks on the outputs do both. They also work in
# dataclasses, after `engine.module(x)`, and in each further backward of one forward.


def _attach_prologue(engine: Any) -> None:
    prologue = _Prologue(engine)
    engine._backward_prologue = prologue
    engine._backward_prologue_per_tensor = _unchanged
    engine.optimizer.runtime.prologue = prologue


def _unchanged(gradient: torch.Tensor) -> torch.Tensor:
    """Return `gradient`. DeepSpeed's hook on an output calls this, but the runtime's hook on the output divides."""
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


# ----------------------------------------------------------------------------------------------------------------------
# `engine.backward`: an operator that finds no GPU memory runs again (`ds_slide.runtime.memory.shortage`).
#
# `loss.backward()` of a script is noticed only when its backward has begun, which is too late.


def _attach_retries(engine: Any) -> None:
    found = weakref.ref(engine)  # not the engine itself, which would then own itself
    backward = type(engine).backward

    @functools.wraps(backward)
    def retrying(*args: Any, **kwargs: Any) -> Any:
        engine: Any = found()
        with engine.optimizer.runtime.parts.spare.around_backward():
            return backward(engine, *args, **kwargs)

    engine.backward = retrying
