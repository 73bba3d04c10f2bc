"""Launches of kernels as operators for torch.compile, and as they are for eager code.

torch.compile and modes for dispatch take an operator for one call and do not look into it. The dispatch of one that
autograd can go back through costs the host 28 us more than an `autograd.Function` forward and 27 more backward, which
bounds small micro-batches: a block has four of them. So eager code gets such a function, around the same launches.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

Launch = Callable[..., Any]


class Operator:
    """`launch`, which writes to none of its inputs, the first of them a tensor; `name` and `schema` are those of the
    operator."""

    def __init__(self, name: str, schema: str, launch: Launch) -> None:
        self._operator = torch.library.custom_op(name, launch, mutates_args=(), schema=schema)
        self._eager = launch
        self.register_fake = self._operator.register_fake

    def register_autograd(self, gradient: Operator, formula: Callable[..., Any], setup_context: Launch) -> None:
        """Differentiate it, once: `formula` is called with the launch of `gradient`, the context and the gradients,
        `setup_context` with the context, the inputs and the output."""
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
                # With create_graph: the operator then refuses a second derivative, where a launch would give none.
                again = torch.is_grad_enabled()
                return formula(gradient._operator if again else gradient._eager, ctx, *gradients)

        self._eager = Eager.apply

    def __call__(self, *inputs: Any) -> Any:
        # Modes are told of operators (the plan's trace, fake tensors), and nothing can be launched on the meta device.
        looks = torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() or inputs[0].is_meta
        return self._operator(*inputs) if looks else self._eager(*inputs)


def operator(name: str, schema: str) -> Callable[[Launch], Operator]:
    """Make an operator of the decorated function."""
    return functools.partial(Operator, name, schema)
