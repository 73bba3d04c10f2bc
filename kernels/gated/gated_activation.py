"""Gated activations, activation(gate) * up (SwiGLU, GeGLU), forward and backward in one pass each.

Bytes of an element (bf16): forward reads 4 and writes 2; backward reads 6 and writes 4, and saves only gate and up.

Arithmetic: fp32 inside (fp64 for fp64 inputs). The forward rounds activation(gate) to the dtype before it multiplies,
like eager torch. The two fp32 activations may differ by a few units in their last place, because exp and division are
the fast ones. gelu_tanh is more exact here: 1 + tanh(u) cancels for negative u, and 2 sigmoid(2 u), which is used, does
not. So the values equal eager's unless the two activations fall on different sides of a rounding boundary. The gradient
of up multiplies with the same rounded activation. The gradient of gate is rounded once (eager: twice).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ds_slide.errors import SlideConfigError, SlideError
from ds_slide.kernels.operator import operator
from ds_slide.kernels.replay import start

# Each thread of four warps has eight elements: one 16-byte load of each bf16 input.
BLOCK = 1024
ACTIVATIONS = ("silu", "gelu", "gelu_tanh")
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)

SQRT_HALF = tl.constexpr(0.7071067811865476)
INV_SQRT_2PI = tl.constexpr(0.3989422804014327)
TWO_SQRT_2_OVER_PI = tl.constexpr(1.5957691216057308)
CUBIC = tl.constexpr(0.044715)


@triton.jit
def _place(column_blocks, columns, BLOCK: tl.constexpr):
    """Return row, columns and mask of this program in int64, because rows * columns may pass 2^31."""
    program = tl.program_id(0).to(tl.int64)
    row = program // column_blocks
    column = (program % column_blocks) * BLOCK + tl.arange(0, BLOCK)
    return row, column, column < columns


@triton.jit
def _activate(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == "silu":
        return x / (1.0 + tl.exp(-x))
    elif ACTIVATION == "gelu_tanh":
        # (1 + tanh(u)) / 2 = 1 / (1 + exp(-2 u)). exp may overflow to infinity, and x / infinity is the limit.
        return x / (1.0 + tl.exp(-TWO_SQRT_2_OVER_PI * (x + CUBIC * x * x * x)))
    else:
        return x * 0.5 * (1.0 + tl.erf(x * SQRT_HALF))


@triton.jit
def _sigmoid_pair(x):
    """Return sigmoid(x) and 1 - sigmoid(x), both with full relative accuracy and without overflow."""
    small_exp = tl.exp(-tl.abs(x))
    large = 1.0 / (1.0 + small_exp)
    small = small_exp * large
    return tl.where(x >= 0, large, small), tl.where(x >= 0, small, large)


@triton.jit
def _activate_with_slope(x, ACTIVATION: tl.constexpr):
    """Return the activation and its derivative."""
    if ACTIVATION == "silu":
        probability, rest = _sigmoid_pair(x)
        slope = probability * (1.0 + x * rest)
    elif ACTIVATION == "gelu_tanh":
        # Past 30 both values are at their limits. The bound is needed: infinity times a probability of zero is nan.
        square = tl.where(tl.abs(x) < 30.0, x * x, 900.0)
        probability, rest = _sigmoid_pair(TWO_SQRT_2_OVER_PI * (x + CUBIC * square * x))
        slope = probability * (1.0 + x * rest * TWO_SQRT_2_OVER_PI * (1.0 + 3.0 * CUBIC * square))
    else:
        probability = 0.5 * (1.0 + tl.erf(x * SQRT_HALF))
        slope = probability + x * INV_SQRT_2PI * tl.exp(-0.5 * x * x)
    return x * probability, slope


@triton.jit
def _gated_kernel(
    gate,
    up,
    output,
    columns,
    column_blocks,
    gate_row,
    up_row,
    output_row,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
):
    row, column, mask = _place(column_blocks, columns, BLOCK)
    gate_values = tl.load(gate + row * gate_row + column, mask=mask, other=0.0)
    up_values = tl.load(up + row * up_row + column, mask=mask, other=0.0).to(WIDE)
    activated = _activate(gate_values.to(WIDE), ACTIVATION).to(gate_values.dtype).to(WIDE)
    tl.store(output + row * output_row + column, (activated * up_values).to(output.dtype.element_ty), mask=mask)


@triton.jit
def _gated_backward_kernel(
    gate,
    up,
    grad_output,
    grad_gate,
    grad_up,
    columns,
    column_blocks,
    gate_row,
    up_row,
    grad_output_row,
    grad_gate_row,
    grad_up_row,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
):
    row, column, mask = _place(column_blocks, columns, BLOCK)
    gate_values = tl.load(gate + row * gate_row + column, mask=mask, other=0.0)
    up_values = tl.load(up + row * up_row + column, mask=mask, other=0.0).to(WIDE)
    grad = tl.load(grad_output + row * grad_output_row + column, mask=mask, other=0.0).to(WIDE)
    activated, slope = _activate_with_slope(gate_values.to(WIDE), ACTIVATION)
    rounded = activated.to(gate_values.dtype).to(WIDE)
    tl.store(grad_up + row * grad_up_row + column, (grad * rounded).to(grad_up.dtype.element_ty), mask=mask)
    new_grad_gate = grad * up_values * slope
    tl.store(grad_gate + row * grad_gate_row + column, new_grad_gate.to(grad_gate.dtype.element_ty), mask=mask)


def _in_rows(values: torch.Tensor) -> torch.Tensor:
    """Return `values` itself if its rows (contiguous last dimension) are one constant stride apart, else a copy."""
    if values.is_contiguous():
        return values
    if values.stride(-1) != 1:
        return values.contiguous()
    expected = None
    for size, stride in zip(reversed(values.shape[:-1]), reversed(values.stride()[:-1]), strict=True):
        if size > 1:
            if expected is not None and stride != expected:
                return values.contiguous()
            expected = stride * size
    return values


def _row_stride(values: torch.Tensor) -> int:
    for size, stride in zip(reversed(values.shape[:-1]), reversed(values.stride()[:-1]), strict=True):
        if size > 1:
            return stride
    return 0


def _launch(kernel, tensors: list[torch.Tensor], activation: str) -> None:
    """Launch `kernel` on tensors [..., i] of one shape, in rows of a constant stride."""
    values = tensors[0]
    if not values.numel():
        return
    if all(tensor.is_contiguous() for tensor in tensors):
        rows, columns, strides = 1, values.numel(), [0] * len(tensors)
    else:
        columns = values.shape[-1]
        rows, strides = values.numel() // columns, [_row_stride(tensor) for tensor in tensors]
    block = min(BLOCK, triton.next_power_of_2(columns))
    column_blocks = triton.cdiv(columns, block)
    start(
        kernel,
        (rows * column_blocks,),
        *tensors,
        columns,
        column_blocks,
        *strides,
        ACTIVATION=activation,
        BLOCK=block,
        WIDE=tl.float64 if values.dtype == torch.float64 else tl.float32,
        num_warps=4,
    )


def _halves(packed: torch.Tensor) -> list[torch.Tensor]:
    half = packed.shape[-1] // 2
    return [packed[..., :half], packed[..., half:]]


@operator("ds_slide::gated", "(Tensor gate, Tensor up, str activation) -> Tensor")
def _gated(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    output = gate.new_empty(gate.shape)
    _launch(_gated_kernel, [_in_rows(gate), _in_rows(up), output], activation)
    return output


@operator(
    "ds_slide::gated_backward",
    "(Tensor grad_output, Tensor gate, Tensor up, str activation) -> (Tensor, Tensor)",
)
def _gated_backward(
    grad_output: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, activation: str
) -> tuple[torch.Tensor, torch.Tensor]:
    grads = [gate.new_empty(gate.shape), up.new_empty(up.shape)]
    inputs = [_in_rows(tensor) for tensor in (gate, up, grad_output)]
    _launch(_gated_backward_kernel, inputs + grads, activation)
    return grads[0], grads[1]


@operator("ds_slide::gated_packed", "(Tensor packed, str activation) -> Tensor")
def _gated_packed(packed: torch.Tensor, activation: str) -> torch.Tensor:
    gate, up = _halves(_in_rows(packed))
    output = gate.new_empty(gate.shape)
    _launch(_gated_kernel, [gate, up, output], activation)
    return output


@operator(
    "ds_slide::gated_packed_backward",
    "(Tensor grad_output, Tensor packed, str activation) -> Tensor",
)
def _gated_packed_backward(grad_output: torch.Tensor, packed: torch.Tensor, activation: str) -> torch.Tensor:
    grad = packed.new_empty(packed.shape)
    tensors = [*_halves(_in_rows(packed)), _in_rows(grad_output), *_halves(grad)]
    _launch(_gated_backward_kernel, tensors, activation)
    return grad


@_gated.register_fake
def _(gate, up, activation):  # noqa: ARG001
    return gate.new_empty(gate.shape)


@_gated_backward.register_fake
def _(grad_output, gate, up, activation):  # noqa: ARG001
    return gate.new_empty(gate.shape), up.new_empty(up.shape)


@_gated_packed.register_fake
def _(packed, activation):  # noqa: ARG001
    return packed.new_empty((*packed.shape[:-1], packed.shape[-1] // 2))


@_gated_packed_backward.register_fake
def _(grad_output, packed, activation):  # noqa: ARG001
    return packed.new_empty(packed.shape)


def _setup_context(ctx, inputs, output):  # noqa: ARG001
    *tensors, ctx.activation = inputs
    ctx.save_for_backward(*tensors)


def _backward(launch, ctx, grad_output):
    return *launch(grad_output, *ctx.saved_tensors, ctx.activation), None


def _packed_backward(launch, ctx, grad_output):
    return launch(grad_output, *ctx.saved_tensors, ctx.activation), None


_gated.register_autograd(_gated_backward, _backward, _setup_context)
_gated_packed.register_autograd(_gated_packed_backward, _packed_backward, _setup_context)


def _check(name: str, values: torch.Tensor, activation: str) -> None:
    if activation not in ACTIVATIONS:
        raise SlideConfigError(f"{name}: activation {activation!r} is unknown, give one of {', '.join(ACTIVATIONS)}.")
    if not values.dim() or values.dtype not in DTYPES:
        raise SlideError(
            f"{name}: got {tuple(values.shape)} of {values.dtype}, give at least one dimension and a floating type of "
            "16, 32 or 64 bits."
        )


def gated(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    """Return activation(gate) * up, contiguous, in the shape [..., i] and dtype of both (bf16, fp16, fp32 or fp64).

    activation: "silu", "gelu" (erf) or "gelu_tanh". The halves of one packed [..., 2 i] projection are read in place.
    Inputs with rows that are not contiguous or not a constant stride apart are copied first. The gradients are
    contiguous.

    Raises SlideConfigError for an unknown activation, SlideError where shapes or dtypes differ.
    """
    _check("gated", gate, activation)
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise SlideError(
            f"gated: gate is {tuple(gate.shape)} of {gate.dtype}, up {tuple(up.shape)} of {up.dtype}, give them alike."
        )
    return _gated(gate, up, activation)


def gated_packed(packed: torch.Tensor, activation: str) -> torch.Tensor:
    """Return activation(first half) * second half of the last dimension: [..., 2 i] to a contiguous [..., i] (Phi-3).

    The arithmetic is the same as in `gated`. The backward writes one packed gradient [..., 2 i] without concatenation.

    Raises SlideConfigError for an unknown activation, SlideError for an odd last dimension or an unknown dtype.
    """
    _check("gated_packed", packed, activation)
    if packed.shape[-1] % 2:
        raise SlideError(f"gated_packed: the last of {tuple(packed.shape)} is odd, give gate and up of one width.")
    return _gated_packed(packed, activation)
