"""Which kernels are wanted, and where they can run."""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import nn

from ds_slide.config.schema import KernelKind
from ds_slide.errors import SlideConfigError
from ds_slide.kernels.dtypes import KERNEL_DTYPES

logger = logging.getLogger(__name__)

KINDS: tuple[KernelKind, ...] = get_args(KernelKind)
Which = Literal["auto", "off"] | Sequence[KernelKind]


def interprets() -> bool:
    """Whether Triton's interpreter runs the kernels, which then take CPU tensors."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def runs_on(tensor: torch.Tensor) -> bool:
    """Whether the kernels take `tensor`: on a GPU (or interpreted) and in bf16, fp16 or fp32. A model is planned on the
    meta device, where the kernels' operators give the same shapes as on a GPU."""
    return tensor.dtype in KERNEL_DTYPES and (tensor.is_cuda or tensor.is_meta or interprets())


def gains_on(tensor: torch.Tensor, length_dimension: int = 1) -> bool:
    """Whether the kernels take `tensor` and are not slower than the operations that they replace."""
    return runs_on(tensor) and not is_one_token(tensor, length_dimension)


def is_one_token(tensor: torch.Tensor, length_dimension: int = 1) -> bool:
    """Whether `tensor` is on a GPU, has one token of each sequence, and needs no gradient: a step of generation.

    The GPU then waits for the host, and a Triton launch from Python costs the host more than the module's own few
    operations: with the kernels, generation of a 1.5 B model took 42 ms a token on an H200, without them 37 ms. The
    length counts, not the size: re-entrant checkpointing runs a training forward without gradients, too, and its
    recomputation must compute the same.
    """
    # The tensor is [batch, length, width], or has heads; a norm of heads may have them before or after the length.
    dimensions = 3 if length_dimension == 1 else 4
    if not tensor.is_cuda or torch.is_grad_enabled() or tensor.dim() != dimensions:
        return False
    return tensor.shape[length_dimension] == 1


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """Return the data type that autocast computes in; None where it is off or unknown (on the meta device)."""
    if not torch.amp.is_autocast_available(device_type) or not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)


def autocasts_to_fp32(tensor: torch.Tensor) -> bool:
    """Whether autocast is on and would widen `tensor` for an operation of its fp32 list."""
    return tensor.dtype != torch.float32 and autocast_dtype(tensor.device.type) is not None


@functools.cache
def say_unused(kind: str, why: str) -> None:
    """Log, once for each reason, that a replaced module runs its original for the arguments of a call."""
    logger.warning("the kernel of kind %s is not used: %s", kind, why)


def resolve_kinds(which: Which, device_type: str | None = None) -> tuple[KernelKind, ...]:
    """Return the kinds that `which` means on `device_type`: "cuda" (AMD too) or "cpu"; None: the device that torch
    sees.

    "auto" means every kind on a GPU with Triton and none elsewhere, which is logged. Raises SlideConfigError for an
    unknown kind, and for a list of kinds where the kernels cannot run.
    """
    if which == "off":
        return ()
    if device_type is None:
        device_type = "cuda" if torch.cuda.is_available() else "cpu"
    obstacle = _obstacle(device_type)
    if which == "auto":
        # The interpreter runs the kernels a thousand times slower: it does so only where the JSON names them.
        if obstacle is None and device_type != "cuda":
            obstacle = "there is no GPU"
        if obstacle is not None:
            logger.debug("ds_slide.kernels is auto and no kernel is used: %s", obstacle)
            return ()
        return KINDS
    if isinstance(which, str):
        raise SlideConfigError(f'kernels is "{which}"; expected "auto", "off" or a list out of {", ".join(KINDS)}')
    for kind in which:
        if kind not in KINDS:
            raise SlideConfigError(f'kernels names "{kind}"; the kinds are {", ".join(KINDS)}')
    if which and obstacle is not None:
        raise SlideConfigError(
            f'ds_slide.kernels asks for {", ".join(which)}, but {obstacle}; set ds_slide.kernels to "auto" or "off"'
        )
    return tuple(kind for kind in KINDS if kind in which)


def _obstacle(device_type: str) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if device_type != "cuda" and not interprets():
        return "there is no GPU"
    return None


# ----------------------------------------------------------------------------------------------------------------------
# Replacing the forward of one module object, and taking it back.

Forward = Callable[..., Any]
_MARK = "_slide_kernel"


def own_forward(module: nn.Module) -> Forward | None:
    """Return the forward of the module's class; None where the object has another one (from accelerate's hook, say)."""
    return None if "forward" in module.__dict__ else type(module).forward


def replaced_kind(module: nn.Module) -> str | None:
    """Return the kind of the kernel in the module's forward; None where the forward is not ours."""
    return getattr(module.__dict__.get("forward"), _MARK, None)


@dataclass(frozen=True)
class ForwardPatch:
    """A forward that replaces the forward of `module`."""

    module: nn.Module
    function: Forward
    before: Any
    """The attribute of the object that was there before; None where there was none."""

    def undo(self) -> None:
        current = self.module.__dict__.get("forward")
        if getattr(current, "__func__", None) is not self.function:
            # Other code has wrapped ours meanwhile (accelerate does): the wrapper must stay, and ours calls the
            # original.
            setattr(self.function, _MARK, None)
        elif self.before is None:
            del self.module.__dict__["forward"]
        else:
            self.module.__dict__["forward"] = self.before


def replace_forward(module: nn.Module, kind: str, build: Callable[[Forward], Forward]) -> ForwardPatch:
    """Give `module` the forward `build(original)`; both are functions whose first argument is the module.

    It is a bound method, because a deep copy of the model binds it to the copied module.
    """
    before = module.__dict__.get("forward")
    original: Forward = type(module).forward if before is None else _unbound(before)
    replacement = build(original)

    @functools.wraps(original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if getattr(forward, _MARK) is not None:
            return replacement(self, *args, **kwargs)
        return original(self, *args, **kwargs)

    setattr(forward, _MARK, kind)
    module.__dict__["forward"] = types.MethodType(forward, module)
    return ForwardPatch(module, forward, before)


def _unbound(forward: Any) -> Forward:
    function = getattr(forward, "__func__", None)
    if function is not None:
        return function
    return lambda _, *args, **kwargs: forward(*args, **kwargs)


def plain_attributes(module: nn.Module) -> tuple[tuple[str, Any], ...]:
    """Return the numbers, flags and names in the object. Its behaviour can depend on them and on its class."""
    return tuple(
        sorted(
            (name, value)
            for name, value in module.__dict__.items()
            if name != "training" and isinstance(value, int | float | bool | str | None)
        )
    )


def random_linear(inside: int, outside: int, generator: torch.Generator) -> nn.Linear:
    """Return a linear layer in fp64 on the CPU, frozen, with which the forward of a class is tried."""
    linear = nn.Linear(inside, outside, device="meta")
    for name, shape in (("weight", (outside, inside)), ("bias", (outside,))):
        value = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
        linear._parameters[name] = nn.Parameter(value, requires_grad=False)
    return linear
