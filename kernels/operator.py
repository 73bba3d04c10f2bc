"""Launches of kernels as operators for torch.compile, and as plain functions for eager code.

torch.compile and dispatch modes treat an operator as one call and do not look into it. The dispatch of a differentiable
operator costs the host 28 us more than an `autograd.Function` forward and 27 us more backward. A block has four of
them, which bounds small micro-batches. So eager code uses an `autograd.Function` around the same launches.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ds_slide.kernels.replay import Replayed

Launch = Callable[..., Any]


class Operator:
    """An operator around `launch`, which writes to none of its inputs. The first input is a tensor. `name`, `schema`:
    the name and schema of the operator."""

    def __init__(self, name: str, schema: str, launch: Launch) -> None:
        self._operator = torch.library.custom_op(name, launch, mutates_args=(), schema=schema)
        self.launch = launch
        self._eager: Launch = Replayed(launch)
        self.register_fake = self._operator.register_fake

    def register_autograd(self, gradient: Operator, formula: Callable[..., Any], setup_context: Launch) -> None:
        """Make the operator differentiable, once. `formula` is called with the launch of `gradient`, the context and
        the gradients. `setup_context` is called with the context, the inputs and the output."""
        self._operator.register_autograd(functools.partial(formula, gradient._operator), setup_context=setup_context)
        launch = self._eager

        class Eager(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, *inputs: Any) -> Any:
                output = launch(*inputs)
                setup_context(ctx, inputs, output)
                return output

            @staticmethod
            def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
                # With create_graph the operator refuses a second derivative, where a plain launch would give none.
                again = torch.is_grad_enabled()
                return formula(gradient._operator if again else gradient._eager, ctx, *gradients)

        self._eager = Eager.apply

    def __call__(self, *inputs: Any) -> Any:
        # Dispatch modes (the plan's trace, fake tensors) need operators, and the meta device cannot launch kernels.
        looks = torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() or inputs[0].is_meta
        return self._operator(*inputs) if looks else self._eager(*inputs)


def operator(name: str, schema: str) -> Callable[[Launch], Operator]:
    """Make an operator of the decorated function."""
    return functools.partial(Operator, name, schema)
