"""Loss of the language model head without its logits: linear layer and cross-entropy in chunks of rows.

For 16,384 tokens and 151,936 words the logits have 5 GB in bf16, and so has their gradient. Here one buffer of some
hundred MB holds the logits of a chunk and then, in place, their gradient. The gradients of `hidden` and `weight` are
made from it at once. The backward pass only multiplies them by its incoming gradient.
"""

from __future__ import annotations

import torch
import triton

from ds_slide.errors import SlideError
from ds_slide.kernels.loss.arguments import MEAN, check_loss, check_options, divide_by
from ds_slide.kernels.loss.cross_entropy_launch import CrossEntropyRows, LossTerms
from ds_slide.kernels.loss.scales import apply_scale_, fill_scales_
from ds_slide.kernels.loss.weight_gradient import WeightGradient, result_dtype

# The least bytes of a chunk of logits: 1,024 rows of 151,936 words in bf16. The second half of the fp32 sum of the
# weight's gradient is beside it (0.62 GB for h = 2048), so that the loss of such a head stays below 1 GB.
CHUNK_BYTES = 320 * 10**6
# Each chunk reads and writes all of that sum (2.5 GB). So a GPU with enough memory takes larger chunks: 2,048 rows
# with 80 GB (0.85 of its products' speed on an H200, against 0.78; LOG.md). A larger sum costs more time, and takes
# more memory anyway. Chunks may then be as large as the sum, up to 1 % of the GPU.
CHUNKS_OF_DEVICE = 128
MOST_CHUNKS_OF_DEVICE = 100
# The cost of a chunk beside the products depends only on its rows: with 512 rows (256,000 words) the loss ran at 0.61
# of its products' speed, with 1,024 at 0.77. So larger vocabularies may take up to twice the bytes.
ENOUGH_ROWS = 1024
LEAST_ROWS = 128
# Rows of the buffer start at multiples of this many elements: odd vocabularies (50,257) then still get vector loads,
# and matrix products without cuBLAS's slow unaligned kernels.
COLUMN_MULTIPLE = 64


def chunk_bytes(device: torch.device, summed: int) -> int:
    """Return the bytes of a chunk on `device`, beside `summed` bytes of the weight's sum. They are the same for each
    call of one shape, because the order of sums depends on them."""
    if device.type != "cuda":
        return CHUNK_BYTES
    return chunk_bytes_of(_memory_of(device), summed)


def _memory_of(device: torch.device) -> int:
    """Return the bytes of a GPU that torch may take."""
    total = torch.cuda.get_device_properties(device).total_memory
    if not hasattr(torch.cuda, "get_per_process_memory_fraction"):
        return total
    return int(total * torch.cuda.get_per_process_memory_fraction(device))


def chunk_bytes_of(memory: int, summed: int) -> int:
    """Return `chunk_bytes` for a GPU with `memory` bytes."""
    beside_sum = min(5 * summed // 4, memory // MOST_CHUNKS_OF_DEVICE)
    return max(CHUNK_BYTES, memory // CHUNKS_OF_DEVICE, beside_sum)


def chunk_rows(rows: int, padded: int, itemsize: int, limit: int | None = None) -> int:
    """Return the rows of a chunk: a power of two, within `limit` bytes or twice `limit`.

    Powers of two make fast products: with 2,048 rows the loss took 50.2 ms on an H200, with 2,432 52.6 and with 2,816
    50.7.
    """
    fitting = (CHUNK_BYTES if limit is None else limit) // (padded * itemsize)
    fitting = max(fitting, min(2 * fitting, ENOUGH_ROWS), LEAST_ROWS)
    return min(rows, 1 << (fitting.bit_length() - 1))


def workspace_bytes(hidden: torch.Tensor, vocabulary: int, need_weight: bool, memory: int) -> int:
    """Return the temporary bytes of the forward on a GPU with `memory` bytes: the logits of a chunk, and the half of
    the weight's sum that is not in its result."""
    padded, itemsize = _padded(vocabulary), hidden.element_size()
    step = rows_at_once(hidden, vocabulary, need_weight, memory)
    half = vocabulary * hidden.shape[1] * itemsize if need_weight and step < hidden.shape[0] and itemsize < 4 else 0
    return step * padded * itemsize + half


def rows_at_once(hidden: torch.Tensor, vocabulary: int, need_weight: bool, memory: int) -> int:
    """Return the rows of a chunk on a GPU with `memory` bytes."""
    return _step(hidden, _padded(vocabulary), vocabulary, need_weight, memory)


def _padded(vocabulary: int) -> int:
    return triton.cdiv(vocabulary, COLUMN_MULTIPLE) * COLUMN_MULTIPLE


def _step(hidden: torch.Tensor, padded: int, vocabulary: int, need_weight: bool, memory: int | None = None) -> int:
    """Return the rows of a chunk: all rows where the fp32 sum of several chunks would take more memory than it saves.
    `memory`: bytes of the GPU that is planned for, None for the present one."""
    rows, width = hidden.shape
    summed = vocabulary * width * hidden.element_size() if need_weight else 0
    limit = chunk_bytes(hidden.device, summed) if memory is None else chunk_bytes_of(memory, summed)
    if rows * padded * hidden.element_size() <= summed + limit:
        return rows
    return chunk_rows(rows, padded, hidden.element_size(), limit)


@torch.library.custom_op("ds_slide::linear_cross_entropy", mutates_args=())
def _linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    bias: torch.Tensor | None,
    divisor: torch.Tensor | None,
    divisor_value: float,
    division: int,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    need_hidden: bool,
    need_weight: bool,
    need_bias: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the loss, the gradients of hidden, weight and bias before their power of two (empty where not needed), and
    scales [3]."""
    rows, vocabulary = hidden.shape[0], weight.shape[0]
    device, dtype = hidden.device, hidden.dtype
    empty = [torch.empty(0, dtype=dtype, device=device) for _ in range(3)]
    grad_hidden = torch.empty(hidden.shape, dtype=dtype, device=device) if need_hidden else empty[0]
    scales = torch.empty(3, dtype=torch.float32, device=device)
    if not rows:
        grad_weight = torch.zeros(weight.shape, dtype=result_dtype(dtype), device=device) if need_weight else empty[1]
        grad_bias = torch.zeros(vocabulary, device=device) if need_bias else empty[2].float()
        loss = torch.full((), float("nan") if division == MEAN else 0.0, device=device)
        return loss, grad_hidden, grad_weight, grad_bias, scales.fill_(1.0)

    labels = labels.contiguous()
    hidden = hidden if hidden.stride(1) == 1 else hidden.contiguous()
    bias = None if bias is None else bias.contiguous()
    fill_scales_(scales, labels, ignore_index, division, divisor if divisor is not None else divisor_value)
    padded = _padded(vocabulary)
    step = _step(hidden, padded, vocabulary, need_weight)
    buffer = torch.empty(step, padded, dtype=dtype, device=device)
    row_losses = torch.empty(rows, dtype=torch.float32, device=device)
    weight_sum = WeightGradient(weight, triton.cdiv(rows, step)) if need_weight else None
    grad_bias = torch.zeros(vocabulary, device=device) if need_bias else empty[2].float()
    terms = LossTerms(ignore_index, label_smoothing, z_loss, softcap)
    cross_entropy = CrossEntropyRows(step, vocabulary, padded, bias, scales, terms)
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        part, part_labels = hidden[start:stop], labels[start:stop]
        logits = buffer[: stop - start, :vocabulary]
        torch.mm(part, weight.T, out=logits)
        cross_entropy.losses_(logits, part_labels, row_losses[start:stop])
        if need_hidden or need_weight or need_bias:
            cross_entropy.gradients_(logits, part_labels)
        if need_hidden:
            torch.mm(logits, weight, out=grad_hidden[start:stop])
        if weight_sum is not None:
            weight_sum.add_(logits, part)
        if need_bias:
            grad_bias += logits.sum(dim=0, dtype=torch.float32)
    # The buffer goes before the sum of the weight gradient takes its temporary memory.
    del buffer, logits
    grad_weight = empty[1] if weight_sum is None else weight_sum.finish()
    return row_losses.sum() * scales[0], grad_hidden, grad_weight, grad_bias, scales


@_linear_cross_entropy.register_fake
def _(hidden, weight, *others):
    need_hidden, need_weight, need_bias = others[-3:]

    def gradient(source, dtype, needed):
        return torch.empty(source.shape if needed else (0,), dtype=dtype, device=hidden.device)

    return (
        torch.empty((), dtype=torch.float32, device=hidden.device),
        gradient(hidden, hidden.dtype, need_hidden),
        gradient(weight, result_dtype(weight.dtype) if need_weight else weight.dtype, need_weight),
        gradient(weight[:, 0], torch.float32, need_bias),
        torch.empty(3, dtype=torch.float32, device=hidden.device),
    )


@torch.library.custom_op("ds_slide::linear_cross_entropy_backward", mutates_args=())
def _scale_gradient(
    gradient: torch.Tensor, grad_loss: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Return gradient * grad_loss * scales[2], rounded once to `dtype`."""
    scaled = torch.empty(gradient.shape, dtype=dtype, device=gradient.device)
    apply_scale_(scaled, gradient, grad_loss, scales)
    return scaled


@_scale_gradient.register_fake
def _(gradient, _grad_loss, _scales, dtype):
    return torch.empty(gradient.shape, dtype=dtype, device=gradient.device)


def _save_gradients(ctx, inputs, output):
    hidden, weight, _, bias = inputs[:4]
    ctx.dtypes = (hidden.dtype, weight.dtype, None if bias is None else bias.dtype)
    ctx.needed = inputs[-3:]
    # Outputs that are gradients get no gradient. Zeros for them would double the memory.
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output[1:])


def _backward(ctx, grad_loss, *_):
    if grad_loss is None:
        return (None,) * 14
    *gradients, scales = ctx.saved_tensors
    scaled = [
        _scale_gradient(gradient, grad_loss, scales, dtype) if needed else None
        for gradient, dtype, needed in zip(gradients, ctx.dtypes, ctx.needed, strict=True)
    ]
    return scaled[0], scaled[1], None, scaled[2], *(None,) * 10


def _refuse_double_backward(_ctx, *_):
    raise SlideError(
        "linear_cross_entropy has no second derivative: use torch.nn.functional.cross_entropy with create_graph."
    )


_linear_cross_entropy.register_autograd(_backward, setup_context=_save_gradients)
_scale_gradient.register_autograd(_refuse_double_backward)


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
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
    """Return the cross-entropy of `hidden @ weight.T + bias` against `labels`, fp32, 0-d, without the whole logits.

    hidden [n, h] and weight [v, h] (and bias [v]) are bf16, fp16 or fp32, all of one dtype. labels [n] are int64.
    The matrix product rounds logits to that dtype. All later operations are fp32.

    The options of `torch.nn.functional.cross_entropy` have the same meaning. There are three more. `softcap` replaces
    every logit by softcap * tanh(logit / softcap) first. `z_loss` adds z_loss * logsumexp^2 for each counted row.
    `num_items` (an int or a 0-d tensor) divides the sum over rows for any `reduction` ("mean" or "sum"). The mean over
    no counted row is nan, with gradients of zero. A label outside [0, v) that is not `ignore_index` makes the loss and
    the gradients that it reaches nan (torch would stop with a device-side assertion). This function never waits for the
    device.

    This call computes the gradients of the inputs that require them. A second derivative raises SlideError. Arguments
    that cannot be used raise SlideConfigError.
    """
    name = "linear_cross_entropy"
    check_loss(name, hidden, weight, labels, bias)
    check_options(name, reduction, label_smoothing, softcap)
    division, divisor, divisor_value = divide_by(name, reduction, num_items, hidden.device)
    recording = torch.is_grad_enabled()
    loss, *_ = _linear_cross_entropy(
        hidden,
        weight,
        labels,
        bias,
        divisor,
        divisor_value,
        division,
        ignore_index,
        float(label_smoothing),
        float(z_loss),
        None if softcap is None else float(softcap),
        recording and hidden.requires_grad,
        recording and weight.requires_grad,
        recording and bias is not None and bias.requires_grad,
    )
    return loss
