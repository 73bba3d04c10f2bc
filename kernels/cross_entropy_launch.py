"""Launches of the cross-entropy's kernels over a chunk of rows of logits."""

from __future__ import annotations

import torch
import triton

from ds_slide.kernels.cross_entropy_rows import gradient_kernel, row_kernel, segment_kernel

# Columns of a segment, and of them the elements of one thread: with 32 (four loads of 16 bytes in bf16, all under way
# at once) and four warps, eight programs or more fit on a multiprocessor and keep 64 KB of loads under way.
SEGMENT = 4096
ELEMENTS = 32
# Rows without a label are not read, but then each program waits for its label before it reads.
SKIP_IGNORED = True


class CrossEntropyRows:
    """The launches for chunks of at most `rows` rows of logits [rows, vocabulary].

    Logits are bf16, fp16 or fp32 with rows of `stride` elements, a multiple of 8, all of which are written. `bias`
    [vocabulary] or None is added to them. Logits beyond the vocabulary may hold anything and end as anything.
    """

    def __init__(
        self,
        rows: int,
        vocabulary: int,
        stride: int,
        bias: torch.Tensor | None,
        scales: torch.Tensor,
        ignore_index: int,
        smoothing: float,
        z_loss: float,
        softcap: float | None,
    ) -> None:
        self.block = min(SEGMENT, triton.next_power_of_2(vocabulary))
        self.warps = max(1, min(16, self.block // (32 * ELEMENTS)))
        self.segments = triton.cdiv(vocabulary, self.block)
        self.vocabulary, self.stride, self.bias, self.scales = vocabulary, stride, bias, scales
        self.ignore_index, self.smoothing, self.z_loss = ignore_index, smoothing, z_loss
        self.softcap = 1.0 if softcap is None else softcap
        self.flags = {"HAS_BIAS": bias is not None, "CAP": softcap is not None, "SMOOTH": smoothing != 0.0}
        self.partials = torch.empty(rows, 3, self.segments, dtype=torch.float32, device=scales.device)
        self.row_factors = torch.empty(rows, 2, dtype=torch.float32, device=scales.device)

    def losses_(self, logits: torch.Tensor, labels: torch.Tensor, row_losses: torch.Tensor) -> None:
        """row_losses [n], fp32 = the losses of logits [n, vocabulary] with labels [n], int64; 0 where ignored."""
        rows = logits.shape[0]
        segment_kernel[(rows, self.segments)](
            logits,
            self.bias,
            labels,
            self.partials,
            self.vocabulary,
            self.stride,
            self.ignore_index,
            self.softcap,
            **self.flags,
            PADDED=self.vocabulary < self.stride,
            SKIP=SKIP_IGNORED,
            BLOCK=self.block,
            num_warps=self.warps,
        )
        row_kernel[(rows,)](
            logits,
            self.bias,
            labels,
            self.partials,
            self.scales,
            row_losses,
            self.row_factors,
            self.segments,
            self.vocabulary,
            self.stride,
            self.ignore_index,
            self.smoothing,
            self.z_loss,
            self.softcap,
            **self.flags,
            SEGMENTS=triton.next_power_of_2(self.segments),
            num_warps=1,
        )

    def gradients_(self, logits: torch.Tensor, labels: torch.Tensor) -> None:
        """The logits whose losses were computed last become their gradients, times scales[1]; zeros where ignored."""
        gradient_kernel[(logits.shape[0], self.segments)](
            logits,
            self.bias,
            labels,
            self.scales,
            self.row_factors,
            self.vocabulary,
            self.stride,
            self.ignore_index,
            self.smoothing,
            self.softcap,
            **self.flags,
            PADDED=self.vocabulary < self.stride,
            BLOCK=self.block,
            num_warps=self.warps,
        )
