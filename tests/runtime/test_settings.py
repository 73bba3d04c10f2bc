"""What follows from the parsed block and from what DeepSpeed says beside it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_slide.config import SlideConfig
from ds_slide.optim.adamw import ADAMW
from ds_slide.plan.needs import SsdNeeds
from ds_slide.plan.ssd_settings import SsdSettings
from ds_slide.runtime.core.settings import RuntimeSettings

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
PLAIN = RuntimeSettings(SlideConfig(), None, BF16, FP32, accumulates=False, clips=False, rule=ADAMW)


@pytest.mark.parametrize(
    ("others", "slide", "held"),
    [
        ({}, {}, None),
        ({"clips": True}, {}, BF16),
        ({"accumulates": True}, {}, FP32),
        ({"gradient_dtype": FP16}, {}, FP16),  # a loss scale may skip the step
        ({}, {"defer_updates": True}, BF16),
        ({"clips": True}, {"defer_updates": False}, None),
        ({"rule": None}, {"defer_updates": False}, BF16),
    ],
)
def test_gradients_are_held_where_the_step_has_to_know_all_of_them(
    others: dict[str, Any], slide: dict[str, Any], held: torch.dtype | None
) -> None:
    assert replace(PLAIN, slide=SlideConfig(**slide), **others).held_dtype == held


def needs_of(settings: RuntimeSettings, **slide: Any) -> Any:
    settings = replace(settings, slide=SlideConfig(**slide))
    return settings.needs(world_size=1, shares_weights=False, gpu_is_own=True)


def test_the_plan_needs_what_the_block_says() -> None:
    assert (needs_of(PLAIN).window, needs_of(PLAIN).window_grows) == (3, True)
    assert (needs_of(PLAIN, window=5).window, needs_of(PLAIN, window=5).window_grows) == (5, False)
    assert (needs_of(PLAIN).ring, needs_of(PLAIN).ring_grows) == (4, True)
    assert (needs_of(PLAIN, gradient_buffers=7).ring, needs_of(PLAIN, gradient_buffers=7).ring_grows) == (7, False)
    assert not needs_of(replace(PLAIN, clips=True)).ring_grows and not needs_of(PLAIN, defer_updates=True).ring_grows
    held = needs_of(replace(PLAIN, clips=True), gradient_buffers=7)
    assert (held.ring, held.ring_to_ssd, held.held_bytes, held.ssd) == (0, 7, 2, None)
    host = PLAIN.needs(world_size=2, shares_weights=True, gpu_is_own=False)
    assert (host.window_grows, host.page_locks, host.world_size, host.shares_weights) == (True, False, 2, True)
    assert not host.ring_grows  # its backward is never ahead of updates by the same cores


def test_and_what_may_go_to_ssd() -> None:
    ssd = SsdSettings(
        [("", Path())], weights=False, states=True, chunk_numel=2048, queue_depth=None, request_bytes=None
    )
    tiered = replace(PLAIN, ssd=ssd)
    assert needs_of(tiered).ssd == SsdNeeds(False, True, 2048, None, None, checksums=True)
    few = needs_of(tiered, ssd_buffers=3, weight_buffers=4, checksums=False)
    assert few.ssd == SsdNeeds(False, True, 2048, 3, 4, checksums=False)


@pytest.mark.parametrize(("kind", "moments"), [("fp32", 8), ("bf16", 4)])
def test_states_are_stored_as_the_block_says(kind: str, moments: int) -> None:
    settings = replace(PLAIN, slide=SlideConfig(state_dtype=kind))  # type: ignore[arg-type]
    assert sum(spec.nbytes(1) for spec in settings.specs(BF16, settings.rule)) == 2 + moments
    assert settings.specs(BF16, None) == ()
