"""The codec of LSP-Offload: a unit of matrices whose gradients go down as PᵀGQ, and whose updates come back as PDQᵀ."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ds_slide.compression.codec import (
    CHANGE_DTYPE,
    CHANGE_START,
    GradientCodec,
    GradientSpan,
    Masters,
    ParameterGradients,
    SegmentStep,
    square_sum,
)
from ds_slide.compression.lsp.group import Group, Matrix, group_of, grouped
from ds_slide.compression.lsp.projection import compress, decompress_apply
from ds_slide.compression.lsp.projector import Projector, projector_bytes, random_projector
from ds_slide.config import CompressionConfig
from ds_slide.model.layout import Entry, ParameterInfo, Segment, UnitLayout, build_layout, pieces
from ds_slide.optim.adamw import AdamWHyper
from ds_slide.optim.rounding import keys, step_key
from ds_slide.optim.rule import Hyper

LEAST_SUBSPACE = 16
"""The smallest subspace. Below it the gradient is copied as it is: padding and launches would cost more."""

CHANGE_RUN = 1 << 20
"""Elements of a change that are computed at once. All of them begin from the same weights, which take 4 MiB and stay in
the processor's cache."""


@functools.cache
def _begin_of_changes() -> torch.Tensor:
    return torch.full((CHANGE_RUN,), CHANGE_START, dtype=CHANGE_DTYPE)


def subspace(shape: Sequence[int], d: int) -> int:
    """Return the rows and columns of a compressed gradient of `shape`, 0 where it is not compressed."""
    if len(shape) != 2:
        return 0
    size = min(d, min(shape) // 2)
    return size if size >= LEAST_SUBSPACE else 0


@dataclass(frozen=True)
class Pair:
    """The projectors of one matrix, P [rows, d] and Q [columns, d]."""

    left: Projector
    right: Projector

    def to(self, device: torch.device | str) -> Pair:
        return Pair(self.left.to(device), self.right.to(device))


@dataclass
class Lsp(GradientCodec):
    """A `GradientCodec` for a unit of matrices on the GPU. Gradients leave in `dtype`, rounded from fp32.

    Each of several ranks compresses its own gradient with the same projectors. PᵀGQ is linear in G, so each rank holds
    a part of the mean, like with exact gradients. The change is put together from all parts, and each rank applies the
    whole change to its own weights. The weights stay the same to the bit: the change has the same bits on all ranks,
    and no kernel's sums depend on time.

    Owner of `pairs` and of the tensors behind their views: the compute thread and its stream. They encode with the
    projectors, and overwrite them while the unit is settled (the host or that stream has waited for the last change).
    In between, the lane that applies a change reads them on its own stream, behind a marker of the compute stream that
    was made after they were written. All units share the workspaces: the compute stream always owns `encoding`, and
    that lane always owns `applying`.
    """

    layout: UnitLayout
    dtype: torch.dtype
    settings: CompressionConfig
    encoded: UnitLayout = field(init=False)
    """The layout of the compressed gradients: this rank's part and, in slot layout, the parts of all ranks."""
    matrices: Sequence[Matrix] = field(init=False)
    groups: Sequence[Group] = field(init=False, default=())
    encoding: torch.Tensor = field(init=False)
    """At least `encode_bytes` bytes."""
    applying: torch.Tensor = field(init=False)
    """At least `apply_bytes` bytes in `CHANGE_DTYPE`: a change, its transposed matrices, products."""

    def __post_init__(self) -> None:
        assert self.settings.d != "auto"
        sizes = [subspace(entry.shape, self.settings.d) for entry in self.layout.entries]
        infos = [
            ParameterInfo(entry.name, (d, d), d * d, entry.group)
            for entry, d in zip(self.layout.entries, sizes, strict=True)
        ]
        self.encoded = build_layout(infos, self.layout.world_size)
        self.matrices = list(map(Matrix, self.layout.entries, sizes, self.encoded.entries))

    def begin(self, device: torch.device, encoding: torch.Tensor, applying: torch.Tensor) -> None:
        """Draw the projectors, and take the workspaces."""
        self.encoding, self.applying = encoding, applying
        groups: list[Group] = []
        for matrices in grouped(self.matrices):
            first = groups[-1].numbers.stop if groups else 0
            groups.append(group_of(first, matrices, [self._random_pair(each, device) for each in matrices], device))
        self.groups = groups

    def _random_pair(self, matrix: Matrix, device: torch.device) -> list[Projector]:
        # The name is part of the seed, so that the numbers do not depend on how the model is cut into units.
        generator = torch.Generator().manual_seed(self.settings.seed ^ zlib.crc32(matrix.entry.name.encode()))
        sizes = matrix.d, self.r_of(matrix)
        return [random_projector(side, *sizes, generator, device) for side in matrix.entry.shape]

    @property
    def pairs(self) -> list[Pair]:
        """The projectors of each matrix."""
        sides = ((group.left.projectors, group.right.projectors) for group in self.groups)
        return [Pair(*pair) for left, right in sides for pair in zip(left, right, strict=True)]

    def replace(self, number: int, pair: Pair) -> None:
        """Overwrite the projectors of a matrix. The unit has settled."""
        old = self.pairs[number]
        old.left.copy_(pair.left)
        old.right.copy_(pair.right)

    def r_of(self, matrix: Matrix) -> int:
        """Return the numbers in a row of the matrix's projectors."""
        return min(self.settings.r, matrix.d)

    @property
    def numel(self) -> int:
        return self.encoded.trainable_numel

    @property
    def whole_numel(self) -> int:
        """Elements of the encoded gradient, or of the change, of all ranks."""
        return self.encoded.slot_trainable_numel

    def masters(self, weight_bytes: int, *, rounded: bool) -> Mapping[str, int]:
        whole = self.layout.slot_numel
        # An fp32 weight is its own master, and a bf16 weight needs its low half unless it is rounded.
        remainder = {} if rounded or weight_bytes == 4 else {"remainder": 2 * whole}
        return {"weight": whole * weight_bytes, **remainder, "projectors": self.projector_bytes}

    @property
    def written_numel(self) -> int:
        return self.numel

    def written_itemsize(self, weight_bytes: int) -> int:  # noqa: ARG002
        return CHANGE_DTYPE.itemsize

    def written_dtype(self, weight: torch.dtype) -> torch.dtype:  # noqa: ARG002
        return CHANGE_DTYPE

    @property
    def update_run(self) -> int:
        return CHANGE_RUN

    def update_begin(self, written: torch.Tensor) -> torch.Tensor:
        return _begin_of_changes()[: written.numel()]

    @property
    def projector_bytes(self) -> int:
        sides = [(side, matrix) for matrix in self.matrices for side in matrix.entry.shape]
        return sum(projector_bytes(side, matrix.d, self.r_of(matrix)) for side, matrix in sides)

    @property
    def encode_bytes(self) -> int:
        return self._whole_bytes + max(
            sum(8 * each.member.partials + 4 * each.member.product for each in group)
            for group in grouped(self.matrices)
        )

    @property
    def _whole_bytes(self) -> int:
        """Bytes at the beginning of the workspace of `encode`, for a whole encoded gradient before it is split for the
        ranks."""
        return self.whole_numel * self.dtype.itemsize if self.layout.world_size > 1 else 0

    @property
    def apply_bytes(self) -> int:
        products = (sum(each.member.product for each in group) for group in grouped(self.matrices))
        return CHANGE_DTYPE.itemsize * (2 * self.whole_numel + max(products))

    @property
    def encode_traffic(self) -> int:
        # Each number of P reads a row of G. PᵀG is written and read. Each number of Q reads a row of PᵀG.
        return sum(
            self.r_of(each) * (2 * each.entry.numel + 4 * each.product_numel) + 8 * each.product_numel
            for each in self.matrices
        )

    def apply_traffic(self, master_bytes: int) -> int:
        # The same traffic on the way back, all in fp32. The masters are read and written.
        return sum(
            4 * self.r_of(each) * (each.entry.numel + each.product_numel)
            + 2 * master_bytes * each.entry.numel
            + 8 * each.product_numel
            for each in self.matrices
        )

    @property
    def segments(self) -> Sequence[Segment]:
        return self.encoded.segments

    @property
    def entries(self) -> Sequence[Entry]:
        return self.encoded.entries

    def encode(
        self,
        gradients: ParameterGradients,
        out: torch.Tensor,
        *,
        accumulate: bool,
        sums: bool = True,  # noqa: ARG002 - the norm of a step needs those of all micro-batches
    ) -> torch.Tensor:
        out = out[: self.whole_numel]
        encode = self.encode_in_groups if out.is_cuda else self.encode_one_by_one
        return encode(gradients, out, accumulate=accumulate)

    def encode_in_groups(self, gradients: ParameterGradients, out: torch.Tensor, *, accumulate: bool) -> torch.Tensor:
        """Encode by the GPU kernels, with a few launches for all matrices of a group."""
        from ds_slide.kernels.lsp.grouped_encode import encode_

        gradients = [None if each is None else each.contiguous() for each in gradients]
        total = torch.empty((), dtype=torch.float64, device=out.device)
        for group in self.groups:
            encode_(
                group,
                gradients[group.numbers],
                out,
                self.dtype,
                self.encoding[self._whole_bytes :],
                total,
                accumulate=accumulate,
                adds=group.first > 0,
            )
        return total

    def encode_one_by_one(self, gradients: ParameterGradients, out: torch.Tensor, *, accumulate: bool) -> torch.Tensor:
        """Encode one matrix at a time, on any device, with the same bits in `out`."""
        total = torch.zeros((), dtype=torch.float64, device=out.device)
        if not accumulate:
            out.zero_()  # gaps between the matrices, and matrices without a gradient
        for matrix, pair, gradient in zip(self.matrices, self.pairs, gradients, strict=True):
            if gradient is None:
                continue
            gradient = gradient.contiguous()
            total += square_sum(gradient.view(-1))
            compressed = torch.empty(matrix.d, matrix.d, device=out.device)
            compress(gradient, pair.left, pair.right, compressed, accumulate=False)
            matrix.within(out).add_(compressed.to(self.dtype))
        return total

    def encode_for_ranks(self, gradients: ParameterGradients, out: torch.Tensor) -> torch.Tensor:
        whole = self.encoding[: self._whole_bytes].view(self.dtype)
        summed = self.encode(gradients, whole, accumulate=False)
        out.zero_()  # padding of the parts
        targets, sources = [], []
        for rank, part, place in pieces(self.encoded):
            targets.append(out[rank * self.numel + part.start : rank * self.numel + part.stop])
            sources.append(whole[place])
        torch._foreach_copy_(targets, sources)
        return summed

    def encode_in_place(self, gradients: ParameterGradients) -> list[GradientSpan]:
        raise NotImplementedError("gradients of outer modules, which are not packed, are not compressed")

    def apply(
        self, written: Sequence[torch.Tensor], span: slice, masters: Masters, steps: Sequence[SegmentStep]
    ) -> int:
        assert (span.start, span.stop) == (0, self.numel)
        change = self.applying[: self.whole_numel]
        if len(written) == 1:
            change.copy_(written[0], non_blocking=True)
        else:
            for rank, part, place in pieces(self.encoded):
                change[place].copy_(written[rank][part], non_blocking=True)
        # A matrix without a step has the change of an earlier update in `change`, so it is left out.
        hypers = {
            number: hyper
            for number, matrix in enumerate(self.matrices)
            if (hyper := _hyper_at(steps, matrix.encoded.offset)) is not None
        }
        if len(hypers) == len(self.matrices) and len({hyper.step for hyper in hypers.values()}) == 1:
            apply = self.apply_in_groups if change.is_cuda else self.apply_one_by_one
            apply(change, masters, [_decay(hyper) for hyper in hypers.values()], self._key(masters, hypers[0].step))
        else:
            for number, hyper in hypers.items():
                self._apply_one(number, change, masters, _decay(hyper), self._key(masters, hyper.step))
        return self.whole_numel * CHANGE_DTYPE.itemsize

    def _key(self, masters: Masters, step: int) -> int | None:
        """Return the key of a step's random bits, None where masters are not rounded."""
        return step_key(self.settings.seed, step) if masters.are_rounded else None

    def apply_in_groups(
        self, change: torch.Tensor, masters: Masters, decays: Sequence[float], key: int | None = None
    ) -> None:
        """Compute W = decay * W + PDQᵀ by the GPU kernels, with a few launches for all matrices of a group. `key`: the
        step's key, for masters that are rounded."""
        from ds_slide.kernels.lsp.grouped_apply import apply_

        _, transposed, products = self.applying.tensor_split([self.whole_numel, 2 * self.whole_numel])
        for group in self.groups:
            apply_(group, masters.weight, masters.remainder, change, decays[group.numbers], key, transposed, products)

    def apply_one_by_one(
        self, change: torch.Tensor, masters: Masters, decays: Sequence[float], key: int | None = None
    ) -> None:
        """Compute W = decay * W + PDQᵀ one matrix at a time, on any device, with the same bits."""
        for number, decay in enumerate(decays):
            self._apply_one(number, change, masters, decay, key)

    def _apply_one(self, number: int, change: torch.Tensor, masters: Masters, decay: float, key: int | None) -> None:
        matrix, pair = self.matrices[number], self.pairs[number]
        decompress_apply(
            matrix.of_weights(masters.weight),
            None if masters.remainder is None else matrix.of_weights(masters.remainder),
            matrix.within(change),
            pair.left,
            pair.right,
            decay=decay,
            scale=1.0,
            keys=None if key is None else keys(key, matrix.upper_half),
        )


def _hyper_at(steps: Sequence[SegmentStep], offset: int) -> Hyper | None:
    """Return the hyper-parameters of the step on element `offset`, None where there is none."""
    found = (each.hyper for each in steps if each.segment.start <= offset < each.segment.stop)
    return next(found, None)


def _decay(hyper: Hyper) -> float:
    assert isinstance(hyper, AdamWHyper) and hyper.adam_w_mode
    return hyper.constants().decay
