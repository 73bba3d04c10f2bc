"""The same tensor behind an autograd node of its own."""

from __future__ import annotations

from typing import Any

import torch


class _Identity(torch.autograd.Function):
    """No view: what a script does to a view in place leaves out the node of that view, with the hooks on it."""

    generate_vmap_rule = True

    @staticmethod
    def forward(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(_ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient

    @staticmethod
    def jvp(_ctx: Any, tangent: torch.Tensor) -> torch.Tensor:
        return tangent.view_as(tangent)


def identity(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor` behind a node of its own, on the same memory and with the same version counter."""
    made: torch.Tensor = _Identity.apply(tensor)
    return made
