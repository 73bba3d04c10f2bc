"""axolotl, unchanged, with the DeepSpeed JSONs of its own examples plus the key, beside stock."""

from __future__ import annotations

from typing import Any

import pytest
from workers import assert_stocks

# Two runs of one process each, with the imports before the first.
pytestmark = pytest.mark.timeout(600)

# Weights of bf16 differ by single roundings after the first update (see tests/end_to_end/steps/test_parity.py).
LOSS_TOLERANCE = 2.0**-9
# With weights in host memory stock gives all of them the data type that the first parameter has been converted to, and
# trains a bf16 model in fp32: axolotl converts the embedding. It is compared with stock's run on the GPU alone.
STOCKS = {case: case for case in ("full", "full-packed", "lora", "lora-offload")} | {"full-offload": "full"}


@pytest.mark.parametrize("case", STOCKS)
def test_losses_and_weights_are_stocks(case: str, axolotl_worker: Any) -> None:
    stock, slide = axolotl_worker.run(STOCKS[case], "stock"), axolotl_worker.run(case, "slide")
    assert_stocks(slide, stock, steps=4, loss=LOSS_TOLERANCE, weights=0.03, norms=0.02)
    assert ("lora" in case) == all("lora" in name for name in stock["weights"])
