"""Lightning's Trainer and Fabric, unchanged but for the GPU that they take for granted, beside stock."""

from __future__ import annotations

from typing import Any

import pytest

# Two runs of one process each, with the imports before the first.
pytestmark = pytest.mark.timeout(600)

# Weights of bf16 differ by single roundings after the first update (see tests/end_to_end/steps/test_parity.py).
LOSS_TOLERANCE = 2.0**-8


@pytest.mark.parametrize("case", ["validated", "resumed", "fabric"])
def test_losses_are_stocks(case: str, lightning_worker: Any) -> None:
    stock, slide = (lightning_worker.run(case, engine) for engine in ("stock", "slide"))
    assert stock["optimizer"] == "DeepSpeedZeroOptimizer_Stage3"
    assert slide["optimizer"] == "SlideZeroOptimizer"
    assert len(stock["losses"]) >= 8
    assert slide["losses"] == pytest.approx(stock["losses"], abs=LOSS_TOLERANCE)
