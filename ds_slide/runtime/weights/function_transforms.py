"""Refuses transforms of `torch.func` that cannot work with streamed weights.

`grad`, `vjp`, `jacrev` and `hessian` allow no hooks for saved tensors. Without hooks backward would find other weights
than the forward had. Under these and `jvp`, binding a parameter to its weights has ended the process (torch 2.13: a
segmentation fault). `vmap` alone is allowed, and so is forward mode by `torch.autograd.forward_ad`.
"""

from __future__ import annotations

import torch
from torch._C._functorch import TransformType, get_interpreter_stack

from ds_slide.errors import SlideError

_REFUSED = (TransformType.Grad, TransformType.Jvp)


def require_no_transform() -> None:
    """Raise SlideError inside of such a transform."""
    if not torch._C._are_functorch_transforms_active():
        return
    if any(interpreter.key() in _REFUSED for interpreter in get_interpreter_stack() or ()):
        raise SlideError(
            "torch.func.grad, vjp, jvp and what is made of them (jacrev, hessian, vmap of grad) cannot go through a "
            "model that DS-Slide streams, because its weights come and go; use torch.autograd.grad, with "
            "create_graph=True for second derivatives, or torch.autograd.forward_ad"
        )
