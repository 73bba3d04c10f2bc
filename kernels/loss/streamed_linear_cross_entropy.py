"""Loss of a language model head that is too large for the GPU, without the whole head or the whole logits.

`linear_cross_entropy` multiplies chunks of tokens with the whole weight. Here chunks of the weight's rows are
multiplied with all tokens. The forward computes the maximum and the sum of exponentials of each token. The backward
repeats the products, gets the same logits, and makes their gradients. That takes four products instead of three, and
for 151,936 x 2,048 in bf16 transfers of 0.62 GB, two in and one out. The device holds the logits of a chunk
(CHUNK_BYTES of `linear_cross_entropy`), the sums of the gradients [n, h] and [c, h] in fp32, and 12 bytes for each
token and segment of 4,096 words.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton

from ds_slide.kernels.loss.arguments import MEAN, check_loss, check_options, divide_by
from ds_slide.kernels.loss.cross_entropy_launch import CrossEntropyColumns, LossTerms
from ds_slide.kernels.loss.linear_cross_entropy import COLUMN_MULTIPLE, chunk_rows
from ds_slide.kernels.loss.products import add_product_
from ds_slide.kernels.loss.scales import apply_scale_, fill_scales_
from ds_slide.kernels.loss.weight_rows import WeightRows, anchor, pass_rows, seal, weight_is_wanted

NAME = "streamed_linear_cross_entropy"


class _Options(NamedTuple):
    """The options of the loss besides its tensors."""

    division: int
    divisor: torch.Tensor | float
    terms: LossTerms


class _Logits:
    """The logits of one chunk after the other, in one buffer, cut into blocks of tokens."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.hidden = hidden if hidden.stride(1) == 1 else hidden.contiguous()
        self.step = self.padded = 0
        self.buffer = hidden.new_empty(0)

    def blocks(self, rows: torch.Tensor) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """Yield (first token, hidden [b, h], logits [b, c]) for rows [c, h]. The logits may be overwritten."""
        tokens, words = self.hidden.shape[0], rows.shape[0]
        padded = triton.cdiv(words, COLUMN_MULTIPLE) * COLUMN_MULTIPLE
        if tokens and padded > self.padded:
            self.step, self.padded = chunk_rows(tokens, padded, rows.element_size()), padded
            self.buffer = rows.new_empty(0)  # freed before the larger one is made
            self.buffer = rows.new_empty(self.step * padded)
        # The shorter last chunk has the same blocks: with more tokens in a block it could need more memory.
        for start in range(0, tokens, self.step or 1):
            part = self.hidden[start : start + self.step]
            logits = self.buffer[: part.shape[0] * padded].view(part.shape[0], padded)[:, :words]
            torch.mm(part, rows.T, out=logits)
            yield start, part, logits


class _Gradients:
    """fp32 sums for the needed gradients of hidden [n, h], a chunk of rows [c, h] and the bias [v], rounded at the
    end."""

    def __init__(
        self,
        hidden: torch.Tensor,
        vocabulary: int,
        need_hidden: bool,
        need_bias: bool,
        grad_loss: torch.Tensor,
        scales: torch.Tensor,
    ) -> None:
        device = hidden.device
        self.hidden = torch.empty(hidden.shape, dtype=torch.float32, device=device) if need_hidden else None
        self.bias = torch.zeros(vocabulary, dtype=torch.float32, device=device) if need_bias else None
        self.rows = torch.empty(0, dtype=torch.float32, device=device)
        self.dtype, self.grad_loss, self.scales = hidden.dtype, grad_loss, scales

    def rows_sum(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return the buffer for the sum of a chunk's gradient: its own buffer if that is fp32."""
        if gradient.dtype == torch.float32:
            return gradient
        if self.rows.numel() < gradient.numel():
            self.rows = torch.empty(0, device=gradient.device)
            self.rows = torch.empty(gradient.numel(), dtype=torch.float32, device=gradient.device)
        return self.rows[: gradient.numel()].view(gradient.shape)

    def round_to_(self, gradient: torch.Tensor, total: torch.Tensor) -> None:
        apply_scale_(gradient, total, self.grad_loss, self.scales)

    def rounded(self, total: torch.Tensor | None) -> torch.Tensor | None:
        if total is None:
            return None
        gradient = torch.empty(total.shape, dtype=self.dtype, device=total.device)
        self.round_to_(gradient, total)
        return gradient


def _forward(
    hidden: torch.Tensor, weight: WeightRows, labels: torch.Tensor, bias: torch.Tensor | None, options: _Options
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return loss, row_factors [n, 2] and scales [3], all fp32."""
    tokens, device = hidden.shape[0], hidden.device
    scales = torch.empty(3, dtype=torch.float32, device=device)
    if not tokens:
        # The weight is read all the same: ranks that gather it together would wait for this one.
        for _ in pass_rows(weight, device):
            pass
        loss = torch.full((), float("nan") if options.division == MEAN else 0.0, device=device)
        return loss, torch.empty(0, 2, device=device), scales.fill_(1.0)
    fill_scales_(scales, labels, options.terms.ignore_index, options.division, options.divisor)
    cross_entropy = CrossEntropyColumns(labels, weight.shape[0], bias, scales, options.terms)
    logits = _Logits(hidden)
    for first, rows, _ in pass_rows(weight, device):
        cross_entropy.begin_chunk(rows.shape[0])
        for start, _, block in logits.blocks(rows):
            cross_entropy.add_(block, start, first)
    row_losses, row_factors = cross_entropy.losses()
    return row_losses.sum() * scales[0], row_factors, scales


def _backward(
    sums: _Gradients,
    hidden: torch.Tensor,
    weight: WeightRows,
    need_weight: bool,
    row_factors: torch.Tensor,
    cross_entropy: CrossEntropyColumns,
) -> None:
    """Add up the gradients, and write the weight's gradient into its buffers."""
    logits = _Logits(hidden)
    for first, rows, gradient in pass_rows(weight, hidden.device, need_weight):
        total = None if gradient is None else sums.rows_sum(gradient)
        if total is not None and not hidden.shape[0]:
            total.zero_()
        for start, part, block in logits.blocks(rows):
            cross_entropy.gradients_(block, start, first, row_factors)
            if sums.hidden is not None:
                add_product_(sums.hidden[start : start + part.shape[0]], block, rows, first == 0)
            if total is not None:
                add_product_(total, block.T, part, start == 0)
            if sums.bias is not None:
                sums.bias[first : first + rows.shape[0]] += block.sum(dim=0, dtype=torch.float32)
        if gradient is not None and total is not None:
            sums.round_to_(gradient, total)


class _StreamedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, bias, anchor, labels, weight, options):
        flat_bias = None if bias is None else bias.contiguous()
        loss, row_factors, scales = _forward(hidden, weight, labels.contiguous(), flat_bias, options)
        ctx.weight, ctx.options = weight, options
        ctx.save_for_backward(hidden, bias, anchor, labels, row_factors, scales)
        return loss

    @staticmethod
    def backward(ctx, grad_loss):
        hidden, bias, anchor, labels, row_factors, scales = ctx.saved_tensors
        need_hidden, need_bias, *_ = ctx.needs_input_grad
        height = ctx.weight.shape[0]
        with torch.no_grad():
            flat_bias = None if bias is None else bias.contiguous()
            cross_entropy = CrossEntropyColumns(labels.contiguous(), height, flat_bias, scales, ctx.options.terms)
            sums = _Gradients(hidden, height, need_hidden, need_bias, grad_loss, scales)
            _backward(sums, hidden, ctx.weight, weight_is_wanted(ctx, bias, anchor), row_factors, cross_entropy)
            grad_hidden, grad_bias = sums.rounded(sums.hidden), sums.rounded(sums.bias)
        sources = (hidden, bias, anchor, grad_loss)
        return seal(NAME, grad_hidden, *sources), seal(NAME, grad_bias, *sources), *(None,) * 4


@torch.compiler.disable
def streamed_linear_cross_entropy(
    hidden: torch.Tensor,
    weight: WeightRows,
    labels: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: str = "mean",
    num_items: int | torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the cross-entropy of `hidden @ weight.T + bias` against `labels`, fp32, 0-d. Neither the weight nor the
    logits ever exist as a whole.

    hidden [n, h], `weight` [v, h] and bias [v] are bf16, fp16 or fp32, all of one dtype. labels [n] are int64. Options
    and results are the same as in `linear_cross_entropy`, except for the order of sums. Gradients are summed in fp32
    and rounded once.

    Forward reads the weight once. Backward reads it once more if any input needs a gradient. Each backward writes the
    gradient of `weight` into all of its buffers, even where no label counts or n = 0. This function never waits for the
    device.

    Under torch.compile the graph breaks here. Raises SlideError for a second derivative, and for chunks that are not
    the rows of `weight` in order. Arguments that cannot be used raise SlideConfigError.
    """
    check_loss(NAME, hidden, weight, labels, bias)
    check_options(NAME, reduction, label_smoothing, softcap)
    division, divisor, divisor_value = divide_by(NAME, reduction, num_items, hidden.device)
    options = _Options(
        division,
        divisor if divisor is not None else divisor_value,
        LossTerms(ignore_index, float(label_smoothing), float(z_loss), None if softcap is None else float(softcap)),
    )
    return _StreamedLoss.apply(hidden, bias, anchor(weight, hidden.device), labels, weight, options)
