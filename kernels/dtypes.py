"""Data types of the kernels. They compute in fp32, so fp64 inputs would lose precision."""

from __future__ import annotations

import torch

KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
