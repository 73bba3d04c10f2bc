"""Packing a block's gradients into one flat buffer: gather, cast, optionally add, and sum squares in the same pass.

Bytes of an element of 16-bit gradients: 2 read, 2 written, and 2 more read when accumulating. A copy followed by a sum
would read the buffer once more. The square sum is also the check for inf and nan: it is finite exactly if every element
of the buffer is finite. (Its terms are squares in fp64, at most 1.2e77 each for fp32, so it cannot overflow by itself.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ds_slide.errors import SlideError
from ds_slide.kernels.constants import ALIGNMENT
from ds_slide.kernels.dtypes import KERNEL_DTYPES
from ds_slide.kernels.launch import Compiled, aligned, launch, unit_of
from ds_slide.kernels.offload.square_sum import combine

# Elements of one program: 256 threads hold 32 each, with four vector loads of 16 bytes in flight per thread. Each BLOCK
# has its partial sum at a fixed place of the layout, so neither the device nor the launch changes the value.
BLOCK = 8192
NUM_WARPS = 8
CHUNK = 1024
# Gradients of one launch. Blocks have 9 to 14. Shorter launches are filled up, so that a unit with a changing number of
# gradients (experts) never compiles another kernel.
WIDTH = 16
_COMPILED: Compiled = {}


@triton.jit
def widened(value, dtype: tl.constexpr):
    """Return `value` in fp32, to be added and rounded to `dtype`."""
    if value.dtype == tl.bfloat16 and dtype == tl.float16:
        # The cast uses bits: LLVM would narrow the addition to fp16 (8 mantissa bits fit 11), which lacks exponents.
        return (value.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return value.to(tl.float32)


@triton.jit
def _pack_whole(source, buffer, ACCUMULATE: tl.constexpr, BLOCK: tl.constexpr):
    """Pack BLOCK elements that all come from the source, and return their square sum. Masks would break the vector
    loads."""
    lanes = tl.arange(0, BLOCK)
    value = tl.load(source + lanes)
    if ACCUMULATE:
        value = tl.load(buffer + lanes).to(tl.float32) + widened(value, buffer.dtype.element_ty)
    value = value.to(buffer.dtype.element_ty)
    tl.store(buffer + lanes, value)
    # The square is exact: a number of at most 24 bits has a square that fits the 53 bits of fp64.
    wide = value.to(tl.float32).to(tl.float64)
    return tl.sum(wide * wide, axis=0)


@triton.jit
def _pack_rest(source, buffer, numel, extent, ACCUMULATE: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr):
    """Pack the end of a part: `numel` elements from the source, and the rest of `extent` without one. Return the square
    sum.

    The steps are small: with masks of 32 elements per thread the registers of one program would fill a multiprocessor.
    """
    squares = tl.zeros((CHUNK,), dtype=tl.float64)
    for step in range(0, BLOCK, CHUNK):
        lanes = step + tl.arange(0, CHUNK)
        given = lanes < numel
        value = tl.load(source + lanes, mask=given, other=0.0)
        if ACCUMULATE:
            old = tl.load(buffer + lanes, mask=lanes < extent, other=0.0)
            total = old.to(tl.float32) + widened(value, buffer.dtype.element_ty)
            # tl.where chooses, because adding zero would turn -0.0 into 0.0.
            value = tl.where(given, total.to(buffer.dtype.element_ty), old)
        else:
            value = value.to(buffer.dtype.element_ty)
        tl.store(buffer + lanes, value, mask=lanes < extent)
        wide = value.to(tl.float32).to(tl.float64)
        squares += wide * wide
    return tl.sum(squares, axis=0)


@triton.jit
def _pack_kernel(
    sources,
    buffer,
    partial,
    table,
    WIDTH: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    PART: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    of_all = tl.program_id(0)
    program = of_all
    if PART:  # the programs of one rank after those of the other
        programs = tl.load(table + 5 * WIDTH).to(tl.int32)
        program = of_all % programs
    source = sources[0]
    index = 0
    for later in tl.static_range(1, WIDTH):
        begun = program >= tl.load(table + later)
        source = tl.where(begun, sources[later], source)
        index = tl.where(begun, later, index)
    first = tl.load(table + index)
    start = tl.load(table + WIDTH + index)
    numel = tl.load(table + 2 * WIDTH + index)
    extent = tl.load(table + 3 * WIDTH + index)
    if PART:
        rank = (of_all // programs).to(tl.int64)
        part = tl.load(table + 4 * WIDTH + index) * PART
        source += rank * part
        start += rank * tl.load(table + 5 * WIDTH + 1)
        numel = tl.minimum(numel - rank * part, part)
    local = (program - first) * BLOCK
    source += local
    target = buffer + start * ALIGNMENT + local
    given = tl.minimum(tl.maximum(numel - local, 0), BLOCK).to(tl.int32)
    if given == BLOCK:
        total = _pack_whole(source, target, ACCUMULATE, BLOCK)
    else:
        present = tl.minimum(extent - local, BLOCK).to(tl.int32)
        total = _pack_rest(source, target, given, present, ACCUMULATE, BLOCK, CHUNK)
    tl.store(partial + of_all, total)


@dataclass(frozen=True)
class _Launch:
    """One launch: sources [begin, end) of one dtype, and the table that the kernel reads."""

    begin: int
    end: int
    programs: int
    """Of one rank."""
    partial: int
    table: tuple[int, ...]
    """Five rows of WIDTH numbers, one for every source: first program, start in the buffer (in units of the alignment),
    elements of the source, elements of its place in the buffer, elements of a rank's part (in units of `PART`). Then
    the programs of a rank, and the elements of its buffer (in units of the alignment)."""
    _tables: dict[torch.device, torch.Tensor] = field(default_factory=dict)

    def table_on(self, device: torch.device) -> torch.Tensor:
        """Return the table on the device. It is copied there once: a copy from pageable memory waits for the GPU."""
        if device not in self._tables:
            self._tables[device] = torch.tensor(self.table, dtype=torch.int64, device=device)
        return self._tables[device]


class _Layout(NamedTuple):
    launches: tuple[_Launch, ...]
    programs: int
    """Of one rank, in all launches."""
    alignment: int
    part: int
    """The unit of the ranks' parts (`UNITS`). 0: the sources are not divided."""


@lru_cache(maxsize=1024)
def _layout(
    offsets: tuple[int, ...],
    numels: tuple[int, ...],
    dtypes: tuple[torch.dtype | None, ...],
    buffer_numel: int,
    parts: tuple[int, ...] = (),
) -> _Layout:
    """`buffer_numel`: of one rank. `parts`: the most elements of each source that a rank has; empty: all."""
    _check(dtypes, offsets)
    bounds = (*offsets, buffer_numel)
    extents = [bounds[index + 1] - bounds[index] for index in range(len(offsets))]
    if bounds[0] != 0 or min(extents) < 0:
        raise SlideError(
            f"pack_gradients: offsets {list(offsets)} must ascend from 0 and stay within the buffer of {buffer_numel}."
        )
    for index, (numel, extent) in enumerate(zip(parts or numels, extents, strict=True)):
        if numel > extent:
            raise SlideError(
                f"pack_gradients: source {index} has {numel} elements, but its part of the buffer has {extent}; pass "
                "the offsets of this unit's layout."
            )
    places = (*offsets, buffer_numel) if parts else offsets
    alignment = ALIGNMENT if not any(place % ALIGNMENT for place in places) else 1
    part = unit_of(parts) if parts else 0
    divided = parts or (0,) * len(offsets)
    launches: list[_Launch] = []
    begin = partial = 0
    while begin < len(offsets):
        end, dtype, firsts, programs = begin, None, [], 0
        while end < len(offsets) and end - begin < WIDTH and not (dtype and dtypes[end] and dtype != dtypes[end]):
            dtype = dtype or dtypes[end]
            firsts.append(programs)
            programs += -(-extents[end] // BLOCK)
            end += 1
        blank = (0,) * (WIDTH - len(firsts))
        launches.append(
            _Launch(
                begin=begin,
                end=end,
                programs=programs,
                partial=partial,
                table=(
                    *(*firsts, *(programs for _ in blank)),
                    *(*(offset // alignment for offset in offsets[begin:end]), *blank),
                    *(*numels[begin:end], *blank),
                    *(*extents[begin:end], *blank),
                    *(*(each // max(part, 1) for each in divided[begin:end]), *blank),
                    *(programs, buffer_numel // alignment),
                ),
            )
        )
        partial += programs
        begin = end
    return _Layout(tuple(launches), partial, alignment, part)


def _check(dtypes: Sequence[torch.dtype | None], offsets: Sequence[int]) -> None:
    if len(dtypes) != len(offsets) or not len(dtypes):
        raise SlideError(
            f"pack_gradients: {len(dtypes)} sources but {len(offsets)} offsets; pass one offset for each, and at "
            "least one."
        )
    for index, dtype in enumerate(dtypes):
        if dtype is not None and dtype not in KERNEL_DTYPES:
            raise SlideError(f"pack_gradients: source {index} is {dtype}; it must be bfloat16, float16 or float32.")


def _check_buffer(buffer: torch.Tensor) -> None:
    if buffer.dim() != 1 or not buffer.is_contiguous() or buffer.dtype not in KERNEL_DTYPES:
        raise SlideError(
            f"pack_gradients: the buffer must be flat, contiguous and bfloat16, float16 or float32, but it is "
            f"{buffer.dtype} of shape {list(buffer.shape)} and strides {list(buffer.stride())}."
        )
    if buffer.requires_grad:
        raise SlideError(
            "pack_gradients: the buffer requires grad, but no graph can go through it; pass its `detach()`."
        )


def _launch(
    sources: Sequence[torch.Tensor | None],
    buffer: torch.Tensor,
    offsets: Sequence[int],
    square_sum: torch.Tensor | None,
    accumulate: bool,
    parts: Sequence[int] | None = None,
    ranks: int = 1,
) -> None:
    _check_buffer(buffer)
    device = buffer.device
    given: list[torch.Tensor | None] = []
    numels: list[int] = []
    dtypes: list[torch.dtype | None] = []
    for source in sources:
        if source is None:
            given.append(None)
            numels.append(0)
            dtypes.append(None)
            continue
        if source.device != device:
            raise SlideError(f"pack_gradients: source {len(given)} is on {source.device}; it must be on {device}.")
        given.append(source if source.is_contiguous() else source.contiguous())
        numels.append(source.numel())
        dtypes.append(source.dtype)
    layout = _layout(tuple(offsets), tuple(numels), tuple(dtypes), buffer.numel() // ranks, tuple(parts or ()))
    if not layout.programs:
        if square_sum is not None:
            square_sum.zero_()
        return
    partial = torch.empty(ranks * layout.programs, dtype=torch.float64, device=device)
    for each in layout.launches:
        if not each.programs:
            continue
        part = given[each.begin : each.end]
        # No element of a None source is read, so any pointer of the dtype will do.
        unread = next((source for source in part if source is not None), buffer)
        part += [unread] * (WIDTH - len(part))
        pointers = tuple([unread if source is None else source for source in part])
        places = partial[ranks * each.partial :] if each.partial else partial
        launch(
            _COMPILED,
            _pack_kernel,
            (device, unread.dtype, buffer.dtype) if aligned((*pointers, buffer, places)) else None,
            ranks * each.programs,
            (pointers, buffer, places, each.table_on(device)),
            WIDTH=WIDTH,
            ALIGNMENT=layout.alignment,
            PART=layout.part,
            ACCUMULATE=accumulate,
            BLOCK=BLOCK,
            CHUNK=CHUNK,
            num_warps=NUM_WARPS,
        )
    if square_sum is not None:
        combine(partial, square_sum, layout.programs)


_pack_gradients = torch.library.custom_op("ds_slide::pack_gradients", _launch, mutates_args=("buffer", "square_sum"))


@_pack_gradients.register_fake
def _(sources, buffer, offsets, *_others):
    _check_buffer(buffer)
    _check([None if source is None else source.dtype for source in sources], offsets)


def pack_gradients(
    sources: Sequence[torch.Tensor | None],
    buffer: torch.Tensor,
    offsets: Sequence[int],
    square_sum: torch.Tensor | None,
    *,
    accumulate: bool,
) -> None:
    """Write (or add) gradients into a buffer and its square sum into `square_sum`, in place, without waiting.

    sources: tensors of any shape, bf16, fp16 or fp32, on the buffer's device, None for a missing gradient. A source
        that is not contiguous is copied first.
    buffer: flat [N], bf16, fp16 or fp32, contiguous. The sources share all of it: source i has
        [offsets[i], offsets[i + 1]), the last one the rest. Elements that a source does not fill (alignment, None)
        become zero. When accumulating they stay unchanged.
    offsets: ascending from 0. Multiples of 64 elements, and sources that start at multiples of 16 bytes, are fast.
    square_sum: [] fp64: sum of the squares of all N elements that the buffer then holds, added in fp64 in an order that
        depends only on the layout. It is infinite or nan only if an element is. None: the sum is not needed.
    accumulate: add in fp32 and round once to the buffer's dtype, instead of writing.

    Up to 16 sources of one dtype are one launch. A second, tiny launch combines the partial sums for `square_sum`. The
    buffer is data without an autograd graph. Raises SlideError for a buffer that requires grad, and for sources,
    offsets or buffers that do not belong together.
    """
    if square_sum is not None and (
        square_sum.dim() or square_sum.dtype != torch.float64 or square_sum.device != buffer.device
    ):
        raise SlideError(
            f"pack_gradients: square_sum must be a float64 scalar on {buffer.device}, but it is {square_sum.dtype} of "
            f"shape {list(square_sum.shape)} on {square_sum.device}."
        )
    # The operator's dispatch costs the host more than all other work: 200 us for 12 gradients.
    pack = _pack_gradients if torch.compiler.is_compiling() else _launch
    pack(sources, buffer, offsets, square_sum, accumulate)


def pack_gradients_for_ranks(
    sources: Sequence[torch.Tensor | None],
    buffer: torch.Tensor,
    offsets: Sequence[int],
    parts: Sequence[int],
    ranks: int,
) -> None:
    """Write each rank's part of gradients into a buffer, rank-major, as `pack_gradients` writes whole gradients.

    buffer: flat [ranks * N]. Rank r's part of source i begins at r * N + offsets[i].
    parts: the most elements of each source that a rank has: rank r has [r * parts[i], (r + 1) * parts[i]) of its flat
        elements, and fewer or none where the source ends. Multiples of 8 are fast.
    """
    _launch(sources, buffer, offsets, None, False, parts, ranks)
