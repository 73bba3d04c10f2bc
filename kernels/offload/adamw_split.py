"""AdamW on the split states of a GPU-tier unit, in one pass, with the bits of the CPU kernel.

Bytes of a parameter (bf16): read 2 + 2 + 4 + 4 + 2, write 2 + 2 + 4 + 4 = 26. For the arithmetic see
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
    step_size,
    eps,
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
    constants: Sequence[float],
    adam_w_mode: bool,
) -> None:
    _check(weight, remainder, exp_avg, exp_avg_sq, gradient)
    for high, *others in vector_parts((weight, remainder, exp_avg, exp_avg_sq, gradient)):
        _adamw_split_kernel[grid(high.numel())](
            high.view(torch.int16),
            *others,
            high.numel(),
            *constants,
            ADAM_W=adam_w_mode,
            BLOCK=BLOCK,
            num_warps=4,
            enable_fp_fusion=False,
        )


_adamw_split_ = torch.library.custom_op(
    "ds_slide::adamw_split_", _launch, mutates_args=("weight", "remainder", "exp_avg", "exp_avg_sq")
)


@_adamw_split_.register_fake
def _(weight, remainder, exp_avg, exp_avg_sq, gradient, *_others):
    _check(weight, remainder, exp_avg, exp_avg_sq, gradient)


def adamw_split_(
    weight: torch.Tensor,
    remainder: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    gradient: torch.Tensor,
    constants: Sequence[float],
    adam_w_mode: bool,
) -> None:
    """Do one AdamW (or Adam with L2) step in place, without waiting, with the bits of `ds_slide.optim.reference`.

    All tensors are flat [n], contiguous and on one device. n may be 0.
    weight: bf16, the upper buffer of the fp32 master, rounded half up. remainder: int16, its low 16 bits.
    exp_avg, exp_avg_sq: fp32.
    gradient: bf16, fp16 or fp32; only read.
    constants: the ten numbers of this step, in the order of `AdamWConstants`. They are Python numbers, because reading
        one from the GPU would wait. adam_w_mode: whether decay is decoupled (AdamW) or added to the gradient (Adam with
        L2).

    inf and nan in a gradient make only their own element nan or inf. Raises SlideError for another dtype, length,
    device or strides, or a tensor that requires grad.
    """
    # The operator's dispatch costs the host more than the launch: see `pack_gradients`.
    step = _adamw_split_ if torch.compiler.is_compiling() else _launch
    step(weight, remainder, exp_avg, exp_avg_sq, gradient, list(constants), adam_w_mode)
