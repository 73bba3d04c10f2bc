"""Triton's interpreter (3.6) made to round as GPUs do."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def nearest_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU: fp32 becomes bf16 by rounding to the nearest; the interpreter cuts it off."""
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
