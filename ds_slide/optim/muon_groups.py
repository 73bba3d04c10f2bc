"""Which matrices of a unit have their orthogonal updates computed together (`ds_slide.optim.muon_batch`), and the bytes
of that, which the plan counts."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ds_slide.kernels.offload.tiles import has_tiles

Shape = tuple[int, int, int]
"""Count, rows and columns of the matrices of one parameter."""

PRODUCT_BYTES = 16
"""GPU bytes of the products of one matrix by itself, an element."""
SHORT_DTYPES = (torch.float16, torch.bfloat16)
MOST_BATCH_BYTES = 1536 << 20
"""GPU bytes of one batch. All matrices of a block of 3 B take 0.48 GB and of 7 B 1.45. Larger ones fill a GPU in
smaller batches."""


def squares_of(shapes: Sequence[Shape]) -> int:
    """Return the elements of a square of each matrix, with its smaller side."""
    return sum(shape[0] * min(shape[1:]) ** 2 for shape in shapes)


def numel_of(shapes: Sequence[Shape]) -> int:
    """Return the elements of the memory of a batch (`muon_batch.Batch`): the matrices twice and a square of each. Three
    more squares of each lie where the matrices are not at the time, and where these are smaller, beside them."""
    numel, squares = sum(map(math.prod, shapes)), squares_of(shapes)
    return 2 * numel + squares + max(0, 3 * squares - numel)


def bytes_of(shapes: Sequence[Shape]) -> int:
    """Return the GPU bytes of a batch: its memory, and beside it the update of its largest parameter in fp32 and in 16
    bits."""
    return 2 * numel_of(shapes) + (4 + 2) * max(map(math.prod, shapes))


def batches(shapes: Sequence[Shape]) -> list[list[int]]:
    """Return the indices of matrices that are updated together: smaller sides are equal, equal longer sides follow each
    other, and a batch has at most `MOST_BATCH_BYTES` or one parameter."""
    made: list[list[int]] = []
    for index in sorted(range(len(shapes)), key=lambda each: (min(shapes[each][1:]), max(shapes[each][1:]))):
        if made:
            others = [shapes[each] for each in made[-1]]
            fits = bytes_of([*others, shapes[index]]) <= MOST_BATCH_BYTES
            if fits and min(others[0][1:]) == min(shapes[index][1:]):
                made[-1].append(index)
                continue
        made.append([index])
    return made


def most_bytes(shapes: Sequence[Shape]) -> int:
    """Return the GPU bytes of the largest batch of a unit with these matrices, or more; 0 if no kernel takes them. A
    batch of one parameter may pass `MOST_BATCH_BYTES`; the plan counts that as the products of one matrix.

    All batches use the same memory, which a run keeps. So products of matrices that no kernel takes come on top."""
    taken = [shape for shape in shapes if has_tiles(min(shape[1:]), max(shape[1:]))]
    if not taken:
        return 0
    largest = max(math.prod(shape[1:]) for shape in shapes)
    others = [min(largest, math.prod(shape)) for shape in shapes if shape not in taken]
    sizes = {min(shape[1:]) for shape in taken}
    found = [bytes_of([shape for shape in taken if min(shape[1:]) == size]) for size in sizes]
    return min(max(found), MOST_BATCH_BYTES) + PRODUCT_BYTES * max(others, default=0)
