"""The products of LSP-Offload in plain torch, on any device: the reference that the kernels match bit by bit."""

from __future__ import annotations

import torch
from torch import Tensor

from ds_slide.compression.lsp.projector import Projector
from ds_slide.optim.reference import decode_split, encode_split
from ds_slide.optim.rounding import Keys, add, bits_of, flush, mul, round_bf16

# Elements of a weight that are decompressed at once.
_PART = 1 << 22


def project(matrix: Tensor, projector: Projector) -> Tensor:
    """Return XᵀP, [k, d] fp32, for X [rows, k]. Terms are added by ascending row."""
    columns, values = projector.columns, projector.values.view(-1)
    counts = columns.starts.diff()
    total = _nothing(projector.d, matrix)
    for place in range(int(counts.max())):
        those = (counts > place).nonzero().view(-1)
        entries = columns.entries[columns.starts[those].long() + place].long()
        total[those] += values[entries, None] * matrix[entries // projector.r].float()
    return total.T.contiguous()


def expand(matrix: Tensor, projector: Projector, rows: slice = slice(None)) -> Tensor:
    """Return the `rows` of PX, [rows, k] fp32, for X [d, k]. Terms are added by ascending column."""
    indices, values = projector.indices[rows].long(), projector.values[rows]
    total = _nothing(len(indices), matrix)
    for place in range(projector.r):
        total += values[:, place, None] * matrix[indices[:, place]].float()
    return total


def compress_(gradient: Tensor, left: Projector, right: Projector, out: Tensor, accumulate: bool) -> None:
    """Do `projection.compress` with checked arguments."""
    compressed = project(project(gradient, left), right)
    out.copy_(out + compressed if accumulate else compressed)


def apply_(
    weight: Tensor,
    remainder: Tensor | None,
    update: Tensor,
    left: Projector,
    right: Projector,
    decay: float,
    scale: float,
    keys: Keys | None,
) -> None:
    """Do `projection.decompress_apply` with checked arguments."""
    expanded = expand(update.T, right).T
    for part in _parts(weight):
        old = weight[part].float() if remainder is None else decode_split(weight[part], remainder[part])
        new = add(mul(flush(old), decay), mul(flush(expand(expanded, left, part)), scale))
        if remainder is not None:
            high, low = encode_split(new)
            weight[part] = high.view(torch.bfloat16)
            remainder[part] = low
        elif keys is not None:
            random = bits_of(keys, part.start * weight.shape[1], new.numel(), weight.device)
            weight[part] = round_bf16(new.view(-1), random >> 16).view_as(new)
        else:
            weight[part] = new


def residual_square_sums(gradient: Tensor, compressed: Tensor, left: Projector, right: Projector) -> Tensor:
    """Do `projection.residual_square_sums` with checked arguments, [2] fp64. `compressed` is PᵀGQ."""
    expanded = expand(compressed.T, right).T
    sums = torch.zeros(2, dtype=torch.float64, device=gradient.device)
    for part in _parts(gradient):
        own = gradient[part].double()
        lost = expand(expanded, left, part).double() - own
        sums += torch.stack([lost.square().sum(), own.square().sum()])
    return sums


def sampled(projector: Projector, own: Tensor, matrix: Tensor, factor: Tensor) -> Tensor:
    """Do `projection.sampled`."""
    columns = projector.indices.long()
    pairs = own[columns[:, None, :], columns[:, :, None] % own.shape[1]]  # [rows, of the result, of P]
    return (pairs * projector.values[:, None, :]).sum(dim=2) + (factor[columns] * matrix[:, None]).sum(dim=2)


def _nothing(rows: int, beside: Tensor) -> Tensor:
    """Return a tensor of -0.0, which changes no number when it is added, not even -0.0."""
    return torch.full((rows, beside.shape[1]), -0.0, dtype=torch.float32, device=beside.device)


def _parts(matrix: Tensor) -> list[slice]:
    """Cut the rows of `matrix` into parts: the fp64 temporaries of a whole matrix would be gigabytes."""
    rows, columns = matrix.shape
    step = max(1, _PART // columns)
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]
