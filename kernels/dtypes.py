"""What the kernels take. They compute in fp32, by which fp64 would lose precision."""

from __future__ import annotations

import torch

KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
