"""`pack_gradients` in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def pack_gradients_reference(
    sources: Sequence[torch.Tensor | None], buffer: torch.Tensor, offsets: Sequence[int], *, accumulate: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """`(buffer, square_sum)`: the buffer [N] after packing, a new tensor, and the fp64 sum of its squares, [].

    Each element is the source's cast to the buffer's dtype; when accumulating, the sum of the old element and the
    source's in the wider of fp32 and the buffer's dtype, rounded once. What no source fills is zero or, when
    accumulating, unchanged.
    """
    packed = buffer.clone() if accumulate else torch.zeros_like(buffer)
    wide = torch.promote_types(buffer.dtype, torch.float32)
    for source, offset in zip(sources, offsets, strict=True):
        if source is None:
            continue
        target = packed[offset : offset + source.numel()]
        flat = source.reshape(-1)
        target.copy_(target.to(wide) + flat.to(wide) if accumulate else flat)
    return packed, packed.double().square().sum()
