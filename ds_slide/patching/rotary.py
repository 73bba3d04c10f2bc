"""Rotary position embedding: one object gets its own version of the function that its forward calls by name.

The forward of the class is copied with a globals dictionary that has our `apply_rotary_pos_emb`. Decorators around it
are copied too, if each holds the wrapped function in one closure cell. Otherwise the attention stays unchanged.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ds_slide.patching.kinds import Forward, ForwardPatch, gains_on, own_forward, replace_forward, say_unused

NAME = "apply_rotary_pos_emb"
Rotary = Callable[..., Any]


def patch_rotary(module: nn.Module, forwards: dict[Forward, Forward | str]) -> ForwardPatch | str | None:
    """Patch an attention whose forward calls a rotary function. `forwards`: the copy of every forward."""
    class_forward = getattr(type(module), "forward", None)
    inner = _innermost(class_forward)
    if inner is None or NAME not in inner.__code__.co_names or NAME not in inner.__globals__:
        return None
    if own_forward(module) is None:
        return f"the forward of a {type(module).__name__} was replaced before"
    assert class_forward is not None
    if class_forward not in forwards:
        forwards[class_forward] = _with_kernel(class_forward, inner, type(module).__name__)
    forward = forwards[class_forward]
    if isinstance(forward, str):
        return forward
    return replace_forward(module, "rope", lambda _: forward)


def _innermost(function: Any) -> types.FunctionType | None:
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function if isinstance(function, types.FunctionType) else None


def _with_kernel(forward: Any, inner: types.FunctionType, name: str) -> Forward | str:
    original = inner.__globals__[NAME]
    partial = find_rotary_form(original)
    if isinstance(partial, str):
        return partial
    scope = {**inner.__globals__, NAME: kernel_rotary(original, partial=partial)}
    # torch.compile takes globals of a scope with a `__name__` from that module: it would find the original there.
    if "__name__" not in inner.__code__.co_names:
        del scope["__name__"]
    copied = _copy(inner, scope, inner.__closure__)
    return _rewrapped(forward, inner, copied, name)


def _rewrapped(function: Any, inner: types.FunctionType, copied: Forward, name: str) -> Forward | str:
    """Return a copy of `function`, a chain of wrappers around `inner`, that wraps `copied`."""
    if function is inner:
        return copied
    within = _rewrapped(function.__wrapped__, inner, copied, name)
    if isinstance(within, str):
        return within
    closure = function.__closure__ if isinstance(function, types.FunctionType) else None
    cells = [cell for cell in closure or () if _contents(cell) is function.__wrapped__]
    if closure is None or len(cells) != 1:
        return f"the forward of {name} has a decorator that cannot be copied"
    replaced = tuple(types.CellType(within) if cell is cells[0] else cell for cell in closure)
    wrapper = _copy(function, function.__globals__, replaced)
    wrapper.__dict__["__wrapped__"] = within
    return wrapper


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # an empty cell
        return None


def _copy(function: types.FunctionType, scope: dict[str, Any], closure: Any) -> types.FunctionType:
    copied = types.FunctionType(function.__code__, scope, function.__name__, function.__defaults__, closure)
    copied.__kwdefaults__ = function.__kwdefaults__
    copied.__dict__.update(function.__dict__)
    copied.__module__, copied.__qualname__, copied.__doc__ = (
        function.__module__,
        function.__qualname__,
        function.__doc__,
    )
    copied.__annotations__ = function.__annotations__
    return copied


def find_rotary_form(rotary: Rotary) -> bool | str:
    """Return whether `rotary(q, k, cos, sin)` takes cos and sin that are narrower than the heads, and rotates only the
    first dimensions then. Return a reason where it does not rotate halves."""
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")

    agree = []
    for width, batch in ((16, 1), (16, 2), (8, 1)):
        q, k = random(2, 4, 5, 16), random(2, 2, 5, 16)
        # Models make them in this form: the two halves are the same angles.
        cos, sin = (random(batch, 5, width // 2).repeat(1, 1, 2) for _ in range(2))
        try:
            with torch.no_grad():
                found = rotary(q, k, cos, sin)
            expected = (_rotate(q, cos, sin), _rotate(k, cos, sin))
            agree.append(all(torch.allclose(f, e, rtol=1e-9, atol=1e-9) for f, e in zip(found, expected, strict=True)))
        except Exception:  # a function that refuses these shapes is simply not of this form for them
            agree.append(False)
    if not (agree[0] and agree[1]):
        return f"{NAME} of {getattr(rotary, '__module__', 'an unknown module')} does not rotate halves"
    return agree[2]


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    width = cos.shape[-1]
    first, second = x[..., : width // 2], x[..., width // 2 : width]
    turned = torch.cat((-second, first), dim=-1)
    return torch.cat((x[..., :width] * cos.unsqueeze(1) + turned * sin.unsqueeze(1), x[..., width:]), dim=-1)


def kernel_rotary(original: Rotary, *, partial: bool) -> Rotary:
    """Return `original` with the kernel where it applies (see `_fits`); for other arguments the original runs."""
    from ds_slide.kernels.rope.rotary import rope

    def apply_rotary_pos_emb(q: Any, k: Any, cos: Any, sin: Any, *args: Any, **kwargs: Any) -> Any:
        if not args and (not kwargs or _only_defaults(kwargs)) and _fits(q, k, cos, sin, partial=partial):
            return rope(q, k, cos, sin)
        if gains_on(q, 2):
            more = len(args) + len(kwargs)
            say_unused("rope", f"q is {q.dtype}, cos {cos.dtype} with {cos.shape[-1]} columns, {more} more arguments")
        return original(q, k, cos, sin, *args, **kwargs)

    return apply_rotary_pos_emb


def _only_defaults(kwargs: dict[str, Any]) -> bool:
    # Older versions have a `position_ids` that they do not read.
    return all((name == "unsqueeze_dim" and value == 1) or value is None for name, value in kwargs.items())


def _fits(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, partial: bool) -> bool:
    """q [b, hq, s, d], k [b, hk, s, d], cos and sin [1 or b, s, r], all of one dtype; no gradient for the angles.
    `partial`: r may be below d."""
    if q.dim() != 4 or k.dim() != 4 or cos.dim() != 3 or cos.shape != sin.shape or not gains_on(q, 2):
        return False
    if not (q.dtype == k.dtype == cos.dtype == sin.dtype) or cos.requires_grad or sin.requires_grad:
        return False
    batch, _, length, size = q.shape
    if (k.shape[0], k.shape[2], k.shape[3]) != (batch, length, size):
        return False
    width = cos.shape[2]
    fits = cos.shape[0] in (1, batch) and cos.shape[1] == length and width % 2 == 0
    return fits and (width == size or (partial and width < size))
