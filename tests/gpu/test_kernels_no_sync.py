"""No kernel wrapper waits for the GPU: with torch's synchronisation check on, forward and backward go through."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.needs_cuda

Work = Callable[[], Any]
ROWS, HIDDEN, VOCABULARY = 96, 320, 1031


@contextmanager
def no_synchronisation() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def tensor(*shape: int, gradient: bool = True) -> Tensor:
    values = torch.randn(*shape, device="cuda").to(torch.bfloat16)
    return values.requires_grad_() if gradient else values


def with_backward(function: Callable[..., Any], *inputs: Tensor, **options: Any) -> Work:
    """A call of `function` and a backward pass to all inputs that want a gradient."""
    wanted = [value for value in inputs if value.requires_grad]
    with torch.no_grad():
        sample = function(*inputs, **options)
    shapes = sample if isinstance(sample, tuple) else (sample,)
    upstream = [torch.ones_like(value) for value in shapes]

    def work() -> None:
        returned = function(*inputs, **options)
        outputs = returned if isinstance(returned, tuple) else (returned,)
        gradients = torch.autograd.grad(outputs, wanted, upstream)
        assert len(gradients) == len(wanted)

    return work


def rms_norms(names: str, residual: bool) -> Work:
    from ds_slide.kernels.norm import rms_norm

    inputs = [tensor(ROWS, HIDDEN) for _ in range(2 if residual else 1)]
    return with_backward(
        getattr(rms_norm, names), *inputs, tensor(HIDDEN), eps=1e-6, offset=0.0, round_before_weight=True
    )


def layer_norms(name: str, residual: bool) -> Work:
    from ds_slide.kernels.norm import layer_norm

    inputs = [tensor(ROWS, HIDDEN) for _ in range(2 if residual else 1)]
    return with_backward(getattr(layer_norm, name), *inputs, tensor(HIDDEN), tensor(HIDDEN), eps=1e-6)


def rope() -> Work:
    from ds_slide.kernels.rope.rotary import rope

    q, k = (torch.randn(2, 24, heads, 64, device="cuda").bfloat16().transpose(1, 2) for heads in (4, 2))
    cos, sin = tensor(1, 24, 64, gradient=False), tensor(1, 24, 64, gradient=False)
    return with_backward(rope, q.requires_grad_(), k.requires_grad_(), cos, sin)


def gated(activation: str) -> Work:
    from ds_slide.kernels.gated.gated_activation import gated

    return with_backward(gated, tensor(ROWS, HIDDEN), tensor(ROWS, HIDDEN), activation=activation)


def gated_packed() -> Work:
    from ds_slide.kernels.gated.gated_activation import gated_packed

    return with_backward(gated_packed, tensor(ROWS, 2 * HIDDEN), activation="silu")


def loss(**options: Any) -> Work:
    from ds_slide.kernels.loss.linear_cross_entropy import linear_cross_entropy

    labels = torch.randint(VOCABULARY, (ROWS,), device="cuda")
    labels[::7] = -100
    hidden, weight = tensor(ROWS, HIDDEN), tensor(VOCABULARY, HIDDEN)
    return with_backward(linear_cross_entropy, hidden, weight, labels, **options)


def loss_by_count() -> Work:
    return loss(num_items=torch.tensor(50, device="cuda"), softcap=30.0, z_loss=1e-4, label_smoothing=0.1)


def pack(accumulate: bool) -> Work:
    from ds_slide.kernels.offload.gradient_pack import pack_gradients

    sources = [tensor(64, 48, gradient=False), tensor(77, gradient=False), tensor(128, 3, gradient=False)]
    buffer = torch.zeros(64 * 48 + 128 + 384, dtype=torch.bfloat16, device="cuda")
    total = torch.zeros((), dtype=torch.float64, device="cuda")
    return lambda: pack_gradients(sources, buffer, [0, 3072, 3200], total, accumulate=accumulate)


def square_sum() -> Work:
    from ds_slide.kernels.offload.square_sum import square_sum

    values = tensor(100_003, gradient=False)
    return lambda: square_sum(values)


def adamw() -> Work:
    from ds_slide.kernels.offload.adamw_split import adamw_split_
    from ds_slide.optim.adamw import AdamWHyper

    weight, gradient = tensor(5003, gradient=False), tensor(5003, gradient=False)
    remainder = torch.zeros(5003, dtype=torch.int16, device="cuda")
    moments = torch.zeros(2, 5003, device="cuda").unbind()
    return lambda: adamw_split_(weight, remainder, *moments, gradient, AdamWHyper(lr=1e-3).constants(), True)


def lsp() -> Work:
    from ds_slide.compression.lsp.learning import bias
    from ds_slide.compression.lsp.projection import compress, decompress_apply
    from ds_slide.compression.lsp.projector import Projector, random_projector

    generator = torch.Generator().manual_seed(0)
    pair = [random_projector(rows, 48, 4, generator, "cuda") for rows in (ROWS, HIDDEN)]
    weight, gradient = tensor(ROWS, HIDDEN, gradient=False), tensor(ROWS, HIDDEN, gradient=False)
    compressed = torch.empty(48, 48, device="cuda")

    def work() -> None:
        # Of new projectors every time, whose order of columns is computed here.
        left, right = (Projector(one.indices, one.values, one.d) for one in pair)
        compress(gradient, left, right, compressed, accumulate=False)
        decompress_apply(weight, None, compressed, left, right, decay=0.9, scale=0.1, keys=(1, 2))
        bias(gradient, left, right)

    return work


def lsp_unit() -> Work:
    from ds_slide.compression.codec import Masters
    from ds_slide.compression.lsp.codec import Lsp
    from ds_slide.config import CompressionConfig
    from ds_slide.model.layout import ParameterInfo, build_layout

    infos = [ParameterInfo(str(i), (ROWS, HIDDEN), ROWS * HIDDEN, 0) for i in range(3)]
    codec = Lsp(build_layout(infos, 1), torch.bfloat16, CompressionConfig(type="lsp", d=48))
    encoding = torch.empty(codec.encode_bytes, dtype=torch.uint8, device="cuda")
    codec.begin(torch.device("cuda"), encoding, torch.empty(codec.apply_bytes // 4, device="cuda"))
    gradients = [tensor(ROWS, HIDDEN, gradient=False), None, tensor(ROWS, HIDDEN, gradient=False)]
    encoded = torch.zeros(codec.numel, dtype=torch.bfloat16, device="cuda")
    weight, change = torch.zeros(codec.layout.slot_numel, device="cuda"), torch.zeros(codec.numel, device="cuda")
    rounded, keys = weight.bfloat16(), iter(range(1, 1 << 20))

    def work() -> None:
        codec.encode_in_groups(gradients, encoded, accumulate=True)
        codec.apply_in_groups(change, Masters(weight), [0.9, 0.9, 1.0])
        codec.apply_in_groups(change, Masters(rounded), [0.9, 0.9, 1.0], next(keys) << 32)

    return work


WORKS: dict[str, Callable[[], Work]] = {
    "rms_norm": lambda: rms_norms("rms_norm", residual=False),
    "add_rms_norm": lambda: rms_norms("add_rms_norm", residual=True),
    "layer_norm": lambda: layer_norms("layer_norm", residual=False),
    "add_layer_norm": lambda: layer_norms("add_layer_norm", residual=True),
    "rope": rope,
    "gated silu": lambda: gated("silu"),
    "gated gelu": lambda: gated("gelu"),
    "gated gelu_tanh": lambda: gated("gelu_tanh"),
    "gated_packed": gated_packed,
    "linear_cross_entropy": loss,
    "linear_cross_entropy, all options": loss_by_count,
    "linear_cross_entropy, sum": lambda: loss(reduction="sum"),
    "pack_gradients": lambda: pack(accumulate=False),
    "pack_gradients, accumulating": lambda: pack(accumulate=True),
    "square_sum": square_sum,
    "adamw_split": adamw,
    "lsp": lsp,
    "lsp, a unit": lsp_unit,
}


@pytest.mark.parametrize("name", list(WORKS))
def test_wrapper_does_not_wait_for_the_gpu(name: str) -> None:
    torch.manual_seed(0)
    work = WORKS[name]()
    # Compiling a kernel and loading it may synchronise, once.
    work()
    torch.cuda.synchronize()
    with no_synchronisation():
        work()
    torch.cuda.synchronize()


def test_the_check_sees_a_synchronisation() -> None:
    values = torch.ones(3, device="cuda")
    with no_synchronisation(), pytest.raises(RuntimeError, match="synchroniz"):
        values.sum().item()
