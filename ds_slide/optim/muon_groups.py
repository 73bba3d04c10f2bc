"""Which matrices of a unit have their orthogonal updates computed together (`ds_slide.optim.muon_batch`), and the bytes
of that, which the plan counts."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ds_slide.kernels.offload.tiles import has_tiles

Shape = tuple[int, int, int]
"""Count, rows and columns of the matrices of one parameter."""

SHORT_DTYPES = (torch.float16, torch.bfloat16)
MOST_BATCH_BYTES = 1536 << 20
"""GPU bytes of one batch. All matrices of a block of 3 B take 0.42 GB and of 7 B 1.27. Larger ones fill a GPU in
smaller batches."""


def bytes_of(shapes: Sequence[Shape]) -> int:
    """Return the GPU bytes of a batch, the update of its largest parameter included.

    The matrices in 16 bits are there all the time. Beside them are the largest of: five squares of the iteration; the
    matrices a second time and the product; the product, and an update while it is applied (16 bits, and fp32 twice)."""
    numels = [count * rows * columns for count, rows, columns in shapes]
    squares = sum(shape[0] * min(shape[1:]) ** 2 for shape in shapes)
    own = 2 * sum(numels)
    return own + max(5 * 2 * squares, own + 2 * squares, 2 * squares + (2 + 4 + 4) * max(numels))


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
    batch of one parameter may pass `MOST_BATCH_BYTES`; the plan counts that as the products of one matrix."""
    taken = [shape for shape in shapes if has_tiles(min(shape[1:]), max(shape[1:]))]
    sizes = {min(shape[1:]) for shape in taken}
    found = [bytes_of([shape for shape in taken if min(shape[1:]) == size]) for size in sizes]
    return min(max(found, default=0), MOST_BATCH_BYTES)
