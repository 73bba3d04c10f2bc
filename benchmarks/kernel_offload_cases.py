"""The kernels around offloading at the blocks of real models: gradient packing, square sum, AdamW."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from kernel_cases import NO_LIGER, Makers
from kernel_problem import DTYPE, Factory, Problem, Results, System, compiled, random_tensor
from torch import Tensor

from ds_slide.kernels.offload.adamw_split import adamw_split_
from ds_slide.kernels.offload.gradient_pack import pack_gradients
from ds_slide.kernels.offload.square_sum import square_sum
from ds_slide.optim.adamw import AdamWHyper
from ds_slide.optim.reference import encode_split

ALIGNMENT = 64
# Hidden size, intermediate size, rows of the key projection: blocks of Qwen2.5-3B, Llama-3-8B, Qwen2.5-0.5B,
# Qwen2.5-7B and Qwen2.5-1.5B, all with the biases and norms of Qwen2.
BLOCKS = ((2048, 11008, 256), (4096, 14336, 1024), (896, 4864, 128), (3584, 18944, 512), (1536, 8960, 256))
# Their parameters, and an odd number.
NUMELS = (77_080_064, 218_119_168, 14_911_616, 233_057_792, 12_345_677)
TINY_BLOCKS, TINY_NUMELS = ((32, 48, 16), (17, 33, 5)), (1000, 77)
LR, BETAS, EPS, DECAY, STEP = 1e-3, (0.9, 0.95), 1e-8, 0.1, 10


def block_gradients(shape: tuple[int, ...], device: torch.device) -> tuple[list[Tensor], list[int], int]:
    """Gradients of a Qwen2 block, their aligned offsets in a flat buffer, and its length."""
    hidden, intermediate, keys = shape
    sizes: list[tuple[int, ...]] = [
        *((hidden, hidden), (hidden,), (keys, hidden), (keys,), (keys, hidden), (keys,), (hidden, hidden)),
        *((intermediate, hidden), (intermediate, hidden), (hidden, intermediate), (hidden,), (hidden,)),
    ]
    gradients = [random_tensor(*size, device=device, scale=1e-3) for size in sizes]
    offsets, end = [], 0
    for gradient in gradients:
        offsets.append(end)
        end += -(-gradient.numel() // ALIGNMENT) * ALIGNMENT
    return gradients, offsets, end


def pack(accumulate: bool, shape: tuple[int, ...], device: torch.device) -> Problem:
    gradients, offsets, numel = block_gradients(shape, device)
    buffer = torch.zeros(numel, dtype=DTYPE, device=device)
    ends = [offset + gradient.numel() for offset, gradient in zip(offsets, gradients, strict=True)]
    if accumulate:
        for start, end in zip(offsets, ends, strict=True):
            buffer[start:end] = random_tensor(end - start, device=device, scale=1e-3)

    def parts(flat: Tensor) -> list[Tensor]:
        return [flat[start:end] for start, end in zip(offsets, ends, strict=True)]

    def ours() -> System:
        total = torch.zeros((), dtype=torch.float64, device=device)

        def call(flat: Tensor, *sources: Tensor) -> tuple[Tensor, Tensor]:
            pack_gradients(sources, flat, offsets, total, accumulate=accumulate)
            return flat, total

        return call

    def gather(flat: Tensor, sources: Sequence[Tensor]) -> None:
        views = [source.reshape(-1) for source in sources]
        (torch._foreach_add_ if accumulate else torch._foreach_copy_)(parts(flat), views)

    def two_passes(flat: Tensor, *sources: Tensor) -> tuple[Tensor, Tensor]:
        gather(flat, sources)
        return flat, square_sum(flat)

    def eager(flat: Tensor, *sources: Tensor) -> tuple[Tensor, Tensor]:
        gather(flat, sources)
        return flat, torch.linalg.vector_norm(flat, dtype=torch.float32).square()

    def reference() -> Results:
        wide = buffer.double()
        for part, gradient in zip(parts(wide), gradients, strict=True):
            part.copy_(part + gradient.reshape(-1).double() if accumulate else gradient.reshape(-1))
        held = wide.to(DTYPE).double()
        return {"buffer": wide, "square sum": held.square().sum()}

    moved = sum(gradient.numel() for gradient in gradients) * (6 if accumulate else 4)
    names = [f"gradient {number}" for number in range(len(gradients))]
    systems: dict[str, Factory] = {
        "ours": ours,
        "torch": lambda: two_passes,
        "eager": lambda: eager,
        "compile": compiled(eager),
    }
    inputs = {"buffer": buffer, **dict(zip(names, gradients, strict=True))}
    kernel = "pack_add" if accumulate else "pack"
    name = f"block {' / '.join(map(str, shape))}"
    return Problem(kernel, name, inputs, ("buffer", "square sum"), systems, reference, moved, absent=NO_LIGER)


def square_sums(numel: int, device: torch.device) -> Problem:
    values = random_tensor(numel, device=device)

    def eager(tensor: Tensor) -> Tensor:
        return tensor.double().square().sum()

    def torch_norm(tensor: Tensor) -> Tensor:
        return torch.linalg.vector_norm(tensor, dtype=torch.float32).square()

    systems: dict[str, Factory] = {
        "ours": lambda: square_sum,
        "torch": lambda: torch_norm,
        "eager": lambda: eager,
        "compile": compiled(eager),
    }
    reference = lambda: {"square sum": eager(values)}  # noqa: E731
    inputs = {"values": values}
    return Problem("square_sum", f"{numel:,}", inputs, ("square sum",), systems, reference, 2 * numel, absent=NO_LIGER)


def adamw(numel: int, device: torch.device) -> Problem:
    hyper = AdamWHyper(lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY, step=STEP)
    master = random_tensor(numel, device=device, scale=0.02, dtype=torch.float32)
    high, low = encode_split(master)
    inputs = {
        "weight": high.view(DTYPE),
        "remainder": low,
        "exp_avg": random_tensor(numel, device=device, scale=1e-3, dtype=torch.float32),
        "exp_avg_sq": random_tensor(numel, device=device, scale=1e-3, dtype=torch.float32).square(),
        "gradient": random_tensor(numel, device=device, scale=1e-3),
        "master": master,
    }
    correction1, correction2 = 1 - BETAS[0] ** STEP, 1 - BETAS[1] ** STEP

    def ours(weight: Tensor, low: Tensor, m: Tensor, v: Tensor, g: Tensor, _: Tensor) -> tuple[Tensor, ...]:
        adamw_split_(weight, low, m, v, g, hyper.constants(), hyper.adam_w_mode)
        return weight, m, v

    def torch_fused() -> System:
        step = torch.full((), STEP, dtype=torch.float32, device=device)

        def call(weight: Tensor, _: Tensor, m: Tensor, v: Tensor, g: Tensor, w: Tensor) -> tuple[Tensor, ...]:
            betas: dict[str, Any] = {"beta1": BETAS[0], "beta2": BETAS[1]}
            options: dict[str, Any] = {"weight_decay": DECAY, "eps": EPS, "amsgrad": False, "maximize": False}
            torch._fused_adamw_([w], [g.float()], [m], [v], [], [step], lr=LR, **betas, **options)
            return weight.copy_(w), m, v

        return call

    def eager(weight: Tensor, _: Tensor, m: Tensor, v: Tensor, g: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        wide = g.to(m.dtype)
        m.lerp_(wide, 1 - BETAS[0])
        v.mul_(BETAS[1]).addcmul_(wide, wide, value=1 - BETAS[1])
        w.mul_(1 - LR * DECAY)
        w.addcdiv_(m, (v.sqrt() / correction2**0.5).add_(EPS), value=-LR / correction1)
        return weight.copy_(w), m, v

    def reference() -> Results:
        wide = [inputs[name].double() for name in ("weight", "exp_avg", "exp_avg_sq", "gradient", "master")]
        weight, m, v = eager(wide[0], wide[0], *wide[1:])
        return {"weight": weight, "exp_avg": m, "exp_avg_sq": v}

    systems: dict[str, Factory] = {
        "ours": lambda: ours,
        "torch": torch_fused,
        "eager": lambda: eager,
        "compile": compiled(eager),
    }
    outputs = ("weight", "exp_avg", "exp_avg_sq")
    return Problem("adamw", f"{numel:,}", inputs, outputs, systems, reference, 26 * numel, absent=NO_LIGER)


def makers(device: torch.device, tiny: bool) -> Iterator[tuple[str, Makers]]:
    """By kernel, one function a shape that sets the problem up."""
    for kernel, accumulate in (("pack", False), ("pack_add", True)):
        blocks = TINY_BLOCKS if tiny else BLOCKS
        yield (
            kernel,
            [lambda shape=shape, accumulate=accumulate: pack(accumulate, shape, device) for shape in blocks],  # type: ignore[misc]
        )
    flat: dict[str, Callable[[int, torch.device], Problem]] = {"square_sum": square_sums, "adamw": adamw}
    for kernel, make in flat.items():
        numels = TINY_NUMELS if tiny else NUMELS
        yield kernel, [lambda numel=numel, make=make: make(numel, device) for numel in numels]  # type: ignore[misc]
