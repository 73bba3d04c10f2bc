"""Rotary position embedding of queries and keys: one launch for both, one read and one write of each.

Arithmetic: fp32 inside (fp64 for fp64 inputs) and one rounding to the dtype of q. transformers rounds three times in
bf16 (each product, then their sum). So it differs from this file by up to 1.5 units in the last place of the larger
product. With fp32 cos and sin transformers returns fp32, and this file returns the dtype of q.

The two halves of cos and sin are read separately, so they may differ. The rotation is then linear but not orthogonal.
The backward is the transposed map, needs only cos and sin, and stays exact.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ds_slide.errors import SlideError
from ds_slide.kernels.operator import operator
from ds_slide.kernels.replay import start

# Pairs (first half, second half) of one program: 16 per thread of four warps are four 16-byte bf16 loads in flight.
PAIRS = 2048
PAIRS_A_WARP = 512
# A tile of heads larger than this would spill.
MAX_PAIRS = 4096
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@triton.jit
def _load_heads(
    source,
    rows,
    head_stride,
    in_range,
    tile_index,
    HEADS: tl.constexpr,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
    ROTARY: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
):
    """Return pointers to first halves, second halves and rest of a tile of heads. `rows` [positions, 1, 1]: offsets of
    head 0."""
    HALF: tl.constexpr = ROTARY // 2
    head = tile_index * TILE + tl.arange(0, TILE)[None, :, None]
    # int64: heads * positions * width of one sample may pass 2^31 where heads are the outer dimension.
    pointers = source + rows + head.to(tl.int64) * head_stride
    mask = in_range & (head < HEADS)
    column = tl.arange(0, HALF_BLOCK)[None, None, :]
    first = tl.load(pointers + column, mask=mask & (column < HALF), other=0.0)
    second = tl.load(pointers + (column + HALF), mask=mask & (column < HALF), other=0.0)
    rest = first
    if ROTARY < WIDTH:
        column = ROTARY + tl.arange(0, REST_BLOCK)[None, None, :]
        rest = tl.load(pointers + column, mask=mask & (column < WIDTH), other=0.0)
    return first, second, rest


@triton.jit
def _rotate_and_store(
    first,
    second,
    rest,
    target,
    rows,
    head_stride,
    in_range,
    tile_index,
    cos,
    sin,
    angles,
    HEADS: tl.constexpr,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
    ROTARY: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    WIDE: tl.constexpr,
):
    HALF: tl.constexpr = ROTARY // 2
    column = tl.arange(0, HALF_BLOCK)[None, None, :]
    head = tile_index * TILE + tl.arange(0, TILE)[None, :, None]
    mask = in_range & (head < HEADS)
    half_mask = mask & (column < HALF)
    # All heads share one address, read in the layout of the tile in whole vectors from the first cache. A tile
    # [positions, 1, half] would be read by single elements and pass through shared memory.
    angles = angles + column + tl.zeros_like(head)
    cos_first = tl.load(cos + angles, mask=half_mask, other=0.0).to(WIDE)
    sin_first = tl.load(sin + angles, mask=half_mask, other=0.0).to(WIDE)
    cos_second = tl.load(cos + (angles + HALF), mask=half_mask, other=0.0).to(WIDE)
    sin_second = tl.load(sin + (angles + HALF), mask=half_mask, other=0.0).to(WIDE)
    first = first.to(WIDE)
    second = second.to(WIDE)
    if TRANSPOSED:
        new_first = first * cos_first + second * sin_second
        new_second = second * cos_second - first * sin_first
    else:
        new_first = first * cos_first - second * sin_first
        new_second = second * cos_second + first * sin_second
    pointers = target + rows + head.to(tl.int64) * head_stride
    tl.store(pointers + column, new_first.to(target.dtype.element_ty), mask=half_mask)
    tl.store(pointers + (column + HALF), new_second.to(target.dtype.element_ty), mask=half_mask)
    if ROTARY < WIDTH:
        column = ROTARY + tl.arange(0, REST_BLOCK)[None, None, :]
        tl.store(pointers + column, rest, mask=mask & (column < WIDTH))


@triton.jit
def _rope_kernel(
    q,
    k,
    new_q,
    new_k,
    cos,
    sin,
    positions,
    position_blocks,
    q_batch,
    q_head,
    q_position,
    k_batch,
    k_head,
    k_position,
    new_q_batch,
    new_q_head,
    new_q_position,
    new_k_batch,
    new_k_head,
    new_k_position,
    angle_batch,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    Q_TILE: tl.constexpr,
    K_TILE: tl.constexpr,
    TILES: tl.constexpr,
    WIDTH: tl.constexpr,
    ROTARY: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    POSITION_BLOCK: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    WIDE: tl.constexpr,
):
    program = tl.program_id(0)
    batch = (program // position_blocks).to(tl.int64)
    start = (program % position_blocks) * POSITION_BLOCK
    position = (start + tl.arange(0, POSITION_BLOCK))[:, None, None].to(tl.int64)
    in_range = position < positions
    q_rows = batch * q_batch + position * q_position
    k_rows = batch * k_batch + position * k_position
    new_q_rows = batch * new_q_batch + position * new_q_position
    new_k_rows = batch * new_k_batch + position * new_k_position
    angles = batch * angle_batch + position * ROTARY

    for tile in tl.static_range(TILES):
        # k is loaded before q is stored, because the compiler keeps loads behind stores that might overlap them.
        if tile * Q_TILE < Q_HEADS:
            q_first, q_second, q_rest = _load_heads(
                q, q_rows, q_head, in_range, tile, Q_HEADS, Q_TILE, WIDTH, ROTARY, HALF_BLOCK, REST_BLOCK
            )
        if tile * K_TILE < K_HEADS:
            k_first, k_second, k_rest = _load_heads(
                k, k_rows, k_head, in_range, tile, K_HEADS, K_TILE, WIDTH, ROTARY, HALF_BLOCK, REST_BLOCK
            )
        if tile * Q_TILE < Q_HEADS:
            _rotate_and_store(
                q_first,
                q_second,
                q_rest,
                new_q,
                new_q_rows,
                new_q_head,
                in_range,
                tile,
                cos,
                sin,
                angles,
                Q_HEADS,
                Q_TILE,
                WIDTH,
                ROTARY,
                HALF_BLOCK,
                REST_BLOCK,
                TRANSPOSED,
                WIDE,
            )
        if tile * K_TILE < K_HEADS:
            _rotate_and_store(
                k_first,
                k_second,
                k_rest,
                new_k,
                new_k_rows,
                new_k_head,
                in_range,
                tile,
                cos,
                sin,
                angles,
                K_HEADS,
                K_TILE,
                WIDTH,
                ROTARY,
                HALF_BLOCK,
                REST_BLOCK,
                TRANSPOSED,
                WIDE,
            )


def _head_tile(heads: int, lanes: int) -> int:
    """Return how many heads a program handles: a power of two that leaves at most a quarter of its lanes idle."""
    tile = min(triton.next_power_of_2(heads), max(1, MAX_PAIRS // lanes))
    while 3 * tile * triton.cdiv(heads, tile) > 4 * heads:
        tile //= 2
    return tile


def _is_position_major(states: torch.Tensor) -> bool:
    """Whether [batch, heads, positions, d] lies in memory as [batch, positions, heads, d]."""
    return bool(states.stride(1) <= states.stride(2))


def _empty(states: torch.Tensor, position_major: bool) -> torch.Tensor:
    batch, heads, positions, width = states.shape
    if position_major:
        return states.new_empty((batch, positions, heads, width)).transpose(1, 2)
    return states.new_empty((batch, heads, positions, width))


def _launch(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_position_major: bool,
    k_position_major: bool,
    transposed: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    new_q, new_k = _empty(q, q_position_major), _empty(k, k_position_major)
    batch, q_heads, positions, width = q.shape
    if not batch or not positions:
        return new_q, new_k
    if q.stride(3) != 1:
        q = q.contiguous()
    if k.stride(3) != 1:
        k = k.contiguous()
    k_heads, rotary = k.shape[1], cos.shape[2]
    # A constant row length keeps their loads whole vectors (stride arguments are known only as multiples of 16).
    if cos.stride()[1:] != (rotary, 1) or cos.stride() != sin.stride():
        cos, sin = cos.contiguous(), sin.contiguous()
    half_block = triton.next_power_of_2(rotary // 2)
    rest_block = triton.next_power_of_2(max(1, width - rotary))
    # Elements of a head and half. A short rotary part must not make programs with a huge other part.
    lanes = max(half_block, rest_block // 2) if rotary < width else half_block
    q_tile, k_tile = _head_tile(q_heads, lanes), _head_tile(k_heads, lanes)
    position_block = min(max(1, PAIRS // (q_tile * lanes)), triton.next_power_of_2(positions))
    position_blocks = triton.cdiv(positions, position_block)
    pairs = position_block * q_tile * lanes
    start(
        _rope_kernel,
        (batch * position_blocks,),
        q,
        k,
        new_q,
        new_k,
        cos,
        sin,
        positions,
        position_blocks,
        *q.stride()[:3],
        *k.stride()[:3],
        *new_q.stride()[:3],
        *new_k.stride()[:3],
        cos.stride(0) if cos.shape[0] > 1 else 0,
        Q_HEADS=q_heads,
        K_HEADS=k_heads,
        Q_TILE=q_tile,
        K_TILE=k_tile,
        TILES=max(triton.cdiv(q_heads, q_tile), triton.cdiv(k_heads, k_tile)),
        WIDTH=width,
        ROTARY=rotary,
        HALF_BLOCK=half_block,
        REST_BLOCK=rest_block,
        POSITION_BLOCK=position_block,
        TRANSPOSED=transposed,
        WIDE=tl.float64 if q.dtype == torch.float64 else tl.float32,
        num_warps=min(max(pairs // PAIRS_A_WARP, 1), 8),
    )
    return new_q, new_k


@operator("ds_slide::rope", "(Tensor q, Tensor k, Tensor cos, Tensor sin) -> (Tensor, Tensor)")
def _rope(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return _launch(q, k, cos, sin, _is_position_major(q), _is_position_major(k), transposed=False)


@operator(
    "ds_slide::rope_backward",
    "(Tensor grad_q, Tensor grad_k, Tensor cos, Tensor sin, bool q_position_major, bool k_position_major)"
    " -> (Tensor, Tensor)",
)
def _rope_backward(
    grad_q: torch.Tensor,
    grad_k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_position_major: bool,
    k_position_major: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    return _launch(grad_q, grad_k, cos, sin, q_position_major, k_position_major, transposed=True)


@_rope.register_fake
def _(q, k, cos, sin):  # noqa: ARG001
    return _empty(q, _is_position_major(q)), _empty(k, _is_position_major(k))


@_rope_backward.register_fake
def _(grad_q, grad_k, cos, sin, q_position_major, k_position_major):  # noqa: ARG001
    return _empty(grad_q, q_position_major), _empty(grad_k, k_position_major)


def _setup_context(ctx, inputs, output):  # noqa: ARG001
    q, k, cos, sin = inputs
    ctx.save_for_backward(cos, sin)
    # The gradients go back to the projection of q and k, so they get the layout of q and k, not attention's.
    ctx.position_major = (_is_position_major(q), _is_position_major(k))


def _backward(launch, ctx, grad_q, grad_k):
    return *launch(grad_q, grad_k, *ctx.saved_tensors, *ctx.position_major), None, None


_rope.register_autograd(_rope_backward, _backward, _setup_context)


def rope(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate queries and keys by their positions, on the first r of their d dimensions. The others are copied.

    q [batch, q_heads, positions, d] and k [batch, k_heads, positions, d]: bf16, fp16, fp32 or fp64, any strides (a last
    dimension that is not contiguous costs a copy). cos and sin [batch or 1, positions, r], r even, in the dtype of q or
    in fp32, constants. Returns new tensors with the shapes, dtype and memory order of q and k: a transposed view of
    [batch, positions, heads, d] gives such a view.

    Raises SlideError where shapes or dtypes do not fit, or where cos or sin require a gradient.
    """
    if q.dim() != 4 or k.dim() != 4 or q.shape[0] != k.shape[0] or q.shape[2:] != k.shape[2:]:
        raise SlideError(
            f"rope: q {tuple(q.shape)} and k {tuple(k.shape)} need [batch, heads, positions, d], alike but in heads."
        )
    if not q.shape[1] or not k.shape[1]:
        raise SlideError(f"rope: q {tuple(q.shape)} and k {tuple(k.shape)} need at least one head each.")
    if cos.dim() != 3 or cos.shape != sin.shape or cos.shape[0] not in (1, q.shape[0]) or cos.shape[1] != q.shape[2]:
        raise SlideError(
            f"rope: cos {tuple(cos.shape)} and sin {tuple(sin.shape)} must be [batch or 1, positions, r] "
            f"for q {tuple(q.shape)}."
        )
    if cos.shape[2] % 2 or not 0 < cos.shape[2] <= q.shape[3]:
        raise SlideError(f"rope: cos has {cos.shape[2]} columns, give an even number from 2 to d = {q.shape[3]}.")
    if q.dtype not in DTYPES or k.dtype != q.dtype:
        raise SlideError(f"rope: q is {q.dtype} and k {k.dtype}, give both in one floating type of 16, 32 or 64 bits.")
    if cos.dtype not in (q.dtype, torch.float32) or sin.dtype != cos.dtype:
        raise SlideError(f"rope: cos is {cos.dtype} and sin {sin.dtype}, give both in {q.dtype} or torch.float32.")
    if cos.requires_grad or sin.requires_grad:
        raise SlideError("rope: cos and sin get no gradient here, detach them or use eager torch.")
    return _rope(q, k, cos, sin)
