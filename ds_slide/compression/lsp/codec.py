"""The codec of LSP-Offload: a unit of matrices whose gradients go down as PᵀGQ, and whose updates come back as PDQᵀ."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch

from ds_slide.compression.codec import CHANGE_DTYPE, Gradients, Masters, Place
from ds_slide.compression.lsp.projection import compress, decompress_apply
from ds_slide.compression.lsp.projector import Projector, projector_bytes, random_projector
from ds_slide.config import CompressionConfig
from ds_slide.model.layout import Entry, Segment, UnitLayout, align_up
from ds_slide.optim.adamw import AdamWHyper
from ds_slide.optim.rule import Hyper
from ds_slide.optim.square_sum import square_sum

LEAST_SUBSPACE = 16
"""Below it the gradient itself goes down: padding and launches would cost more than its bytes."""


def subspace(shape: Sequence[int], d: int) -> int:
    """Rows and columns of what a gradient of `shape` is compressed to; 0 where it goes down as it is."""
    if len(shape) != 2:
        return 0
    size = min(d, min(shape) // 2)
    return size if size >= LEAST_SUBSPACE else 0


@dataclass(frozen=True)
class Matrix:
    """A matrix of the unit. `start`: of its d * d elements in the encoded gradient."""

    entry: Entry
    d: int
    start: int

    @property
    def numel(self) -> int:
        return self.d * self.d

    @property
    def product_numel(self) -> int:
        """Elements of the product with one of its projectors."""
        return self.d * self.entry.shape[1]

    @property
    def stop(self) -> int:
        return self.start + align_up(self.numel)

    def within(self, encoded: torch.Tensor) -> torch.Tensor:
        """Its part of an encoded gradient, of a state or of a change, [d, d]."""
        return encoded[self.start : self.start + self.numel].view(self.d, self.d)

    def of_weights(self, buffer: torch.Tensor) -> torch.Tensor:
        """Its part of a buffer in slot layout, in its shape."""
        entry = self.entry
        return buffer[entry.slot_offset : entry.slot_offset + entry.numel].view(entry.shape)


@dataclass
class Pair:
    """The projectors of one matrix, P [rows, d] and Q [columns, d]."""

    left: Projector
    right: Projector


@dataclass
class Lsp:
    """Gradients of a unit of matrices that are on the GPU: a `GradientCodec`. They leave in `dtype`, rounded from fp32.

    Owners of `pairs`: the compute thread, which encodes by them and replaces them while the unit has settled; the lane
    that applies a change reads them in between. Of `changes` ([>= numel], `CHANGE_DTYPE`, on the GPU, of all units):
    that lane.
    """

    layout: UnitLayout
    dtype: torch.dtype
    settings: CompressionConfig
    matrices: Sequence[Matrix] = field(init=False)
    pairs: list[Pair] = field(init=False, default_factory=list)
    changes: torch.Tensor | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        assert self.settings.d != "auto"
        self.matrices = list(_matrices(self.layout, self.settings.d))

    def begin(self, device: torch.device, changes: torch.Tensor) -> None:
        """Draw the projectors, and take the buffer through which changes come."""
        self.changes = changes
        self.pairs = [self._random_pair(matrix, device) for matrix in self.matrices]

    def _random_pair(self, matrix: Matrix, device: torch.device) -> Pair:
        # By its name, so that the numbers do not depend on how the model is cut into units.
        generator = torch.Generator().manual_seed(self.settings.seed ^ zlib.crc32(matrix.entry.name.encode()))
        rows, columns = matrix.entry.shape
        sides = (random_projector(side, matrix.d, self.r_of(matrix), generator, device) for side in (rows, columns))
        return Pair(*sides)

    def r_of(self, matrix: Matrix) -> int:
        """Numbers in a row of its projectors."""
        return min(self.settings.r, matrix.d)

    @property
    def numel(self) -> int:
        return self.matrices[-1].stop

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def compresses(self) -> bool:
        return True

    @property
    def gpu_bytes(self) -> int:
        sides = [(side, matrix) for matrix in self.matrices for side in matrix.entry.shape]
        return sum(projector_bytes(side, matrix.d, self.r_of(matrix)) for side, matrix in sides)

    @property
    def encode_traffic(self) -> int:
        # By row of P a row of G for each of its numbers; PᵀG written and read; by row of Q one of that for each.
        return sum(
            self.r_of(each) * (2 * each.entry.numel + 4 * each.product_numel) + 8 * each.product_numel
            for each in self.matrices
        )

    @property
    def apply_traffic(self) -> int:
        # The same way back, all in fp32, and the masters read and written.
        return sum((4 * self.r_of(each) + 8) * (each.entry.numel + each.product_numel) for each in self.matrices)

    @property
    def segments(self) -> Sequence[Segment]:
        by_group = [list(run) for _, run in groupby(self.matrices, key=lambda matrix: matrix.entry.group)]
        return [Segment(run[0].entry.group or 0, run[0].start, run[-1].stop) for run in by_group]

    def encode(self, gradients: Gradients, out: torch.Tensor, *, accumulate: bool) -> torch.Tensor:
        out = out[: self.numel]
        total = torch.zeros((), dtype=torch.float64, device=out.device)
        if not accumulate:
            out.zero_()  # gaps between the matrices, and those without a gradient
        for matrix, pair, gradient in zip(self.matrices, self.pairs, gradients, strict=True):
            if gradient is None:
                continue
            gradient = gradient.contiguous()
            total += square_sum(gradient.view(-1))
            compressed = torch.empty(matrix.d, matrix.d, device=out.device)
            compress(gradient, pair.left, pair.right, compressed, accumulate=False)
            matrix.within(out).add_(compressed.to(self.dtype))
        return total

    def encode_for_ranks(self, gradients: Gradients, out: torch.Tensor) -> None:
        raise NotImplementedError("gradients are compressed on one rank only, which the contract sees to")

    def encode_in_place(self, gradients: Gradients) -> list[Place]:
        raise NotImplementedError("gradients of outer modules, which are not packed, are not compressed")

    def apply(self, written: torch.Tensor, span: slice, masters: Masters, hypers: Sequence[Hyper]) -> int:
        assert self.changes is not None and (span.start, span.stop) == (0, self.numel)
        change = self.changes[: self.numel]
        change.copy_(written[span], non_blocking=True)
        for matrix, pair in zip(self.matrices, self.pairs, strict=True):
            hyper = hypers[matrix.entry.group or 0]
            assert isinstance(hyper, AdamWHyper) and hyper.adam_w_mode
            decompress_apply(
                matrix.of_weights(masters.weight),
                None if masters.remainder is None else matrix.of_weights(masters.remainder),
                matrix.within(change),
                pair.left,
                pair.right,
                decay=hyper.constants().decay,
                scale=1.0,
                seed=0,  # of stochastic rounding, which split and fp32 masters do without
            )
        return self.numel * CHANGE_DTYPE.itemsize


def _matrices(layout: UnitLayout, d: int) -> Iterator[Matrix]:
    start = 0
    for entry in layout.entries:
        matrix = Matrix(entry, subspace(entry.shape, d), start)
        start = matrix.stop
        yield matrix
