"""What a step of Muon does to single elements, before the products of a matrix and behind them, on any device.

On a GPU each half is one kernel (`ds_slide.kernels.offload.muon_split`) if the master is split: in plain torch they
move ten times as many bytes as the update has. The kernels round like torch up to its fused operations.
"""

from __future__ import annotations

import torch

from ds_slide.optim.low_precision import CHUNK
from ds_slide.optim.muon import MuonHyper
from ds_slide.optim.reference import join_split, split_into
from ds_slide.optim.rounding import keys, random_bits, round_bf16, step_key


def advance(
    stored: torch.Tensor,
    gradient: torch.Tensor,
    hyper: MuonHyper,
    grad_scale: float,
    seed: int,
    first: int,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Advance a momentum in place, and return Nesterov's update in fp32.

    All are flat. `stored`: fp32, or bf16, which is rounded stochastically by bits of (`seed`, step, element). `first`:
    the number of element 0 within the unit. `out`: the place of the update; a new tensor if it is None."""
    if stored.is_cuda:
        return advance_by_kernel(stored, gradient, hyper, grad_scale, seed, first, out)
    update = gradient.to(torch.float32, copy=True).mul_(grad_scale)
    momentum = stored.to(torch.float32).lerp_(update, 1.0 - hyper.momentum)
    if stored.dtype == torch.bfloat16:
        for start in range(0, stored.numel(), CHUNK):
            values = momentum[start : start + CHUNK]
            random = random_bits(seed, hyper.step, first + start, values.numel(), values.device) >> 16
            stored[start : start + CHUNK].copy_(round_bf16(values, random))
    update.lerp_(momentum, hyper.momentum)
    return update if out is None else out.copy_(update)


def advance_by_kernel(
    stored: torch.Tensor,
    gradient: torch.Tensor,
    hyper: MuonHyper,
    grad_scale: float,
    seed: int,
    first: int,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`advance` on a GPU."""
    from ds_slide.kernels.offload.muon_split import nesterov_  # importing Triton takes a second

    update = torch.empty(gradient.numel(), dtype=torch.float32, device=gradient.device) if out is None else out
    begin, stop, key = first, first + update.numel(), step_key(seed, hyper.step)
    while begin < stop:  # for all elements whose numbers have the same upper half
        end = min(stop, (begin >> 32) + 1 << 32)
        part, numbers = slice(begin - first, end - first), (begin, *keys(key, begin >> 32))
        nesterov_(stored[part], gradient[part], update[part], hyper.momentum, grad_scale, numbers)
        begin = end
    return update


def apply(
    weight: torch.Tensor, remainder: torch.Tensor | None, update: torch.Tensor, factor: float, hyper: MuonHyper
) -> None:
    """Set the master, in place, to ``(1 - lr * weight_decay) * master - lr * factor * update``. All are flat."""
    decay = 1.0 - hyper.lr * hyper.weight_decay
    if remainder is not None and not remainder.is_floating_point():
        if weight.is_cuda:
            from ds_slide.kernels.offload.muon_split import apply_split_

            apply_split_(weight, remainder, update, decay, hyper.lr * factor)
            return
        master = torch.empty(weight.numel(), dtype=torch.float32)
        join_split(weight, remainder, master)
    else:
        master = weight if remainder is None else remainder
    scaled = update.mul(factor) if update.dtype == torch.float32 else update.to(torch.float32).mul_(factor)
    master.mul_(decay).add_(scaled, alpha=-hyper.lr)
    if remainder is None:
        return
    if remainder.is_floating_point():
        weight.copy_(master)
    else:
        split_into(master, weight, remainder)
