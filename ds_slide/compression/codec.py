"""What a gradient codec is: of one unit, what leaves the GPU for its gradient and what comes back.

    GPU       encode the parameters' gradients, into a staging buffer or where they lie
    d2h       `numel` elements of `dtype`
    update    one step of the optimizer states, which have an item for each of these elements
    h2d       what the step has written: weights, in their state buffer, or a change of them
    GPU       `apply` it to the weights that modules read

A step of a codec that `compresses` writes no weights: it is done on weights of -0.0, which no decay moves and of which
every change is the exact one (-0.0 - x is -x, zeros of both signs included), in `CHANGE_DTYPE`. The weights are on the
GPU, with what completes them to the masters, and are decayed there.

A codec is made from a unit's layout, before the plan, which takes its bytes from it, and belongs to that unit for the
run; `ds_slide.runtime.settings` says which unit has which. Units that pass through the window are fetched as weights,
so a codec whose updates are something else is for units that are on the GPU all the time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from ds_slide.model.layout import Entry, Segment, UnitLayout, align_up, piece
from ds_slide.optim.rule import Hyper

CHANGE_DTYPE = torch.float32
"""The data type of what a step writes where that is a change of the weights."""
CHANGE_START = -0.0

Gradients = Sequence[torch.Tensor | None]
"""Gradients of a unit's trainable parameters in the order of its layout, as autograd left them; None: no gradient."""


@dataclass(frozen=True)
class Masters:
    """The weights of a unit on the GPU, [slot_numel] in slot layout, and what completes them to their masters, where
    that is there as well. Of all ranks: each has all of them."""

    weight: torch.Tensor
    remainder: torch.Tensor | None = None

    @property
    def are_rounded(self) -> bool:
        """Whether a change that is applied to them is rounded stochastically: bf16 weights that are all there is."""
        return self.weight.dtype == torch.bfloat16 and self.remainder is None


@dataclass(frozen=True)
class SegmentStep:
    """One step of an update rule on one run of elements."""

    segment: Segment
    hyper: Hyper


@dataclass(frozen=True)
class Place:
    """Elements [start, start + numel) of an encoded gradient, where they lie on the GPU; None stands for zeros."""

    start: int
    numel: int
    flat: torch.Tensor | None


class GradientCodec(Protocol):
    """Encoding runs on the thread and the stream that compute, before sums of micro-batches and the collectives, so it
    is linear. Nothing here waits for the GPU."""

    @property
    def numel(self) -> int:
        """Elements of this rank's encoded gradient, padding included, and items of each state that they update."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """The data type in which gradients are reduced and leave the GPU."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of the encoded gradient that leave the GPU."""
        ...

    @property
    def compresses(self) -> bool:
        """Whether a step writes a change of the weights, for the plan: a unit that has been built answers this by
        `UnitState.writes_change`. The square sum that `encode` gives is then that of the gradient itself, not of what
        `out` holds."""
        ...

    def written_dtype(self, weight: torch.dtype) -> torch.dtype:
        """The data type of what a step writes, for weights of a data type."""
        ...

    @property
    def update_run(self) -> int:
        """The most elements that the CPU updates in one call."""
        ...

    def update_begin(self, written: torch.Tensor) -> torch.Tensor:
        """The weights that a step begins from, as many as `written`: that itself where a step writes in place."""
        ...

    @property
    def gpu_bytes(self) -> int:
        """Bytes that the codec keeps on the GPU."""
        ...

    @property
    def encode_bytes(self) -> int:
        """Bytes of GPU memory that `encode` works in, which all units share: the compute stream's. A multiple of 4."""
        ...

    @property
    def apply_bytes(self) -> int:
        """Bytes of GPU memory that `apply` works in, a change on its way among them, which all units share: those of
        the stream that applies. A multiple of 4."""
        ...

    @property
    def encode_traffic(self) -> int:
        """Bytes of GPU memory that `encode` reads and writes more than a copy of the gradient does."""
        ...

    def apply_traffic(self, master_bytes: int) -> int:
        """Bytes of GPU memory that `apply` reads and writes more than a copy of the weights does. `master_bytes`: of an
        element of the masters."""
        ...

    @property
    def segments(self) -> Sequence[Segment]:
        """Ranges of one parameter group each, which cover [0, numel) without gaps: an update is a step on each."""
        ...

    @property
    def entries(self) -> Sequence[Entry]:
        """The place of each trainable parameter in [0, numel), in the order of `Gradients`."""
        ...

    def encode(self, gradients: Gradients, out: torch.Tensor, *, accumulate: bool) -> torch.Tensor | None:
        """Write or add the encoded gradient, rounded to `dtype`, to `out` ([>= numel], any dtype). With one rank only.

        -> the square sum of the gradient that `out` then holds (of `gradients` alone, where the codec compresses), []
        fp64, where the same pass gives it; None where it is that of the elements of `out`.
        """
        ...

    def encode_for_ranks(self, gradients: Gradients, out: torch.Tensor) -> torch.Tensor | None:
        """Write what each rank gets of this rank's gradient, to be averaged, to `out` ([world_size * numel] of `dtype`,
        rank-major). With several ranks only.

        -> the square sum of `gradients`, [] fp64, where the codec compresses.
        """
        ...

    def encode_in_place(self, gradients: Gradients) -> list[Place]:
        """The encoded gradient without a buffer of its size, [0, numel) ascending, without gaps. With one rank only."""
        ...

    def apply(
        self, written: Sequence[torch.Tensor], span: slice, masters: Masters, steps: Sequence[SegmentStep]
    ) -> int:
        """Bring the elements `span` of what an update has `written` (page-locked), by rank, to `masters`, on the
        current stream. `steps`: that update. -> bytes moved. Where there are several ranks only if the codec
        compresses; all of them then make the same bits of the same bits."""
        ...


# ----------------------------------------------------------------------------------------------------------------------
# The codec that changes nothing: the gradient itself leaves the GPU, states have the weights' shape, and the update
# itself writes the weights.


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
