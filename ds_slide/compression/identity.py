"""The codec that changes nothing: the gradient itself leaves the GPU, states have the weights' shape, and the update
itself writes the weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from ds_slide.compression.codec import Gradients, Masters, Place, SegmentStep
from ds_slide.model.layout import Entry, Segment, UnitLayout, align_up, piece


@dataclass(frozen=True)
class Identity:
    """Gradients of a unit of `layout`, in `dtype`: a `GradientCodec`."""

    layout: UnitLayout
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        return self.layout.trainable_numel

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def compresses(self) -> bool:
        return False

    def written_dtype(self, weight: torch.dtype) -> torch.dtype:
        return weight

    @property
    def update_run(self) -> int:
        return max(self.numel, 1)

    def update_begin(self, written: torch.Tensor) -> torch.Tensor:
        return written

    @property
    def gpu_bytes(self) -> int:
        return 0

    @property
    def encode_bytes(self) -> int:
        return 0

    @property
    def apply_bytes(self) -> int:
        return 0

    @property
    def encode_traffic(self) -> int:
        return 0

    def apply_traffic(self, master_bytes: int) -> int:  # noqa: ARG002
        return 0

    @property
    def segments(self) -> Sequence[Segment]:
        return self.layout.segments

    @property
    def entries(self) -> Sequence[Entry]:
        return [entry for entry in self.layout.entries if entry.trainable]

    def encode(self, gradients: Gradients, out: torch.Tensor, *, accumulate: bool) -> torch.Tensor | None:
        out = out[: self.numel]
        if out.is_cuda:
            return self.encode_in_one_pass(gradients, out, accumulate=accumulate)
        self.encode_by_torch(gradients, out, accumulate=accumulate)
        return None

    def encode_in_one_pass(self, gradients: Gradients, out: torch.Tensor, *, accumulate: bool) -> torch.Tensor:
        """`encode` by the GPU kernel, which also writes the alignment gaps and the parts of unused parameters."""
        from ds_slide.kernels.offload.gradient_pack import pack_gradients

        square_sum = torch.empty((), dtype=torch.float64, device=out.device)
        given = [None if gradient is None else gradient.to(self.dtype) for gradient in gradients]
        offsets = [entry.offset for entry in self.layout.entries[: len(gradients)]]  # as in `_flat`
        pack_gradients(given, out, offsets, square_sum, accumulate=accumulate)
        return square_sum

    def encode_by_torch(self, gradients: Gradients, out: torch.Tensor, *, accumulate: bool) -> None:
        """`encode` without a GPU; the bits are the same."""
        given = [(entry, flat) for entry, flat in self._flat(gradients) if flat is not None]
        sources = [flat for _, flat in given]
        if not accumulate and sum(flat.numel() for flat in sources) != out.numel():
            out.zero_()  # alignment gaps and unused parameters
        targets = [out[entry.offset : entry.offset + entry.numel] for entry, _ in given]
        if targets:
            (torch._foreach_add_ if accumulate else torch._foreach_copy_)(targets, sources)

    def encode_for_ranks(self, gradients: Gradients, out: torch.Tensor) -> None:
        out.zero_()
        targets, sources = [], []
        for entry, flat in self._flat(gradients):
            if flat is None:
                continue
            for rank in range(self.layout.world_size):
                start, stop = piece(entry, rank)
                if stop > start:
                    place = rank * self.numel + entry.offset
                    targets.append(out[place : place + stop - start])
                    sources.append(flat[start:stop])
        if targets:
            torch._foreach_copy_(targets, sources)

    def encode_in_place(self, gradients: Gradients) -> list[Place]:
        places = []
        for entry, flat in self._flat(gradients):
            places.append(Place(entry.offset, entry.numel, flat))
            if gap := align_up(entry.numel) - entry.numel:
                # Not left as it is: a ring buffer has the last unit's gradient there, which would count in the norm.
                places.append(Place(entry.offset + entry.numel, gap, None))
        return places

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

    def _flat(self, gradients: Gradients) -> Iterator[tuple[Entry, torch.Tensor | None]]:
        """Each trainable entry with its gradient, [numel] of `dtype`."""
        trainable = self.layout.entries[: len(gradients)]  # they come first
        for entry, gradient in zip(trainable, gradients, strict=True):
            yield entry, None if gradient is None else gradient.reshape(-1).to(self.dtype)
