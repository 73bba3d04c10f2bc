"""A linear layer with a streamed weight: its rows come in chunks, and the gradients of these rows leave at once.

The device never has the whole weight, only one chunk [c, h] at a time, in the buffers of the weight's owner. Each pass
costs a transfer of the weight (0.62 GB for 151,936 x 2,048 in bf16): one forward, one backward, and with gradients the
same bytes back.
"""

from __future__ import annotations

import math

import torch

from ds_slide.errors import SlideConfigError
from ds_slide.kernels.loss.arguments import check_linear
from ds_slide.kernels.loss.products import add_product_
from ds_slide.kernels.loss.weight_rows import WeightRows, anchor, pass_rows, seal, weight_is_wanted


class _StreamedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, bias, anchor, weight):
        ctx.weight = weight
        ctx.save_for_backward(hidden, bias, anchor)
        logits = torch.empty(hidden.shape[0], weight.shape[0], dtype=hidden.dtype, device=hidden.device)
        for first, rows, _ in pass_rows(weight, hidden.device):
            words = slice(first, first + rows.shape[0])
            if bias is None:
                torch.mm(hidden, rows.T, out=logits[:, words])
            else:
                torch.addmm(bias[words], hidden, rows.T, out=logits[:, words])
        return logits

    @staticmethod
    def backward(ctx, grad_logits):
        hidden, bias, anchor = ctx.saved_tensors
        need_hidden, need_bias, *_ = ctx.needs_input_grad
        grad_hidden = grad_bias = None
        with torch.no_grad():
            need_weight = weight_is_wanted(ctx, bias, anchor)
            if need_hidden or need_weight:
                grad_hidden = _pass_back(ctx.weight, hidden, grad_logits, need_hidden, need_weight)
            if need_bias:
                grad_bias = grad_logits.sum(dim=0, dtype=torch.float32).to(bias.dtype)
        sources = (hidden, bias, anchor, grad_logits)
        return seal("streamed_linear", grad_hidden, *sources), seal("streamed_linear", grad_bias, *sources), None, None


def _pass_back(
    weight: WeightRows, hidden: torch.Tensor, grad_logits: torch.Tensor, need_hidden: bool, need_weight: bool
) -> torch.Tensor | None:
    """Return the gradient of `hidden`, and write the gradients of the rows of `weight`, each if it is needed."""
    shape = hidden.shape if need_hidden else (0,)
    total = torch.empty(shape, dtype=torch.float32, device=hidden.device)
    for first, rows, gradient in pass_rows(weight, hidden.device, need_weight):
        part = grad_logits[:, first : first + rows.shape[0]]
        # An expanded gradient, like from logits.sum(), is copied once here: each of the two products would copy it.
        part = part if part.stride(1) == 1 else part.contiguous()
        if total.numel():
            add_product_(total, part, rows, first == 0)
        if gradient is not None:
            torch.mm(part.T, hidden, out=gradient)
    return total.to(hidden.dtype) if need_hidden else None


@torch.compiler.disable
def streamed_linear(hidden: torch.Tensor, weight: WeightRows, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Do `torch.nn.functional.linear` with a streamed weight: hidden [..., h] -> logits [..., v].

    hidden, `weight` [v, h] and bias [v] are bf16, fp16 or fp32, all of one dtype. Each backward writes the gradient of
    `weight` into its buffers, and autograd gets the gradients of hidden and bias. Products are summed in fp32, and
    gradients rounded once. Forward reads the weight once, and so does backward if weight or hidden needs a gradient.

    Under torch.compile the graph breaks here. Raises SlideError for a second derivative, and for chunks that are not
    the rows of `weight` in order. Arguments that cannot be used raise SlideConfigError.
    """
    if not hidden.ndim or len(weight.shape) != 2 or hidden.shape[-1] != weight.shape[1]:
        raise SlideConfigError(
            f"streamed_linear needs hidden [..., h] and weight [v, h], not {tuple(hidden.shape)} and "
            f"{tuple(weight.shape)}: transpose one of them."
        )
    check_linear("streamed_linear", hidden, weight, bias)
    height, width = weight.shape
    flat = hidden.reshape(math.prod(hidden.shape[:-1]), width)
    logits = _StreamedLinear.apply(flat, bias, anchor(weight, hidden.device), weight)
    return logits.view(*hidden.shape[:-1], height)
