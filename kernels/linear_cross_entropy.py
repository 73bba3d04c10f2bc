"""Loss of the language model head without its logits: linear layer and cross-entropy in chunks of rows.

For 16,384 tokens and 151,936 words the logits alone are 5 GB in bf16, and their gradient as much again. Here one
buffer of at most CHUNK_BYTES holds the logits of a chunk and then, in place, their gradient, from which the gradients
of `hidden` and `weight` are made at once: the backward pass only multiplies them by its incoming gradient.

The gradient of the logits is (softmax - target) * mantissa, where 1 / count = mantissa * power, 1 <= mantissa < 2.
The power of two is applied in the backward pass: with 1 / count inside, fp16 would flush most of the gradients to zero,
and with all of it outside, bf16 would round every gradient once more.

Bytes of a chunk beside its matrix products: its logits are read twice (the second time from the cache, as far as it
reaches) and written once.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from ds_slide.errors import SlideConfigError, SlideError

# Logits of one chunk: 1,024 rows of 151,936 words in bf16. Twice this reads and writes the fp32 weight gradient half
# as often (2.5 GB a chunk for h = 2048), at 0.3 GB more memory.
CHUNK_BYTES = 320 * 10**6
ROW_MULTIPLE = 128
# Rows of the buffer start at multiples of this many elements: odd vocabularies (50,257) then still get vector loads,
# and matrix products without cuBLAS's slow unaligned kernels.
COLUMN_MULTIPLE = 64
# Columns of one step. 32 elements a thread of 512 keep enough registers busy for one program a multiprocessor, so that
# few rows are under way and their second read finds more of them in the cache.
MAX_BLOCK = 16384
SCALE_BLOCK = 4096
# Scratch of the products that have no accumulating form (see `_product_kind`).
SLICE_BYTES = 64 * 2**20
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MEAN, SUM, DIVIDE = 0, 1, 2
LOWEST = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def _divisor_kernel(
    labels, rows, ignore_index, divisor, scales, COUNT: tl.constexpr, FROM_MEMORY: tl.constexpr, BLOCK: tl.constexpr
):
    """scales = (1 / count, its mantissa, its power of two)."""
    if COUNT:
        counted = tl.zeros((BLOCK,), dtype=tl.int32)
        start = 0
        # Not a range: the interpreter needs constants for its bounds, and rows differ from batch to batch.
        while start < rows:
            offsets = start + tl.arange(0, BLOCK)
            label = tl.load(labels + offsets, mask=offsets < rows, other=ignore_index)
            counted += (label != ignore_index).to(tl.int32)
            start += BLOCK
        count = tl.sum(counted, axis=0).to(tl.float32)
    elif FROM_MEMORY:
        count = tl.load(divisor).to(tl.float32)
    else:
        count = tl.full((), divisor, dtype=tl.float32)
    scale = 1.0 / count
    power = (scale.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    # A power of 0 or inf (count of 0, inf or nan) has no mantissa: the scale itself then, so that it shows.
    power = tl.where((power > 0.0) & (power < float("inf")), power, 1.0)
    tl.store(scales, scale)
    tl.store(scales + 1, scale / power)
    tl.store(scales + 2, power)


@triton.jit
def _cap(value, softcap, CAP: tl.constexpr):
    """softcap * tanh(value / softcap) and its derivative by value."""
    derivative = 1.0
    if CAP:
        # tanh from the exponential of a number that is never positive: it cannot overflow.
        decay = tl.exp(-2.0 * tl.abs(value) / softcap)
        tangent = softcap * (1.0 - decay) / (1.0 + decay)
        value = tl.where(value < 0.0, -tangent, tangent)
        derivative = 4.0 * decay / ((1.0 + decay) * (1.0 + decay))
    return value, derivative


@triton.jit
def _load_logits(
    logits,
    bias,
    columns,
    vocabulary,
    stride,
    softcap,
    HAS_BIAS: tl.constexpr,
    CAP: tl.constexpr,
    LAST: tl.constexpr,
    POLICY: tl.constexpr,
):
    """Logits in fp32 and the derivative of the cap; in the last block, -inf beyond the vocabulary."""
    if LAST:
        # The mask is the padded row, a multiple of 64: the vocabulary, if odd, would break the vector loads.
        value = tl.load(logits + columns, mask=columns < stride, other=0.0, eviction_policy=POLICY).to(tl.float32)
        if HAS_BIAS:
            value += tl.load(bias + columns, mask=columns < vocabulary, other=0.0).to(tl.float32)
    else:
        value = tl.load(logits + columns, eviction_policy=POLICY).to(tl.float32)
        if HAS_BIAS:
            value += tl.load(bias + columns).to(tl.float32)
    value, derivative = _cap(value, softcap, CAP)
    if LAST:
        value = tl.where(columns < vocabulary, value, -float("inf"))
    return value, derivative


@triton.jit
def _include(
    largest,
    total,
    plain,
    logits,
    bias,
    columns,
    vocabulary,
    stride,
    softcap,
    HAS_BIAS: tl.constexpr,
    CAP: tl.constexpr,
    SMOOTH: tl.constexpr,
    LAST: tl.constexpr,
    POLICY: tl.constexpr,
):
    """Take a block into the running maximum, sum of exponentials and sum.

    Every lane keeps its own: no reduction within the loop, and one exponential for an element, of the distance between
    the new value and the maximum, whichever of the two is larger.
    """
    value, _ = _load_logits(logits, bias, columns, vocabulary, stride, softcap, HAS_BIAS, CAP, LAST, POLICY)
    if SMOOTH:
        plain += tl.where(columns < vocabulary, value, 0.0) if LAST else value
    distance = tl.exp(-tl.abs(value - largest))
    total = tl.where(value > largest, total * distance + 1.0, total + distance)
    return tl.where(value > largest, value, largest), total, plain


@triton.jit
def _write_gradient(
    logits,
    bias,
    label,
    start,
    vocabulary,
    stride,
    softcap,
    log_sum,
    softmax_scale,
    smooth_part,
    target_part,
    HAS_BIAS: tl.constexpr,
    CAP: tl.constexpr,
    LAST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    columns = start + tl.arange(0, BLOCK)
    value, derivative = _load_logits(
        logits, bias, columns, vocabulary, stride, softcap, HAS_BIAS, CAP, LAST, "evict_first"
    )
    gradient = tl.exp(value - log_sum) * softmax_scale - smooth_part
    # Only one block holds the label: the others are spared a comparison for each element.
    if (label >= start) & (label < start + BLOCK):
        gradient = tl.where(columns == label, gradient - target_part, gradient)
    gradient *= derivative
    if LAST:
        tl.store(logits + columns, gradient.to(logits.dtype.element_ty), mask=columns < stride)
    else:
        tl.store(logits + columns, gradient.to(logits.dtype.element_ty))


@triton.jit
def _row_kernel(
    logits,
    bias,
    labels,
    row_losses,
    scales,
    vocabulary,
    stride,
    ignore_index,
    smoothing,
    z_loss,
    softcap,
    HAS_BIAS: tl.constexpr,
    CAP: tl.constexpr,
    SMOOTH: tl.constexpr,
    GRADIENT: tl.constexpr,
    LAST_START: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Loss of one row of logits; with GRADIENT the row becomes its gradient, times the mantissa of 1 / count."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    label = tl.load(labels + row)
    lanes = tl.arange(0, BLOCK)
    if label == ignore_index:
        tl.store(row_losses + row, 0.0)
        if GRADIENT:
            nothing = tl.zeros((BLOCK,), dtype=logits.dtype.element_ty)
            for start in range(0, LAST_START + BLOCK, BLOCK):
                tl.store(logits + start + lanes, nothing, mask=start + lanes < stride)
    else:
        valid = (label >= 0) & (label < vocabulary)
        at = tl.where(valid, label, 0)
        # Read before the reductions below: their barriers keep it ahead of the stores of other threads.
        target = tl.load(logits + at).to(tl.float32)
        if HAS_BIAS:
            target += tl.load(bias + at).to(tl.float32)
        target, _ = _cap(target, softcap, CAP)

        policy: tl.constexpr = "evict_last" if GRADIENT else ""
        largest = tl.full((BLOCK,), LOWEST, dtype=tl.float32)
        total = tl.zeros((BLOCK,), dtype=tl.float32)
        plain = tl.zeros((BLOCK,), dtype=tl.float32)
        for start in range(0, LAST_START, BLOCK):
            largest, total, plain = _include(
                largest, total, plain, logits, bias, start + lanes, vocabulary, stride, softcap,
                HAS_BIAS, CAP, SMOOTH, False, policy,
            )  # fmt: skip
        largest, total, plain = _include(
            largest, total, plain, logits, bias, LAST_START + lanes, vocabulary, stride, softcap,
            HAS_BIAS, CAP, SMOOTH, True, policy,
        )  # fmt: skip
        top = tl.max(largest, axis=0)
        log_sum = top + tl.log(tl.sum(total * tl.exp(largest - top), axis=0))

        loss = (1.0 - smoothing) * (log_sum - target) + z_loss * log_sum * log_sum
        if SMOOTH:
            loss += smoothing * (log_sum - tl.sum(plain, axis=0) / vocabulary)
        tl.store(row_losses + row, tl.where(valid, loss, float("nan")))

        if GRADIENT:
            scale = tl.where(valid, tl.load(scales + 1), float("nan"))
            softmax_scale = (1.0 + 2.0 * z_loss * log_sum) * scale
            smooth_part = smoothing / vocabulary * scale
            target_part = (1.0 - smoothing) * scale
            # From the end backwards: what was read last is what the cache still holds.
            _write_gradient(
                logits, bias, label, LAST_START, vocabulary, stride, softcap,
                log_sum, softmax_scale, smooth_part, target_part, HAS_BIAS, CAP, True, BLOCK,
            )  # fmt: skip
            for done in range(0, LAST_START, BLOCK):
                _write_gradient(
                    logits, bias, label, LAST_START - BLOCK - done, vocabulary, stride, softcap,
                    log_sum, softmax_scale, smooth_part, target_part, HAS_BIAS, CAP, False, BLOCK,
                )  # fmt: skip


@triton.jit
def _scale_kernel(source, destination, grad_loss, scales, numel, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < numel
    scale = tl.load(grad_loss).to(tl.float32) * tl.load(scales + 2)
    value = tl.load(source + offsets, mask=mask, other=0.0).to(tl.float32) * scale
    tl.store(destination + offsets, value.to(destination.dtype.element_ty), mask=mask)


@cache
def _product_kind(device: torch.device, dtype: torch.dtype) -> str:
    """How an fp32 matrix can take up a product of 16-bit matrices: tried once, as versions and devices differ.

    "accumulate": cuBLAS adds to the matrix. "widen": the product comes in fp32 but has to be added by itself (torch
    before the accumulator could be of another dtype than the factors). "convert": neither exists (CPU).
    """
    if dtype == torch.float32:
        return "accumulate"
    factor, matrix = torch.zeros(16, 16, dtype=dtype, device=device), torch.zeros(16, 16, device=device)
    try:
        torch.ops.aten.addmm.dtype_out(matrix, factor, factor, torch.float32, out=matrix)
        return "accumulate"
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, AttributeError):
        pass
    try:
        torch.ops.aten.mm.dtype_out(factor, factor, torch.float32, out=matrix)
        return "widen"
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, AttributeError):
        return "convert"


def _add_product_(matrix: torch.Tensor, left: torch.Tensor, right: torch.Tensor, first: bool) -> None:
    """fp32 matrix [a, b] += left [a, c] @ right [c, b]; with `first` the product replaces what it held."""
    kind = _product_kind(left.device, left.dtype)
    if kind == "accumulate":
        beta = 0 if first else 1
        if left.dtype == torch.float32:
            torch.addmm(matrix, left, right, beta=beta, out=matrix)
        else:
            torch.ops.aten.addmm.dtype_out(matrix, left, right, torch.float32, beta=beta, out=matrix)
        return
    height = max(1, SLICE_BYTES // (4 * matrix.shape[1]))
    if kind == "convert":
        right = right.float()
    for part, rows in zip(matrix.split(height), left.split(height), strict=True):
        target = part if first else torch.empty_like(part)
        if kind == "widen":
            torch.ops.aten.mm.dtype_out(rows, right, torch.float32, out=target)
        else:
            torch.mm(rows.float(), right, out=target)
        if not first:
            part.add_(target)


class _WeightGradient:
    """Sum of products in fp32 that ends as one matrix [v, h] of `dtype`.

    For bf16 the first half of the rows is summed in the very memory of the result, so that beside the result there is
    one more of its size and not two: 0.62 GB for 151,936 x 2,048.
    """

    def __init__(self, weight: torch.Tensor, chunks: int) -> None:
        rows, width = weight.shape
        # fp16 stays fp32 until the incoming gradient is known: a sum over rows can pass 65,504 before it is divided.
        dtype = torch.float32 if weight.dtype == torch.float16 else weight.dtype
        self.result = torch.empty(rows, width, dtype=dtype, device=weight.device)
        self.parts = [self.result]
        self.in_place = dtype == torch.float32 or chunks == 1
        self.first = True
        if not self.in_place:
            half = rows // 2 // 8 * 8  # the second half of a row of logits then starts at 16 bytes too
            lower = self.result.view(-1)[: 2 * half * width].view(torch.float32).view(half, width)
            self.parts = [lower, torch.empty(rows - half, width, device=weight.device)]

    def add_(self, grad_logits: torch.Tensor, hidden: torch.Tensor) -> None:
        """Add grad_logits [c, v]^T @ hidden [c, h]."""
        left = grad_logits.T
        if self.result.dtype == hidden.dtype and self.in_place and self.first:
            torch.mm(left, hidden, out=self.result)
        else:
            sizes = [part.shape[0] for part in self.parts]
            for part, rows in zip(self.parts, left.split(sizes), strict=True):
                if part.numel():
                    _add_product_(part, rows, hidden, self.first)
        self.first = False

    def finish(self) -> torch.Tensor:
        if not self.in_place:
            lower, upper = self.parts
            half = lower.shape[0]
            # The rounded rows lie where other rows of the sum still are: they need a place of their own meanwhile.
            rounded = lower.to(self.result.dtype)
            self.result[:half].copy_(rounded)
            self.result[half:].copy_(upper)
        self.parts = []
        return self.result


def _chunk_rows(rows: int, padded: int, itemsize: int) -> int:
    """Rows of a chunk: chunks of about one size, multiples of ROW_MULTIPLE, within CHUNK_BYTES where that can be."""
    limit = max(ROW_MULTIPLE, CHUNK_BYTES // (padded * itemsize) // ROW_MULTIPLE * ROW_MULTIPLE)
    even = triton.cdiv(rows, triton.cdiv(rows, limit))
    return min(rows, triton.cdiv(even, ROW_MULTIPLE) * ROW_MULTIPLE)


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
    """-> loss, gradients of hidden, weight and bias before their power of two (empty where not needed), scales [3]."""
    rows, vocabulary = hidden.shape[0], weight.shape[0]
    device, dtype = hidden.device, hidden.dtype
    empty = [torch.empty(0, dtype=dtype, device=device) for _ in range(3)]
    grad_hidden = torch.empty(hidden.shape, dtype=dtype, device=device) if need_hidden else empty[0]
    scales = torch.empty(3, dtype=torch.float32, device=device)
    if not rows:
        grad_weight = torch.zeros(weight.shape, dtype=_sum_dtype(dtype), device=device) if need_weight else empty[1]
        grad_bias = torch.zeros(vocabulary, device=device) if need_bias else empty[2].float()
        loss = torch.full((), float("nan") if division == MEAN else 0.0, device=device)
        return loss, grad_hidden, grad_weight, grad_bias, scales.fill_(1.0)

    labels = labels.contiguous()
    hidden = hidden if hidden.stride(1) == 1 else hidden.contiguous()
    bias = None if bias is None else bias.contiguous()
    _divisor_kernel[(1,)](
        labels,
        rows,
        ignore_index,
        divisor if divisor is not None else divisor_value,
        scales,
        COUNT=division == MEAN,
        FROM_MEMORY=divisor is not None,
        BLOCK=SCALE_BLOCK,
        num_warps=8,
    )
    padded = triton.cdiv(vocabulary, COLUMN_MULTIPLE) * COLUMN_MULTIPLE
    step = _chunk_rows(rows, padded, hidden.element_size())
    buffer = torch.empty(step, padded, dtype=dtype, device=device)
    row_losses = torch.empty(rows, dtype=torch.float32, device=device)
    weight_sum = _WeightGradient(weight, triton.cdiv(rows, step)) if need_weight else None
    grad_bias = torch.zeros(vocabulary, device=device) if need_bias else empty[2].float()
    # A bias or the sum of the logits takes as many registers again: whole blocks would spill.
    widest = MAX_BLOCK // 2 if bias is not None or label_smoothing else MAX_BLOCK
    block = min(widest, triton.next_power_of_2(vocabulary))
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        part = hidden[start:stop]
        logits = buffer[: stop - start, :vocabulary]
        torch.mm(part, weight.T, out=logits)
        _row_kernel[(stop - start,)](
            logits,
            bias,
            labels[start:stop],
            row_losses[start:stop],
            scales,
            vocabulary,
            padded,
            ignore_index,
            label_smoothing,
            z_loss,
            1.0 if softcap is None else softcap,
            HAS_BIAS=bias is not None,
            CAP=softcap is not None,
            SMOOTH=label_smoothing != 0.0,
            GRADIENT=need_hidden or need_weight or need_bias,
            LAST_START=(vocabulary - 1) // block * block,
            BLOCK=block,
            num_warps=max(1, min(16, block // 512)),
        )
        if need_hidden:
            torch.mm(logits, weight, out=grad_hidden[start:stop])
        if weight_sum is not None:
            weight_sum.add_(logits, part)
        if need_bias:
            grad_bias += logits.sum(dim=0, dtype=torch.float32)
    # Before the sum of the weight gradient takes its temporary memory.
    del buffer, logits
    grad_weight = empty[1] if weight_sum is None else weight_sum.finish()
    return row_losses.sum() * scales[0], grad_hidden, grad_weight, grad_bias, scales


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype == torch.float16 else dtype


@_linear_cross_entropy.register_fake
def _(hidden, weight, *others):
    need_hidden, need_weight, need_bias = others[-3:]

    def gradient(source, dtype, needed):
        return torch.empty(source.shape if needed else (0,), dtype=dtype, device=hidden.device)

    return (
        torch.empty((), dtype=torch.float32, device=hidden.device),
        gradient(hidden, hidden.dtype, need_hidden),
        gradient(weight, _sum_dtype(weight.dtype) if need_weight else weight.dtype, need_weight),
        gradient(weight[:, 0], torch.float32, need_bias),
        torch.empty(3, dtype=torch.float32, device=hidden.device),
    )


@torch.library.custom_op("ds_slide::linear_cross_entropy_backward", mutates_args=())
def _scale_gradient(
    gradient: torch.Tensor, grad_loss: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """gradient * grad_loss * scales[2], rounded once to `dtype`."""
    scaled = torch.empty(gradient.shape, dtype=dtype, device=gradient.device)
    numel = gradient.numel()
    if numel:
        grid = (triton.cdiv(numel, SCALE_BLOCK),)
        _scale_kernel[grid](gradient, scaled, grad_loss, scales, numel, BLOCK=SCALE_BLOCK, num_warps=8)
    return scaled


@_scale_gradient.register_fake
def _(gradient, _grad_loss, _scales, dtype):
    return torch.empty(gradient.shape, dtype=dtype, device=gradient.device)


def _save_gradients(ctx, inputs, output):
    hidden, weight, _, bias = inputs[:4]
    ctx.dtypes = (hidden.dtype, weight.dtype, None if bias is None else bias.dtype)
    ctx.needed = inputs[-3:]
    # The gradients among the outputs have none of their own: zeros for them would take as much memory again.
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


def _check(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, bias: torch.Tensor | None) -> None:
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1] or not weight.shape[0]:
        raise SlideConfigError(
            f"linear_cross_entropy needs hidden [n, h] and weight [v, h] with v > 0, not {tuple(hidden.shape)} and "
            f"{tuple(weight.shape)}: flatten the tokens into rows."
        )
    if hidden.dtype != weight.dtype or (bias is not None and bias.dtype != weight.dtype):
        shown = "" if bias is None else f", bias in {bias.dtype}"
        raise SlideConfigError(
            f"linear_cross_entropy got hidden in {hidden.dtype} and weight in {weight.dtype}{shown}: cast to one dtype."
        )
    if weight.dtype not in DTYPES:
        raise SlideConfigError(f"linear_cross_entropy cannot use {weight.dtype}: cast to bfloat16, float16 or float32.")
    if labels.shape != hidden.shape[:1] or labels.dtype != torch.int64:
        raise SlideConfigError(
            f"linear_cross_entropy needs int64 labels [{hidden.shape[0]}], not {labels.dtype} {tuple(labels.shape)}: "
            "flatten and cast them as the rows of hidden."
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise SlideConfigError(
            f"linear_cross_entropy needs a bias [{weight.shape[0]}], not {tuple(bias.shape)}: one element a word."
        )


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
    """Cross-entropy of `hidden @ weight.T + bias` against `labels`, fp32, 0-d; the logits never exist as a whole.

    hidden [n, h] and weight [v, h] (and bias [v]) are bf16, fp16 or fp32, all of one dtype; labels [n] are int64.
    Logits are rounded to that dtype as they leave the matrix product; everything after it is fp32.

    The parts are those of `torch.nn.functional.cross_entropy`, with three more: `softcap` replaces every logit by
    softcap * tanh(logit / softcap) first; `z_loss` adds z_loss * logsumexp^2 for each counted row; `num_items` (an int
    or a 0-d tensor) divides the sum over rows whatever `reduction` ("mean" or "sum") says. The mean over no counted row
    is nan, with gradients of zero. A label outside [0, v) that is not `ignore_index` makes the loss and the gradients
    it reaches nan (torch would stop with a device-side assertion); nothing here waits for the device to look.

    Gradients are computed by this call for those inputs that require them; a second derivative is refused by
    SlideError. Arguments that cannot be used raise SlideConfigError.
    """
    _check(hidden, weight, labels, bias)
    if reduction not in ("mean", "sum"):
        raise SlideConfigError(f'linear_cross_entropy has no reduction "{reduction}": use "mean" or "sum".')
    if softcap is not None and not softcap > 0:
        raise SlideConfigError(f"linear_cross_entropy got a softcap of {softcap}: give a positive number, or None.")
    if not 0.0 <= label_smoothing <= 1.0:
        raise SlideConfigError(f"linear_cross_entropy got label_smoothing {label_smoothing}: give one within [0, 1].")
    division, divisor, divisor_value = (MEAN if reduction == "mean" else SUM), None, 1.0
    if isinstance(num_items, torch.Tensor):
        if num_items.ndim:
            shape = tuple(num_items.shape)
            raise SlideConfigError(f"linear_cross_entropy got num_items {shape}: give an int or a 0-d tensor.")
        division, divisor = DIVIDE, num_items.detach().to(hidden.device, non_blocking=True)
    elif num_items is not None:
        division, divisor_value = DIVIDE, float(num_items)
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
