"""The products of LSP-Offload (arXiv 2406.10181): a gradient's compression and the update of a weight.

On a GPU the kernels of `ds_slide.kernels.lsp` compute them, elsewhere plain torch (`in_torch`). Both give the same
bits: every fp32 operation is rounded by itself, and sums run over ascending rows or columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ds_slide.compression.lsp import in_torch
from ds_slide.compression.lsp.projector import Projector
from ds_slide.errors import SlideError
from ds_slide.kernels.dtypes import KERNEL_DTYPES
from ds_slide.optim.rounding import Keys
from ds_slide.optim.rule import fp32


def compress(gradient: Tensor, left: Projector, right: Projector, out: Tensor, *, accumulate: bool) -> None:
    """Compute out = PᵀGQ, or with `accumulate` out += PᵀGQ, without waiting.

    gradient: G [m, n], bf16, fp16 or fp32, contiguous. left: P [m, d1]. right: Q [n, d2]. out: [d1, d2] fp32,
    contiguous. nan and inf go to the elements of `out` whose columns have non-zeros in their row and column.

    Products are rounded to fp32 and added in fp32, in ascending order of m, then of n. The bits are the same in every
    run. Where P and Q are permutations, `out` has the bits of G. Raises SlideError for other shapes, dtypes, devices or
    strides.
    """
    _require_matrix("compress", "gradient", gradient, KERNEL_DTYPES, (left.rows, right.rows), left)
    _require_matrix("compress", "out", out, (torch.float32,), (left.d, right.d), right)
    if gradient.is_cuda:
        from ds_slide.kernels.lsp.gather_sum import compress_

        compress_(gradient, left, right, out, accumulate)
    else:
        in_torch.compress_(gradient, left, right, out, accumulate)


def decompress_apply(
    weight: Tensor,
    remainder: Tensor | None,
    update: Tensor,
    left: Projector,
    right: Projector,
    *,
    decay: float,
    scale: float,
    keys: Keys | None = None,
) -> None:
    """Compute W = decay * W + scale * PDQᵀ in fp32, in place, without waiting.

    weight: W [m, n], contiguous, in one of three formats. bf16 with `remainder`, its low 16 bits (int16 [m, n]), is the
    split master, which holds fp32 exactly. bf16 with `keys` is rounded stochastically: element (i, j) by the upper half
    of the random bits of number i * n + j. The third is fp32. update: D [d1, d2], fp32 or bf16, contiguous.
    left: P [m, d1]. right: Q [n, d2].

    Each operation is rounded to fp32 by itself: decay * W, the sums E = DQᵀ and PE, each over ascending columns,
    scale * PE, and the last sum. Subnormal operands and results count as zero. W gets the bits of AdamW
    (csrc/update/adamw.hpp) in one case: P and Q are permutations, decay = 1 - lr * weight_decay, scale = 1, and D is
    AdamW's new weight for an old one of -0.0 without decay. Raises SlideError for other shapes, dtypes, devices or
    strides.
    """
    name, shape = "decompress_apply", (left.rows, right.rows)
    split = remainder is not None
    kind = torch.float32 if keys is None and not split else torch.bfloat16
    _require_matrix(name, "weight", weight, (kind,), shape, left)
    if remainder is not None:
        _require_matrix(name, "remainder", remainder, (torch.int16,), shape, left)
    _require_matrix(name, "update", update, (torch.float32, torch.bfloat16), (left.d, right.d), right)
    if weight.numel() > 1 << 32:
        raise SlideError(f"{name}: the weight has {weight.numel()} elements, but random bits are drawn for 2^32.")
    if weight.is_cuda:
        from ds_slide.kernels.lsp.apply import apply_

        apply_(weight, remainder, update, left, right, fp32(decay), fp32(scale), keys)
    else:
        in_torch.apply_(weight, remainder, update, left, right, fp32(decay), fp32(scale), keys)


def project(matrix: Tensor, projector: Projector) -> Tensor:
    """Return XᵀP, [k, d] fp32, without waiting. X [rows, k]: bf16, fp16 or fp32, contiguous. P: [rows, d].

    Products are rounded and added like in `compress`. Raises SlideError for other shapes, dtypes, devices or strides.
    """
    _require_matrix("project", "matrix", matrix, KERNEL_DTYPES, (projector.rows, matrix.shape[-1]), projector)
    if not matrix.is_cuda:
        return in_torch.project(matrix, projector)
    from ds_slide.kernels.lsp.gather_sum import project as run

    return run(matrix, projector)


def sampled(projector: Projector, own: Tensor, matrix: Tensor, factor: Tensor) -> Tensor:
    """Return P @ own + X @ Fᵀ at the non-zeros of P [rows, d], [rows, r] fp32, without waiting.

    own: [d, d], or for projectors `beside` each other one such matrix for each, below one another. X (matrix):
    [rows, k]. F (factor): [d, k]. All are fp32 and contiguous. The order of the sums is fixed for a device, but differs
    between devices.
    """
    if not matrix.is_cuda:
        return in_torch.sampled(projector, own, matrix, factor)
    from ds_slide.kernels.lsp.sampled import sampled as run

    return run(projector, own, matrix, factor)


def residual_square_sums(gradient: Tensor, left: Projector, right: Projector) -> Tensor:
    """Return |PPᵀGQQᵀ - G|^2 and |G|^2, [2] fp64 on G's device, without waiting and without a matrix of G's size.

    gradient, left, right and the errors: see `compress`.
    """
    compressed = torch.empty(left.d, right.d, dtype=torch.float32, device=gradient.device)
    compress(gradient, left, right, compressed, accumulate=False)
    if not gradient.is_cuda:
        return in_torch.residual_square_sums(gradient, compressed, left, right)
    from ds_slide.kernels.lsp.apply import residual_square_sums as run

    return run(gradient, compressed, left, right)


def temporary_bytes(columns: int, left_d: int, right_d: int) -> int:
    """Return the bytes that `compress` and `decompress_apply` of a weight [m, columns] allocate on the GPU."""
    return 4 * left_d * (columns + right_d)


def _require_matrix(
    function: str,
    name: str,
    matrix: Tensor,
    dtypes: tuple[torch.dtype, ...],
    shape: tuple[int, int],
    beside: Projector,
) -> None:
    if tuple(matrix.shape) != shape or matrix.dtype not in dtypes or not matrix.is_contiguous():
        raise SlideError(
            f"{function}: {name} must be contiguous, {' or '.join(map(str, dtypes))} and of shape {list(shape)}, but "
            f"it is {matrix.dtype} of shape {list(matrix.shape)} and strides {list(matrix.stride())}."
        )
    if matrix.device != beside.device:
        raise SlideError(f"{function}: {name} is on {matrix.device}, but its projector on {beside.device}.")
    if matrix.requires_grad and torch.is_grad_enabled():
        raise SlideError(f"{function}: {name} requires grad, but no graph can go through it; pass its `detach()`.")
