"""Square sums of gradients on the device, in fp64.

The clip factor must not depend on the tier of a unit, but the CPU sums in another order than the GPU. In fp64 the two
sums agree to 1e-15, far more exactly than the fp32 factor that is computed from them.
"""

from __future__ import annotations

import torch

# 4 Mi elements: 32 MiB of fp64 at a time, so that the temporary stays small beside one block.
CHUNK = 1 << 22


def square_sum(flat: torch.Tensor) -> torch.Tensor:
    """Return the sum of squares of a flat tensor as a 0-d fp64 tensor on its device. inf and nan propagate."""
    if flat.is_cuda:
        from ds_slide.kernels.offload.square_sum import square_sum as square_sum_on_gpu

        return square_sum_on_gpu(flat)
    total = torch.zeros((), dtype=torch.float64, device=flat.device)
    for chunk in flat.split(CHUNK):
        wide = chunk.double()
        total += torch.dot(wide, wide)
    return total
