"""MLPs and losses in tiles of the sequence, as DeepSpeed's ALST computes them: a backward inside of a backward, or of a
forward, whose gradients come in several parts."""

from __future__ import annotations

from typing import Any

import pytest
from harness import Result, batches, causal_loss, ds_config, llama, trained
from tiled import LossInTiles, Sliced, Tiled, own_loss, tiled
from torch import nn

pytestmark = pytest.mark.usefixtures("one_rank")

BLOCKS, STEPS = 3, 4
LOSS_TOLERANCE, NORM_TOLERANCE = 2.0**-10, 2.0**-8
"""A sum of tiles in bf16 is rounded once for each tile."""


def model_of(kind: str) -> nn.Module:
    if kind.endswith("loss"):
        return LossInTiles(
            fused={"plain loss": None, "fused loss": True, "sliced loss": False}[kind], num_hidden_layers=BLOCKS
        )
    model: Any = llama(num_hidden_layers=BLOCKS)
    if kind.endswith("reentrant"):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    elif kind.endswith("checkpointed"):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model if kind == "plain" else tiled(model, Sliced if "sliced" in kind else Tiled)


def result_of(kind: str, slide: dict[str, Any] | None, clip: float, accumulation: int) -> Result:
    config = ds_config(slide, clip=clip, accumulation=accumulation)
    loss_of = own_loss if kind.endswith("loss") else causal_loss
    return trained(model_of(kind), config, batches(STEPS * accumulation), loss_of=loss_of)


@pytest.mark.parametrize(
    ("kind", "clip", "accumulation", "slide"),
    [
        ("tiled, checkpointed", 1.0, 1, {"window": 2}),
        ("fused loss", 0.0, 1, {"window": 2}),
        *(
            pytest.param(*row, marks=pytest.mark.slow)
            for row in (
                ("tiled", 0.0, 1, {"window": 2}),
                ("tiled", 1.0, 2, {"window": 2}),
                ("tiled, reentrant", 0.0, 1, {"window": 2, "debug": {"lane_delay_ms": 2.0, "seed": 3}}),
                ("tiled, checkpointed", 1.0, 1, {"window": 2, "gpu_memory": "1GiB"}),
                ("tiled", 1.0, 1, {"window": 2, "gpu_memory": "1GiB"}),
                ("sliced", 1.0, 1, {"window": 2}),
                ("sliced, checkpointed", 0.0, 2, {"window": 2}),
                ("sliced loss", 1.0, 1, {"window": 2}),
                ("sliced loss", 0.0, 2, {"window": 2}),
                ("fused loss", 1.0, 1, {"window": 2, "gpu_states": 600_000}),
            )
        ),
    ],
)
def test_tiles_have_the_numbers_of_the_whole(kind: str, clip: float, accumulation: int, slide: dict[str, Any]) -> None:
    found = result_of(kind, slide, clip, accumulation)
    whole = "plain loss" if kind.endswith("loss") else "plain"
    for expected in (result_of(whole, slide, clip, accumulation), result_of(kind, None, clip, accumulation)):
        assert found.losses[0] == pytest.approx(expected.losses[0], abs=2e-6)
        assert found.losses == pytest.approx(expected.losses, abs=LOSS_TOLERANCE)
        assert found.norms == pytest.approx(expected.norms, rel=NORM_TOLERANCE)


@pytest.mark.slow
def test_a_fused_loss_is_not_divided_by_the_accumulation_as_under_stock() -> None:
    """Its backward runs in the forward, where DeepSpeed has not scaled the loss: the head's gradient is twice what it
    should be, in both engines."""
    found, stock = (result_of("fused loss", slide, 1.0, 2) for slide in ({"window": 2}, None))
    assert found.losses == pytest.approx(stock.losses, abs=LOSS_TOLERANCE)
    assert found.norms == pytest.approx(stock.norms, rel=NORM_TOLERANCE)
    assert found.norms[0] > 1.2 * result_of("plain loss", None, 1.0, 2).norms[0]
