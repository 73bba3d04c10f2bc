"""The interface of a gradient codec: what leaves the GPU for a unit's gradient, and what comes back.

    GPU       encode the parameters' gradients, into a staging buffer or where they lie
    d2h       `numel` elements of `dtype`
    update    one step of the optimizer states, which have an item for each of these elements
    h2d       the result of the step: weights, in their state buffer, or a change of them
    GPU       `apply` it to the weights that modules read

A codec with `masters` compresses: a step writes no weights, but their change. It starts from weights of -0.0 in
`CHANGE_DTYPE`. Decay does not move them, and their change is exact (-0.0 - x is -x, also for zeros of both signs). The
weights are on the GPU with the remainders of their masters, and are decayed there.

A codec is made from a unit's layout, before the plan, which asks it for its bytes. It belongs to that unit for the run;
`ds_slide.runtime.core.settings` chooses it. Units that pass through the window are fetched as weights, so a codec with
masters is for units that stay on the GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from ds_slide.model.layout import Entry, Segment, UnitLayout, align_up, piece
from ds_slide.optim.rule import Hyper

CHANGE_DTYPE = torch.float32
"""The data type of a change of the weights."""
CHANGE_START = -0.0

ParameterGradients = Sequence[torch.Tensor | None]
"""Gradients of a unit's trainable parameters in the order of its layout, as autograd left them; None: no gradient."""


@dataclass(frozen=True)
class Masters:
    """The weights of a unit on the GPU, [slot_numel] in slot layout, and their remainders if any. Each rank has the
    parts of all ranks."""

    weight: torch.Tensor
    remainder: torch.Tensor | None = None

    @property
    def are_rounded(self) -> bool:
        """Whether changes are rounded stochastically: for bf16 weights without remainder."""
        return self.weight.dtype == torch.bfloat16 and self.remainder is None


@dataclass(frozen=True)
class SegmentStep:
    """One step of an update rule on one span of elements."""

    segment: Segment
    hyper: Hyper


@dataclass(frozen=True)
class GradientSpan:
    """Elements [start, start + numel) of an encoded gradient where they lie on the GPU. None stands for zeros."""

    start: int
    numel: int
    flat: torch.Tensor | None


class GradientCodec:
    """Encodes gradients on the compute thread and stream, before sums of micro-batches and the collectives. So encoding
    is linear. No method waits for the GPU.

    The methods with a body are those of a codec whose step writes the weights themselves."""

    dtype: torch.dtype
    """The data type of gradients when they are reduced and leave the GPU."""

    @property
    def numel(self) -> int:
        """Elements of this rank's encoded gradient with padding, and items of each of its states."""
        raise NotImplementedError

    @property
    def nbytes(self) -> int:
        """Bytes of the encoded gradient that leave the GPU."""
        return self.numel * self.dtype.itemsize

    def masters(self, weight_bytes: int, *, rounded: bool) -> Mapping[str, int]:  # noqa: ARG002
        """Return the bytes of what the codec keeps on the GPU, by state buffer: the weights that `apply` changes, their
        remainders unless they are `rounded`, and projectors. Empty where a step writes the weights themselves:
        `UnitState.writes_change` tells the same for a built unit. `weight_bytes`: bytes of one weight."""
        return {}

    @property
    def written_numel(self) -> int:
        """Elements of the buffer that a step writes: this rank's weights, frozen ones included, or a change."""
        raise NotImplementedError

    def written_itemsize(self, weight_bytes: int) -> int:
        """Return the bytes of each of these elements."""
        return weight_bytes

    def written_dtype(self, weight: torch.dtype) -> torch.dtype:
        """Return the data type that a step writes, for weights of data type `weight`."""
        return weight

    @property
    def update_run(self) -> int:
        """The most elements that the CPU updates in one call."""
        raise NotImplementedError

    def update_begin(self, written: torch.Tensor) -> torch.Tensor:
        """Return the weights that a step begins from, of the size of `written`. A step in place begins from `written`
        itself."""
        return written

    def packed_itemsize(self, weight_bytes: int) -> int:  # noqa: ARG002
        """Return the bytes of an element that `encode_for_ranks` writes. Fewer than those of `dtype`: it writes the
        weights' data type, which autograd's gradients have. `weight_bytes`: bytes of a weight."""
        return self.dtype.itemsize

    @property
    def lies_as_parts(self) -> bool:
        """Whether a gradient, as autograd leaves it, lies as `encode_for_ranks` writes it. With several ranks only."""
        return False

    @property
    def encode_bytes(self) -> int:
        """Bytes of the GPU workspace of `encode`, which all units share on the compute stream. A multiple of 4."""
        return 0

    @property
    def apply_bytes(self) -> int:
        """Bytes of the GPU workspace of `apply`, with room for an uploaded change. All units share it on the stream
        that applies. A multiple of 4."""
        return 0

    @property
    def encode_traffic(self) -> int:
        """Bytes of GPU memory that `encode` reads and writes beyond a copy of the gradient."""
        return 0

    def apply_traffic(self, master_bytes: int) -> int:  # noqa: ARG002
        """Return the bytes of GPU memory that `apply` reads and writes beyond a copy of the weights. `master_bytes`:
        bytes of one element of the masters."""
        return 0

    @property
    def segments(self) -> Sequence[Segment]:
        """Spans of one parameter group each, which cover [0, numel) without gaps. An update is a step on each."""
        raise NotImplementedError

    @property
    def entries(self) -> Sequence[Entry]:
        """The place of each trainable parameter in [0, numel), in the order of `ParameterGradients`."""
        raise NotImplementedError

    def encode(
        self, gradients: ParameterGradients, out: torch.Tensor, *, accumulate: bool, sums: bool = True
    ) -> torch.Tensor | None:
        """Write or add the encoded gradient, rounded to `dtype`, to `out` ([>= numel], any dtype). With one rank only.

        Returns the square sum of the gradient that `out` then holds, [] fp64, where the same pass gives it. If the
        codec has masters, it is the square sum of `gradients` alone. None: the caller sums the squares of `out`, if it
        needs the sum. `sums`: whether it does.
        """
        raise NotImplementedError

    def encode_for_ranks(self, gradients: ParameterGradients, out: torch.Tensor) -> torch.Tensor | None:
        """Write each rank's part of this rank's gradient to `out` ([world_size * numel], rank-major; see
        `packed_itemsize`). The parts are averaged afterwards. With several ranks only.

        Returns the square sum of `gradients`, [] fp64, where the codec has masters.
        """
        raise NotImplementedError

    def encode_in_place(self, gradients: ParameterGradients) -> list[GradientSpan]:
        """Return the encoded gradient without a buffer of its size: ascending places that cover [0, numel) without
        gaps. With one rank only."""
        raise NotImplementedError

    def in_place_for_ranks(self, gradients: ParameterGradients) -> torch.Tensor | None:
        """Return what `encode_for_ranks` writes where autograd left it, in autograd's data type; None stands for zeros.
        Where `lies_as_parts` only. The caller must not write it: a client's hook may hold the gradient."""
        raise NotImplementedError

    def apply(
        self, written: Sequence[torch.Tensor], span: slice, masters: Masters, steps: Sequence[SegmentStep]
    ) -> int:
        """Bring the elements `span` of an update's result to `masters`, on the current stream, and return the bytes
        moved. `written`: the page-locked results by rank. `steps`: the steps of that update. Several ranks call this
        only if the codec has masters, and all of them then get the same bits from the same bits."""
        raise NotImplementedError


def square_sum(flat: torch.Tensor) -> torch.Tensor:
    """Return the sum of squares of a flat tensor as a 0-d fp64 tensor on its device. inf and nan propagate.

    The clip factor must not depend on the tier of a unit, but the CPU sums in another order than the GPU. In fp64 the
    two sums agree to 1e-15, far more exactly than the fp32 factor that is computed from them.
    """
    if flat.is_cuda:
        from ds_slide.kernels.offload.square_sum import square_sum as square_sum_on_gpu

        return square_sum_on_gpu(flat)
    total = torch.zeros((), dtype=torch.float64, device=flat.device)
    for chunk in flat.split(1 << 22):  # 32 MiB of fp64 at a time: the temporary stays small beside one block
        wide = chunk.double()
        total += torch.dot(wide, wide)
    return total


# ----------------------------------------------------------------------------------------------------------------------
# The codec that changes nothing. The gradient itself leaves the GPU, states have the weights' shape, and the update
# writes the weights.


@dataclass(frozen=True)
class Identity(GradientCodec):
    """A `GradientCodec` that leaves the gradients of a unit of `layout` as they are, in `dtype`."""

    layout: UnitLayout
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        return self.layout.trainable_numel

    @property
    def written_numel(self) -> int:
        return self.layout.local_numel

    @property
    def update_run(self) -> int:
        return max(self.numel, 1)

    @property
    def segments(self) -> Sequence[Segment]:
        return self.layout.segments

    @property
    def entries(self) -> Sequence[Entry]:
        return [entry for entry in self.layout.entries if entry.trainable]

    @property
    def lies_as_parts(self) -> bool:
        """So lies a single parameter, if ranks divide it without padding and no alignment gap follows."""
        ranks = self.layout.world_size
        if ranks == 1 or len(self.entries) != 1:
            return False
        (entry,) = self.entries
        part = entry.partition_numel
        return entry.offset == 0 and entry.numel == ranks * part and self.numel == part

    @functools.cached_property
    def _places(self) -> tuple[list[int], list[int]]:
        """Where each parameter begins in a rank's encoded gradient, and the most elements of it that a rank has."""
        entries = self.layout.entries
        return [entry.offset for entry in entries], [entry.partition_numel for entry in entries]

    def encode(
        self, gradients: ParameterGradients, out: torch.Tensor, *, accumulate: bool, sums: bool = True
    ) -> torch.Tensor | None:
        out = out[: self.numel]
        if out.is_cuda:
            return self.encode_in_one_pass(gradients, out, accumulate=accumulate, sums=sums)
        self.encode_by_torch(gradients, out, accumulate=accumulate)
        return None

    def encode_in_one_pass(
        self, gradients: ParameterGradients, out: torch.Tensor, *, accumulate: bool, sums: bool = True
    ) -> torch.Tensor | None:
        """Encode by the GPU kernel, which also writes the alignment gaps and the parts of unused parameters."""
        from ds_slide.kernels.offload.gradient_pack import pack_gradients

        square_sum = torch.empty((), dtype=torch.float64, device=out.device) if sums else None
        offsets, _ = self._places
        given = _of_dtype(gradients, self.dtype)
        pack_gradients(given, out, offsets[: len(gradients)], square_sum, accumulate=accumulate)
        return square_sum

    def encode_by_torch(self, gradients: ParameterGradients, out: torch.Tensor, *, accumulate: bool) -> None:
        """Encode without a GPU, with the same bits."""
        given = [(entry, flat) for entry, flat in self._flat(gradients) if flat is not None]
        sources = [flat for _, flat in given]
        if not accumulate and sum(flat.numel() for flat in sources) != out.numel():
            out.zero_()  # alignment gaps and unused parameters
        targets = [out[entry.offset : entry.offset + entry.numel] for entry, _ in given]
        if targets:
            (torch._foreach_add_ if accumulate else torch._foreach_copy_)(targets, sources)

    def packed_itemsize(self, weight_bytes: int) -> int:
        return min(self.dtype.itemsize, weight_bytes)

    def encode_for_ranks(self, gradients: ParameterGradients, out: torch.Tensor) -> None:
        encode = self.encode_for_ranks_in_one_pass if out.is_cuda else self.encode_for_ranks_by_torch
        encode(gradients, out)

    def encode_for_ranks_in_one_pass(self, gradients: ParameterGradients, out: torch.Tensor) -> None:
        """Encode by the GPU kernel, which takes the gradients apart itself."""
        from ds_slide.kernels.offload.gradient_pack import pack_gradients_for_ranks

        offsets, parts = self._places
        count = len(gradients)
        given = _of_dtype(gradients, out.dtype)
        pack_gradients_for_ranks(given, out, offsets[:count], parts[:count], self.layout.world_size)

    def encode_for_ranks_by_torch(self, gradients: ParameterGradients, out: torch.Tensor) -> None:
        """Encode without a GPU, with the same bits."""
        out.zero_()  # alignment gaps, unused parameters, and the padding of the last ranks
        given = [(entry, flat) for entry, flat in self._flat(gradients, out.dtype) if flat is not None]
        targets, sources = [], []
        for rank, of_rank in enumerate(out.view(self.layout.world_size, self.numel)):
            for entry, flat in given:
                start, stop = piece(entry, rank)
                targets.append(of_rank[entry.offset : entry.offset + stop - start])
                sources.append(flat[start:stop])
        if targets:
            torch._foreach_copy_(targets, sources)

    def encode_in_place(self, gradients: ParameterGradients) -> list[GradientSpan]:
        places = []
        for entry, flat in self._flat(gradients):
            places.append(GradientSpan(entry.offset, entry.numel, flat))
            if gap := align_up(entry.numel) - entry.numel:
                # The gap becomes zero: a ring buffer has another gradient there, which would count in the norm.
                places.append(GradientSpan(entry.offset + entry.numel, gap, None))
        return places

    def in_place_for_ranks(self, gradients: ParameterGradients) -> torch.Tensor | None:
        gradient = gradients[0]
        return None if gradient is None else gradient.reshape(-1)

    def apply(
        self,
        written: Sequence[torch.Tensor],
        span: slice,
        masters: Masters,
        steps: Sequence[SegmentStep],  # noqa: ARG002
    ) -> int:
        (own,) = written
        masters.weight[span].copy_(own[span], non_blocking=True)
        return (span.stop - span.start) * own.element_size()

    def _flat(
        self, gradients: ParameterGradients, dtype: torch.dtype | None = None
    ) -> Iterator[tuple[Entry, torch.Tensor | None]]:
        """Yield each trainable entry with its gradient, [numel] of `dtype`, the codec's by default."""
        trainable = self.layout.entries[: len(gradients)]  # they come first
        for entry, gradient in zip(trainable, gradients, strict=True):
            yield entry, None if gradient is None else gradient.reshape(-1).to(dtype or self.dtype)


def _of_dtype(gradients: ParameterGradients, dtype: torch.dtype) -> list[torch.Tensor | None]:
    return [each if each is None or each.dtype == dtype else each.to(dtype) for each in gradients]
