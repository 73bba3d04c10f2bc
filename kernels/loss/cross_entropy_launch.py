"""Launches of the cross-entropy's kernels over rows of logits: whole rows, or chunks of their columns."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton

from ds_slide.kernels.loss.cross_entropy_rows import fold_kernel, gradient_kernel, row_kernel, segment_kernel

# Columns of a segment, and elements of one thread. With 32 elements (four loads of 16 bytes in bf16, all under way at
# once) and four warps, at least eight programs fit on a multiprocessor and keep 64 KB of loads under way.
SEGMENT = 4096
ELEMENTS = 32
# Rows without a label are not read. The cost: each program waits for its label before it reads.
SKIP_IGNORED = True


class LossTerms(NamedTuple):
    """The options of the loss of a row."""

    ignore_index: int
    smoothing: float
    z_loss: float
    softcap: float | None


class _Segments:
    """The segments of rows of `width` columns."""

    def __init__(self, width: int) -> None:
        self.block = min(SEGMENT, triton.next_power_of_2(width))
        self.warps = max(1, min(16, self.block // (32 * ELEMENTS)))
        self.count = triton.cdiv(width, self.block)


class _Launches:
    """The three kernels with the terms of one loss."""

    def __init__(self, vocabulary: int, bias: torch.Tensor | None, scales: torch.Tensor, terms: LossTerms) -> None:
        self.vocabulary, self.bias, self.scales = vocabulary, bias, scales
        self.ignore_index, self.smoothing, self.z_loss, softcap = terms
        self.softcap = 1.0 if softcap is None else softcap
        self.flags = {"HAS_BIAS": bias is not None, "CAP": softcap is not None, "SMOOTH": self.smoothing != 0.0}

    def _take_segments(
        self,
        logits: torch.Tensor,
        stride: int,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        partials: torch.Tensor,
        targets: torch.Tensor | None,
        segments: _Segments,
        first: int,
        slot: int,
    ) -> None:
        rows, width = logits.shape
        segment_kernel[(rows, segments.count)](
            logits,
            bias,
            labels,
            partials,
            targets,
            first,
            width,
            stride,
            partials.shape[2],
            slot,
            self.ignore_index,
            self.softcap,
            **self.flags,
            PADDED=width < stride,
            SKIP=SKIP_IGNORED,
            TARGETS=targets is not None,
            BLOCK=segments.block,
            num_warps=segments.warps,
        )

    def _take_rows(
        self,
        logits: torch.Tensor | None,
        stride: int,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        partials: torch.Tensor,
        targets: torch.Tensor | None,
        segments: int,
        row_losses: torch.Tensor,
        row_factors: torch.Tensor,
    ) -> None:
        row_kernel[(row_losses.shape[0],)](
            logits,
            bias,
            labels,
            partials,
            targets,
            self.scales,
            row_losses,
            row_factors,
            segments,
            partials.shape[2],
            self.vocabulary,
            stride,
            self.ignore_index,
            self.smoothing,
            self.z_loss,
            self.softcap,
            **self.flags,
            TARGETS=targets is not None,
            SEGMENTS=triton.next_power_of_2(segments),
            num_warps=1,
        )

    def _take_gradients(
        self,
        logits: torch.Tensor,
        stride: int,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        row_factors: torch.Tensor,
        segments: _Segments,
        first: int,
    ) -> None:
        rows, width = logits.shape
        gradient_kernel[(rows, segments.count)](
            logits,
            bias,
            labels,
            self.scales,
            row_factors,
            first,
            width,
            self.vocabulary,
            stride,
            self.ignore_index,
            self.smoothing,
            self.softcap,
            **self.flags,
            PADDED=width < stride,
            BLOCK=segments.block,
            num_warps=segments.warps,
        )


class CrossEntropyRows(_Launches):
    """The launches for chunks of at most `rows` rows of logits [rows, vocabulary].

    Logits are bf16, fp16 or fp32. Their rows have `stride` elements, a multiple of 8, and all of them are written.
    `bias` [vocabulary] or None is added to them. Logits beyond the vocabulary may have any values before and after.
    """

    def __init__(
        self, rows: int, vocabulary: int, stride: int, bias: torch.Tensor | None, scales: torch.Tensor, terms: LossTerms
    ) -> None:
        super().__init__(vocabulary, bias, scales, terms)
        self.stride, self.segments = stride, _Segments(vocabulary)
        self.partials = torch.empty(rows, 3, self.segments.count, dtype=torch.float32, device=scales.device)
        self.row_factors = torch.empty(rows, 2, dtype=torch.float32, device=scales.device)

    def losses_(self, logits: torch.Tensor, labels: torch.Tensor, row_losses: torch.Tensor) -> None:
        """Write the losses of logits [n, vocabulary] with labels [n] int64 to row_losses [n] fp32, 0 where ignored."""
        stride, bias, partials, segments = self.stride, self.bias, self.partials, self.segments
        self._take_segments(logits, stride, bias, labels, partials, None, segments, 0, 0)
        self._take_rows(logits, stride, bias, labels, partials, None, segments.count, row_losses, self.row_factors)

    def gradients_(self, logits: torch.Tensor, labels: torch.Tensor) -> None:
        """Turn the logits of the last `losses_` into their gradients, times scales[1], zeros where ignored."""
        self._take_gradients(logits, self.stride, self.bias, labels, self.row_factors, self.segments, 0)


class CrossEntropyColumns(_Launches):
    """The launches for logits that come in chunks of columns.

    labels [n] are int64 and contiguous, `bias` [vocabulary] is contiguous or None. Logits are bf16, fp16 or fp32
    [rows, width]: the rows from `start` on, the columns from `first` on. Their rows have a multiple of 8 elements, and
    all of them are written. For each chunk call `begin_chunk`, and then `add_` for all rows in any blocks. Call
    `losses` after the last chunk. In a second walk over the chunks call `gradients_` with the row_factors of `losses`.
    """

    def __init__(
        self, labels: torch.Tensor, vocabulary: int, bias: torch.Tensor | None, scales: torch.Tensor, terms: LossTerms
    ) -> None:
        super().__init__(vocabulary, bias, scales, terms)
        self.labels = labels
        # Chunks of whole segments need one slot less (7.7 MB for 16,384 rows of 151,936 words). Other chunks end within
        # a segment. They are folded into one partial when the next chunk would not fit. Any single chunk fits.
        self.slots = 1 + _Segments(vocabulary).count
        self.slot = self.used = 0
        self.partials = torch.empty(0, 3, self.slots, device=scales.device)
        self.targets = torch.empty(0, device=scales.device)

    def begin_chunk(self, width: int) -> None:
        """Make room for the partials of the next `width` columns."""
        rows = self.labels.shape[0]
        if not self.used:
            self.partials = torch.empty(rows, 3, self.slots, dtype=torch.float32, device=self.scales.device)
            self.targets = torch.empty(rows, dtype=torch.float32, device=self.scales.device)
        segments = _Segments(width).count
        if self.used + segments > self.slots:
            fold_kernel[(rows,)](
                self.partials,
                self.used,
                self.slots,
                SMOOTH=self.flags["SMOOTH"],
                SEGMENTS=triton.next_power_of_2(self.used),
                num_warps=1,
            )
            self.used = 1
        self.slot, self.used = self.used, self.used + segments

    def add_(self, logits: torch.Tensor, start: int, first: int) -> None:
        """Add logits [rows, width] of the chunk that began last."""
        rows, segments = slice(start, start + logits.shape[0]), _Segments(logits.shape[1])
        labels, partials, targets = self.labels[rows], self.partials[rows], self.targets[rows]
        bias = self._bias(logits, first)
        self._take_segments(logits, logits.stride(0), bias, labels, partials, targets, segments, first, self.slot)

    def losses(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the losses of the rows [n], 0 where ignored, and their row_factors [n, 2], both fp32."""
        rows, device = self.labels.shape[0], self.scales.device
        row_losses = torch.empty(rows, dtype=torch.float32, device=device)
        row_factors = torch.empty(rows, 2, dtype=torch.float32, device=device)
        partials, targets = self.partials, self.targets
        self._take_rows(None, 0, None, self.labels, partials, targets, self.used, row_losses, row_factors)
        return row_losses, row_factors

    def gradients_(self, logits: torch.Tensor, start: int, first: int, row_factors: torch.Tensor) -> None:
        """Turn logits [rows, width] into their gradients, times scales[1], zeros where ignored."""
        rows, segments = slice(start, start + logits.shape[0]), _Segments(logits.shape[1])
        bias, labels, factors = self._bias(logits, first), self.labels[rows], row_factors[rows]
        self._take_gradients(logits, logits.stride(0), bias, labels, factors, segments, first)

    def _bias(self, logits: torch.Tensor, first: int) -> torch.Tensor | None:
        return None if self.bias is None else self.bias[first : first + logits.shape[1]]
