"""Gradients leave the GPU through their unit's codec, and updates reach its weights through it: on every way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from harness import batches, differences, ds_config, engine_for, llama, states_of, train

from ds_slide.compression.codec import GradientSpan, Identity, Masters, ParameterGradients, SegmentStep
from ds_slide.runtime.core.settings import RuntimeSettings

pytestmark = pytest.mark.usefixtures("one_rank")

STEPS = 3
LR = 0.05


class Doubled(Identity):
    """Sends twice the gradient: a power of two, which changes no other bit."""

    applied = 0
    """Elements."""

    def encode(
        self, gradients: ParameterGradients, out: torch.Tensor, *, accumulate: bool, sums: bool = True
    ) -> torch.Tensor | None:
        return super().encode(_doubled(gradients), out, accumulate=accumulate, sums=sums)

    def encode_in_place(self, gradients: ParameterGradients) -> list[GradientSpan]:
        return super().encode_in_place(_doubled(gradients))

    def apply(
        self, written: Sequence[torch.Tensor], span: slice, masters: Masters, steps: Sequence[SegmentStep]
    ) -> int:
        Doubled.applied += span.stop - span.start
        return super().apply(written, span, masters, steps)


def _doubled(gradients: ParameterGradients) -> ParameterGradients:
    return [None if gradient is None else 2 * gradient for gradient in gradients]


@pytest.mark.parametrize(
    ("slide", "accumulation", "applies"),
    [
        ({}, 1, True),  # updated on arrival
        ({"defer_updates": True}, 1, True),  # held
        ({}, 2, True),  # summed on the way
        ({"gpu_states": "1GB"}, 2, False),  # summed on the GPU and updated there
    ],
)
def test_twice_the_gradient_is_twice_the_learning_rate(
    slide: dict[str, Any], accumulation: int, applies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trained(lr: float) -> Any:
        optimizer = {"type": "SGD", "params": {"lr": lr}}
        config = ds_config(slide, clip=0.0, accumulation=accumulation, optimizer=optimizer)
        model = llama()
        with engine_for(model, config | {"zero_allow_untested_optimizer": True}) as engine:
            result = train(engine, batches(STEPS * accumulation))
            result.norms.clear()  # of twice the gradient
            result.states = states_of(model, ())
            outer = sum(unit.codec.numel for unit in engine.optimizer.runtime.units if unit.spec.kind == "outer")
        return result, outer

    expected, _ = trained(2 * LR)
    monkeypatch.setattr(Doubled, "applied", 0)
    monkeypatch.setattr(
        RuntimeSettings, "codec_of", lambda self, precision, layout: Doubled(layout, self.gradient_of(precision))
    )
    found, outer = trained(LR)
    assert not differences(expected, found)
    assert Doubled.applied == (STEPS * outer if applies else 0)
