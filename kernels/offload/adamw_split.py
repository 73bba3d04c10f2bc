"""AdamW on the split states of a GPU-tier unit, in one pass, with the bits of the CPU kernel.

Bytes a parameter (bf16): read 2 + 2 + 4 + 4 + 2, write 2 + 2 + 4 + 4 = 26. The arithmetic is that of
`ds_slide.kernels.offload.split_master`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from ds_slide.kernels.offload.split_master import (
    BLOCK,
    check_buffers,
    flush,
    grid,
    load_master,
    store_master,
    vector_parts,
)
from ds_slide.optim.hyper import AdamWConstants, AdamWHyper


@triton.jit
def _adamw_split_kernel(
    high_buffer,
    low_buffer,
    exp_avg,
    exp_avg_sq,
    gradient,
    numel,
    grad_scale,
    decay,
    weight_decay,
    beta1,
    one_minus_beta1,
    beta2,
    one_minus_beta2,
    inv_bc2_sqrt,
    eps,
    step_size,
    ADAM_W: tl.constexpr,
    BLOCK: tl.constexpr,
):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < numel
    g = tl.load(gradient + offsets, mask=mask, other=0.0).to(tl.float32)
    w = load_master(high_buffer, low_buffer, offsets, mask)
    m = flush(tl.load(exp_avg + offsets, mask=mask, other=0.0))
    v = flush(tl.load(exp_avg_sq + offsets, mask=mask, other=0.0))

    g = flush(flush(g) * grad_scale)
    if ADAM_W:
        w = flush(w * decay)
    else:
        g = flush(g + flush(w * weight_decay))
    m = flush(flush(m * beta1) + flush(g * one_minus_beta1))
    v = flush(flush(v * beta2) + flush(flush(g * g) * one_minus_beta2))
    denominator = flush(flush(tl.sqrt_rn(v) * inv_bc2_sqrt) + eps)
    w = flush(w - flush(flush(tl.div_rn(m, denominator)) * step_size))

    store_master(high_buffer, low_buffer, offsets, mask, w)
    tl.store(exp_avg + offsets, m, mask=mask)
    tl.store(exp_avg_sq + offsets, v, mask=mask)


def _check(
    weight: torch.Tensor,
    remainder: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    gradient: torch.Tensor,
) -> None:
    states = {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    check_buffers("adamw_split_", weight, remainder, states, gradient)


def _launch(
    weight: torch.Tensor,
    remainder: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    gradient: torch.Tensor,
    hyper: AdamWHyper,
    grad_scale: float,
) -> None:
    _check(weight, remainder, exp_avg, exp_avg_sq, gradient)
    constants = hyper.constants(grad_scale)
    for part in vector_parts((weight, remainder, exp_avg, exp_avg_sq, gradient)):
        _launch_part(part, hyper, constants)


def _launch_part(buffers: Sequence[torch.Tensor], hyper: AdamWHyper, constants: AdamWConstants) -> None:
    """`buffers`: weight, remainder, both moments and gradient."""
    weight, remainder, exp_avg, exp_avg_sq, gradient = buffers
    numel = weight.numel()
    _adamw_split_kernel[grid(numel)](
        weight.view(torch.int16),
        remainder,
        exp_avg,
        exp_avg_sq,
        gradient,
        numel,
        constants.grad_scale,
        constants.decay,
        constants.weight_decay,
        constants.beta1,
        constants.one_minus_beta1,
        constants.beta2,
        constants.one_minus_beta2,
        constants.inv_bc2_sqrt,
        constants.eps,
        constants.step_size,
        ADAM_W=hyper.adam_w_mode,
        BLOCK=BLOCK,
        num_warps=4,
        enable_fp_fusion=False,
    )


@torch.library.custom_op("ds_slide::adamw_split_", mutates_args=("weight", "remainder", "exp_avg", "exp_avg_sq"))
def _adamw_split_(
    weight: torch.Tensor,
    remainder: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    gradient: torch.Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    bias_correction: bool,
    adam_w_mode: bool,
    grad_scale: float,
) -> None:
    hyper = AdamWHyper(lr, (beta1, beta2), eps, weight_decay, step, bias_correction, adam_w_mode)
    _launch(weight, remainder, exp_avg, exp_avg_sq, gradient, hyper, grad_scale)


@_adamw_split_.register_fake
def _(
    weight: torch.Tensor,
    remainder: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    gradient: torch.Tensor,
    lr: float,  # noqa: ARG001 - these are prescribed
    beta1: float,  # noqa: ARG001
    beta2: float,  # noqa: ARG001
    eps: float,  # noqa: ARG001
    weight_decay: float,  # noqa: ARG001
    step: int,  # noqa: ARG001
    bias_correction: bool,  # noqa: ARG001
    adam_w_mode: bool,  # noqa: ARG001
    grad_scale: float,  # noqa: ARG001
) -> None:
    _check(weight, remainder, exp_avg, exp_avg_sq, gradient)


def adamw_split_(
    weight: torch.Tensor,
    remainder: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    gradient: torch.Tensor,
    hyper: AdamWHyper,
    grad_scale: float,
) -> None:
    """One AdamW (or Adam with L2) step in place, without waiting, with the bits of `ds_slide.optim.reference`.

    All tensors are flat [n], contiguous and on one device; n may be 0.
    weight: bf16, the upper buffer of the fp32 master, rounded half up. remainder: int16, its low 16 bits.
    exp_avg, exp_avg_sq: fp32.
    gradient: bf16, fp16 or fp32; only read.
    hyper: numbers of this step. grad_scale: factor on the gradient (clip factor / loss scale), a Python number, for
        reading one from the GPU would wait for it.

    inf and nan in a gradient make its own element nan or inf and no other. Raises SlideError for another dtype, length,
    device or strides, or a tensor that requires grad.
    """
    if not torch.compiler.is_compiling():
        # The operator's dispatch costs the host more than the launch: see `pack_gradients`.
        _launch(weight, remainder, exp_avg, exp_avg_sq, gradient, hyper, grad_scale)
        return
    _adamw_split_(
        weight,
        remainder,
        exp_avg,
        exp_avg_sq,
        gradient,
        hyper.lr,
        *hyper.betas,
        hyper.eps,
        hyper.weight_decay,
        hyper.step,
        hyper.bias_correction,
        hyper.adam_w_mode,
        grad_scale,
    )
