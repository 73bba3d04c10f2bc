"""For all tests: without a GPU, Triton's interpreter runs the kernels on the CPU.

Set here and not beside the kernels' tests, because triton reads it when it is first imported, and transformers or
DeepSpeed may import it long before.
"""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
