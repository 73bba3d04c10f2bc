"""The kernels of a training step at shapes of real models: norms, rotary embedding, gated activations and the loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import kernel_rivals as rivals
import torch
from kernel_problem import DTYPE, Factory, Problem, System, by_autograd, compiled, random_tensor
from torch import Tensor

from ds_slide.kernels.gated import gated_activation
from ds_slide.kernels.loss.linear_cross_entropy import linear_cross_entropy
from ds_slide.kernels.norm.layer_norm import add_layer_norm, layer_norm
from ds_slide.kernels.norm.rms_norm import add_rms_norm, rms_norm
from ds_slide.kernels.rope.rotary import rope

Makers = list[Callable[[], Problem]]

ROWS = 16384
# Qwen2.5-3B, Llama-3-8B, an odd one, Phi-3, Qwen2.5-14B, Llama-3-70B.
HIDDEN = ((ROWS, 2048), (ROWS, 4096), (ROWS, 2880), (ROWS, 3072), (ROWS, 5120), (ROWS, 8192))
# Also the norms of Qwen3's query heads.
RMS_NORM = (*HIDDEN, (8, 2048, 16, 128))
# Batch, positions, query heads, key heads, head dimension, rotated dimensions: Qwen2.5-3B, Llama-3-8B, Qwen2.5-7B,
# Phi-3-mini, Gemma-2B, Qwen2.5-0.5B, GPT-NeoX-20B.
ROPE = (
    (8, 2048, 16, 2, 128, 128),
    (4, 4096, 32, 8, 128, 128),
    (8, 2048, 28, 4, 128, 128),
    (8, 2048, 32, 32, 96, 96),
    (4, 4096, 8, 1, 256, 256),
    (8, 2048, 14, 2, 64, 64),
    (2, 2048, 64, 64, 96, 24),
)
# Qwen2.5-3B, Llama-3-8B, an odd one, Phi-3-mini, Qwen2.5-14B, Qwen2.5-7B.
SILU = ((ROWS, 11008), (ROWS, 14336), (ROWS, 2880), (ROWS, 8192), (ROWS, 13824), (8192, 18944))
# Gemma-2B, Gemma-2-2B, an odd one, Gemma-2-9B, Gemma-7B, Gemma-3-4B.
GELU = ((ROWS, 16384), (ROWS, 9216), (ROWS, 2880), (ROWS, 14336), (8192, 24576), (ROWS, 10240))
# Rows, hidden size, vocabulary.
LOSS = (
    (16384, 2048, 151936),
    (8192, 4096, 128256),
    (8192, 3072, 32064),
    (4096, 4096, 151936),
    (16384, 3584, 152064),
    (8192, 2048, 256000),
)
TINY = ((3, 64), (5, 17))
TINY_ROPE, TINY_LOSS = ((1, 7, 2, 1, 16, 16), (2, 5, 2, 2, 16, 8)), ((24, 32, 97), (7, 17, 33))
NO_LIGER = {"liger": "Liger-Kernel has no such operation"}


def _size(*tensors: Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _name(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))


def _ours_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return rms_norm(x, weight, rivals.EPS, round_before_weight=True)


def _ours_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return add_rms_norm(x, residual, weight, rivals.EPS, round_before_weight=True)


# By kernel: the formula in plain PyTorch, whether a residual is added and a bias is there, and the other systems.
NORMS: dict[str, tuple[System, bool, bool, dict[str, Factory]]] = {
    "rms_norm": (
        rivals.eager_rms_norm,
        False,
        False,
        {"ours": lambda: _ours_rms_norm, "torch": rivals.torch_rms_norm, "liger": rivals.liger_rms_norm},
    ),
    "add_rms_norm": (
        rivals.eager_add_rms_norm,
        True,
        False,
        {"ours": lambda: _ours_add_rms_norm, "liger": rivals.liger_add_rms_norm},
    ),
    "layer_norm": (
        rivals.eager_layer_norm,
        False,
        True,
        {"ours": lambda: partial(layer_norm, eps=rivals.EPS), "liger": rivals.liger_layer_norm},
    ),
    "add_layer_norm": (
        rivals.eager_add_layer_norm,
        True,
        True,
        {"ours": lambda: partial(add_layer_norm, eps=rivals.EPS)},
    ),
}


def norm(kernel: str, shape: tuple[int, ...], device: torch.device) -> Problem:
    formula, residual, bias, systems = NORMS[kernel]
    hidden = shape[-1]
    inputs = {"x": random_tensor(*shape, device=device)}
    if residual:
        inputs["residual"] = random_tensor(*shape, device=device)
    inputs["weight"] = 1 + random_tensor(hidden, device=device, scale=0.1)
    if bias:
        inputs["bias"] = random_tensor(hidden, device=device, scale=0.1)
    outputs = ("y", "total") if residual else ("y",)
    upstream = tuple(random_tensor(*shape, device=device) for _ in outputs)
    tensor = _size(inputs["x"])
    return Problem(
        kernel,
        _name(shape),
        inputs,
        outputs,
        {**systems, "eager": lambda: formula, "compile": compiled(formula)},
        lambda: by_autograd(formula, inputs, outputs, tuple(inputs), upstream),
        forward_bytes=(4 if residual else 2) * tensor,
        backward_bytes=(4 if residual else 3) * tensor,
        gradients=tuple(inputs),
        upstream=upstream,
        absent={} if "liger" in systems else NO_LIGER,
    )


def rotary(shape: tuple[int, ...], device: torch.device) -> Problem:
    batch, positions, query_heads, key_heads, dimension, rotated = shape

    def heads(count: int) -> Tensor:
        # As a model has them: a view of the projection's output.
        return random_tensor(batch, positions, count, dimension, device=device).transpose(1, 2)

    angles = torch.arange(positions, device=device)[:, None] / 10000 ** torch.linspace(
        0, 1, rotated // 2, device=device
    )
    angles = torch.cat((angles, angles), dim=-1).unsqueeze(0)
    inputs = {
        "q": heads(query_heads),
        "k": heads(key_heads),
        "cos": angles.cos().to(DTYPE),
        "sin": angles.sin().to(DTYPE),
    }
    upstream = (heads(query_heads), heads(key_heads))
    moved = 2 * _size(inputs["q"], inputs["k"]) + _size(inputs["cos"], inputs["sin"])
    formula, outputs, gradients = rivals.eager_rope, ("q'", "k'"), ("q", "k")
    return Problem(
        "rope",
        _name(shape),
        inputs,
        outputs,
        {"ours": lambda: rope, "liger": rivals.liger_rope, "eager": lambda: formula, "compile": compiled(formula)},
        lambda: by_autograd(formula, inputs, outputs, gradients, upstream),
        forward_bytes=moved,
        backward_bytes=moved,
        gradients=gradients,
        upstream=upstream,
    )


def gated(kernel: str, shape: tuple[int, ...], device: torch.device) -> Problem:
    activation = kernel.removeprefix("gated_")
    formula = rivals.eager_silu if activation == "silu" else rivals.eager_gelu_tanh
    inputs = {name: random_tensor(*shape, device=device) for name in ("gate", "up")}
    upstream = (random_tensor(*shape, device=device),)
    tensor = _size(inputs["gate"])
    return Problem(
        kernel,
        _name(shape),
        inputs,
        ("y",),
        {
            "ours": lambda: partial(gated_activation.gated, activation=activation),
            "liger": rivals.liger_silu if activation == "silu" else rivals.liger_gelu_tanh,
            "eager": lambda: formula,
            "compile": compiled(formula),
        },
        lambda: by_autograd(formula, inputs, ("y",), ("gate", "up"), upstream),
        forward_bytes=3 * tensor,
        backward_bytes=5 * tensor,
        gradients=("gate", "up"),
        upstream=upstream,
    )


def loss(shape: tuple[int, ...], device: torch.device) -> Problem:
    rows, hidden_size, vocabulary = shape
    hidden = random_tensor(rows, hidden_size, device=device)
    weight = random_tensor(vocabulary, hidden_size, device=device, scale=0.02)
    labels = torch.randint(vocabulary, (rows,), device=device)
    labels[:: min(2048, rows // 2)] = rivals.IGNORED

    def gemms() -> dict[str, Callable[[], object]]:
        slope = random_tensor(rows, vocabulary, device=device)
        h, w = hidden.detach(), weight.detach()

        def logits() -> Tensor:
            return torch.mm(h, w.T)

        def all_three() -> None:
            logits()
            torch.mm(slope, w)
            torch.mm(slope.T, h)

        return {"forward": logits, "forward + backward": all_three}

    return Problem(
        "loss",
        _name(shape),
        {"hidden": hidden, "weight": weight, "labels": labels},
        ("loss",),
        {
            "ours": lambda: partial(linear_cross_entropy, ignore_index=rivals.IGNORED),
            "torch": rivals.torch_loss,
            "liger": rivals.liger_loss,
            "liger fp32": lambda: rivals.liger_loss(torch.float32),
            "eager": lambda: rivals.eager_loss,
            "compile": compiled(rivals.eager_loss),
        },
        lambda: rivals.loss_reference(hidden, weight, labels),
        forward_bytes=_size(hidden, weight),
        gradients=("hidden", "weight"),
        flops=6 * rows * hidden_size * vocabulary,
        gemms=gemms,
    )


def makers(device: torch.device, tiny: bool) -> Iterator[tuple[str, Makers]]:
    """By kernel, one function a shape that sets the problem up."""

    def each(shapes: tuple[tuple[int, ...], ...], make: Callable[[tuple[int, ...]], Problem]) -> Makers:
        return [lambda shape=shape: make(shape) for shape in shapes]  # type: ignore[misc]

    yield "loss", each(TINY_LOSS if tiny else LOSS, lambda shape: loss(shape, device))
    for kernel in NORMS:
        shapes = TINY if tiny else RMS_NORM if kernel == "rms_norm" else HIDDEN
        yield kernel, each(shapes, lambda shape, kernel=kernel: norm(kernel, shape, device))  # type: ignore[misc]
    yield "rope", each(TINY_ROPE if tiny else ROPE, lambda shape: rotary(shape, device))
    yield "gated_silu", each(TINY if tiny else SILU, lambda shape: gated("gated_silu", shape, device))
    yield "gated_gelu_tanh", each(TINY if tiny else GELU, lambda shape: gated("gated_gelu_tanh", shape, device))
