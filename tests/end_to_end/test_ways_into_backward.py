"""Each way into backward scales the loss once by the number of micro-batches."""

from __future__ import annotations

import pytest
import torch
from loops import Net, Run, assert_right, inputs, made, outcome, run_loop

pytestmark = pytest.mark.usefixtures("one_rank")

MICRO_BATCHES = 2


class LossAndHidden(Net):
    """Returns the loss and what it was computed from, as the models of Hugging Face do."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        hidden = self.head(self.hidden(x))
        return hidden.float().pow(2).mean(), hidden


def engine_backward(run: Run) -> float:
    engine = run.start(made(LossAndHidden), accumulation=MICRO_BATCHES)
    for x in inputs(2 * MICRO_BATCHES):
        engine.backward(engine(x)[0])
        engine.step()
    return float(engine.get_global_grad_norm())


# Loop, and how it ends on stock.
LOOPS = [(engine_backward, "right")]


@pytest.mark.parametrize("clip", [1.0, 0.0])
@pytest.mark.parametrize("loop", [loop for loop, _ in LOOPS])
def test_the_numbers_are_plain_torchs(loop, clip):
    assert_right(run_loop(loop, "slide", clip=clip), run_loop(loop, "plain", clip=clip))


@pytest.mark.parametrize("loop, expected", LOOPS)
def test_stock_is_as_the_table_says(loop, expected):
    assert outcome(loop, "stock") == expected
