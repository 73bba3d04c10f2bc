"""For all tests: without a GPU, Triton's interpreter runs the kernels on the CPU.

Set here and not beside the kernels' tests, because triton reads it when it is first imported, and transformers or
DeepSpeed may import it long before.
"""

import os
import sys
from pathlib import Path

import torch

# Test files import `ports` by this name.
sys.path.insert(0, str(Path(__file__).resolve().parent))

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
