"""sentence-transformers' trainer, unchanged, beside stock."""

from __future__ import annotations

from typing import Any

import pytest
from workers import assert_stocks

# Two runs of one process each, with the imports before the first.
pytestmark = pytest.mark.timeout(600)

# Cosines of embeddings in bf16, of which the loss takes 20 times as many. Measured: 1.3e-3.
TOLERANCE = 2.0**-8


@pytest.mark.parametrize("case", ["negatives", "cosine"])
def test_losses_and_weights_are_stocks(case: str, sentence_transformers_worker: Any) -> None:
    stock, slide = (sentence_transformers_worker.run(case, engine) for engine in ("stock", "slide"))
    assert_stocks(slide, stock, steps=6, loss=TOLERANCE, weights=0.05)
