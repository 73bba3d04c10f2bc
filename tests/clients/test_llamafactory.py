"""LLaMA-Factory, unchanged, with the DeepSpeed JSONs of its own examples plus the key, beside stock."""

from __future__ import annotations

from typing import Any

import pytest
from workers import assert_stocks

# Two runs of one process each, with the imports before the first.
pytestmark = pytest.mark.timeout(600)

# Weights of bf16 differ by single roundings after the first update (see tests/end_to_end/steps/test_parity.py).
LOSS_TOLERANCE = 2.0**-9
CASES = ["sft-full", "sft-full-offload", "sft-lora", "sft-lora-offload", "dpo-full-offload", "dpo-lora"]


@pytest.mark.parametrize("case", CASES)
def test_losses_and_weights_are_stocks(case: str, llamafactory_worker: Any) -> None:
    stock, slide = (llamafactory_worker.run(case, engine) for engine in ("stock", "slide"))
    assert_stocks(slide, stock, steps=4, loss=LOSS_TOLERANCE, weights=0.03, norms=0.02)
    assert ("lora" in case) == all("lora" in name for name in stock["weights"])
