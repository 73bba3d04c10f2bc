"""For all tests: without a GPU, Triton's interpreter runs the kernels on the CPU.

Set here and not beside the kernels' tests, because triton reads it when it is first imported, and transformers or
DeepSpeed may import it long before.
"""

import os
import sys
from pathlib import Path

import pytest
import torch

# Test files import `ports` by this name.
sys.path.insert(0, str(Path(__file__).resolve().parent))

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture
def nearest_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU: fp32 becomes bf16 by rounding to the nearest, as GPUs do; Triton's interpreter cuts it off."""
    if torch.cuda.is_available():
        return
    from triton import language as tl
    from triton.runtime import interpreter

    cast = interpreter.InterpreterBuilder.cast_impl

    def rounding(builder, source, target):
        if source.dtype.scalar != tl.float32 or target.scalar != tl.bfloat16:
            return cast(builder, source, target)
        bits = torch.from_numpy(source.data).to(torch.bfloat16).view(torch.int16).numpy().view("uint16")
        return interpreter.TensorHandle(bits, target.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "cast_impl", rounding)
