"""Pending logits: a tensor of the logits' shape that remembers how to compute them when an operation needs the numbers.

The loss kernel works from the head's input, so a training forward need not make the logits, its largest tensor. Steps
of the model on the way to the loss (a cast, a soft cap) are noted. Any other operation first computes the logits,
through the head as a module, and runs on real numbers with a real graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import nn

from ds_slide.errors import SlideError
from ds_slide.patching.kinds import autocast_dtype
from ds_slide.patching.rows import weight_version

HINT = 'call model.eval() before, or leave "loss" out of ds_slide.kernels'
_METADATA = {
    getattr(torch.Tensor, name).__get__
    for name in ("shape", "dtype", "device", "ndim", "layout", "is_cuda", "is_cpu", "is_meta", "is_sparse")
} | {
    torch.Tensor.size,
    torch.Tensor.dim,
    torch.Tensor.ndimension,
    torch.Tensor.numel,
    torch.Tensor.nelement,
    torch.Tensor.element_size,
    torch.Tensor.is_floating_point,
    torch.Tensor.is_complex,
    torch.Tensor.get_device,
    torch.Tensor.__len__,
    torch.is_tensor,
    torch.is_floating_point,
    torch.is_complex,
    torch.numel,
}
_REQUIRES_GRAD, _GRAD_FN = (getattr(torch.Tensor, name).__get__ for name in ("requires_grad", "grad_fn"))
_DIVIDE = {torch.Tensor.__truediv__, torch.Tensor.div, torch.Tensor.true_divide, torch.div, torch.true_divide}
_TANH = {torch.Tensor.tanh, torch.tanh}
_MULTIPLY = {torch.Tensor.__mul__, torch.Tensor.__rmul__, torch.Tensor.mul, torch.mul}
_CASTS = {
    torch.Tensor.float: torch.float32,
    torch.Tensor.bfloat16: torch.bfloat16,
    torch.Tensor.half: torch.float16,
    torch.Tensor.double: torch.float64,
}

Step = tuple[str, Any]
"""("/", number), ("tanh", None), ("*", number) or ("to", dtype)."""


class HeadCall:
    """One call of the head: the source of logits. All tensors that derive from it share it."""

    def __init__(self, head: nn.Module, hidden: torch.Tensor) -> None:
        self.head = head
        self.hidden: torch.Tensor | None = hidden
        self.with_gradient = torch.is_grad_enabled()
        self.graph = self.with_gradient and (
            hidden.requires_grad or any(parameter.requires_grad for parameter in head.parameters())
        )
        self.was_read = False
        """Whether other code has the numbers. It may have written to them, so the loss must be computed from them."""
        self._weight_version = weight_version(head)
        self._autocast = autocast_dtype(hidden.device.type)
        self._device_type = hidden.device.type
        self._logits: torch.Tensor | None = None

    @contextmanager
    def modes(self) -> Iterator[None]:
        """Restore the modes of gradients and autocast from the model's call of its head."""
        dtype = self._autocast
        as_before: AbstractContextManager[object] = nullcontext()
        if torch.amp.is_autocast_available(self._device_type):
            as_before = torch.autocast(self._device_type, dtype, enabled=dtype is not None)
        with torch.set_grad_enabled(self.with_gradient), as_before:
            yield

    def expire(self) -> None:
        """Let the weights change: what was not computed cannot be computed any more."""
        self.hidden = self._logits = None

    def logits(self) -> torch.Tensor:
        """The head's output, computed once, by a call of the module."""
        self.was_read = True
        if self._logits is not None:
            return self._logits
        if self.hidden is None:
            raise SlideError(f"the logits of this forward are gone, its backward has begun: read them before, {HINT}")
        if weight_version(self.head) != self._weight_version:
            raise SlideError(f"the logits are not kept and the head was updated: read them before the step, {HINT}")
        with self.modes():
            self._logits = nn.Module.__call__(self.head, self.hidden)
        return self._logits


class PendingLogits(torch.Tensor):
    """The logits of `source` after `steps`. Shape, dtype and device are the true ones; there is no memory behind it.

    `requires_grad` and `grad_fn` say what the true logits would say. Hooks are kept for them.
    """

    source: HeadCall
    steps: tuple[Step, ...]
    hooks: list[Callable[[torch.Tensor], Any]]
    made: torch.Tensor | None

    @staticmethod
    def __new__(
        cls: type[PendingLogits],
        source: HeadCall,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        steps: tuple[Step, ...] = (),
    ) -> PendingLogits:
        tensor: PendingLogits = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        tensor.source, tensor.steps, tensor.hooks, tensor.made = source, steps, [], None
        return tensor

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"PendingLogits(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device}, steps={self.steps})"

    def materialise(self) -> torch.Tensor:
        """Return the numbers, computed once. Raises SlideError when the weights that they need are gone."""
        if self.made is not None:
            return self.made
        logits = self.source.logits()
        with self.source.modes():
            for name, value in self.steps:
                if name == "to":
                    logits = logits.to(value)
                else:
                    logits = logits / value if name == "/" else logits * value if name == "*" else torch.tanh(logits)
        if self.hooks and logits.requires_grad:
            # The loss may have been computed from the logits themselves, and the hooks must not see its gradient.
            logits = identity(logits)
            for hook in self.hooks:
                logits.register_hook(hook)
        self.made = logits
        return logits

    def softcap(self) -> float | Literal[False] | None:
        """Return the cap c of c * tanh(x / c); None where all steps are casts; False for any other chain of steps."""
        steps = [step for step in self.steps if step[0] != "to"]
        if not steps:
            return None
        if [name for name, _ in steps] == ["/", "tanh", "*"] and steps[0][1] == steps[2][1] > 0:
            return float(steps[0][1])
        return False

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **kwargs)
        if args and isinstance(args[0], PendingLogits) and args[0].made is None:
            noted = args[0]._note(function, args[1:], kwargs)
            if noted is not None:
                return noted[0]
        return function(*_numbers(args), **_numbers(kwargs))

    def _note(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any] | None:
        """Return the result of `function` without the numbers, in a tuple; None where it needs them."""
        number = args[0] if len(args) == 1 and not kwargs and isinstance(args[0], int | float) else None
        if function in _DIVIDE and number is not None:
            return (self._after(("/", number)),)
        if function in _MULTIPLY and number is not None:
            return (self._after(("*", number)),)
        if function in _TANH and not args and not kwargs:
            return (self._after(("tanh", None)),)
        if function in _CASTS and not args and not kwargs:
            return (self._after(("to", _CASTS[function])),)
        if function is torch.Tensor.to and len(args) == 1 and not kwargs and isinstance(args[0], torch.dtype):
            return (self._after(("to", args[0])),)
        if function == _REQUIRES_GRAD:  # descriptors make a new, equal, method for every read
            return (self.source.graph,)
        if function == _GRAD_FN:
            hidden = self.source.hidden
            if not self.source.graph or hidden is None:
                return (None,)
            # The logits' node does not exist yet; the node before it tells whether there is a graph.
            return (hidden.grad_fn,) if hidden.grad_fn is not None else None
        if function is torch.Tensor.register_hook and len(args) == 1 and not kwargs and self.made is None:
            self.hooks.append(args[0])
            return (_Handle(self.hooks, args[0]),)
        return None

    def _after(self, step: Step) -> PendingLogits:
        dtype = step[1] if step[0] == "to" else self.dtype
        return PendingLogits(self.source, tuple(self.shape), dtype, self.device, (*self.steps, step))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Autograd has already passed here, with a tensor that has no graph.
        if torch.is_grad_enabled():
            raise SlideError(f"{function} reached logits that were never computed: detach them first, {HINT}")
        return function(*_numbers(args), **_numbers(kwargs or {}))


class _Handle:
    def __init__(self, hooks: list[Any], hook: Any) -> None:
        self._hooks, self._hook = hooks, hook

    def remove(self) -> None:
        if self._hook in self._hooks:
            self._hooks.remove(self._hook)


def _numbers(value: Any) -> Any:
    """Return `value` with every pending tensor in it computed."""
    if isinstance(value, PendingLogits):
        return value.materialise()
    if isinstance(value, dict):
        return {key: _numbers(item) for key, item in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_numbers(item) for item in value)
    return value


# ----------------------------------------------------------------------------------------------------------------------
# The same tensor after an autograd node of its own.


class _Identity(torch.autograd.Function):
    """Returns its input without making a view: an in-place operation on a view skips the view's node and its hooks."""

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
    """Return `tensor` after a node of its own, on the same memory and with the same version counter."""
    made: torch.Tensor = _Identity.apply(tensor)
    return made
