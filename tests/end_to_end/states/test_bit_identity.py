"""Placement, window, threads and timing never change a bit: weights, masters and moments after some steps."""

from __future__ import annotations

import functools
from typing import Any

import deepspeed
import pytest
import torch
from harness import Result, batches, differences, ds_config, llama, trained
from torch import nn

pytestmark = pytest.mark.usefixtures("one_rank")

STEPS = 3
# The first unit on the GPU is the outer module of 33 thousand parameters (12 bytes each there), then 45 thousand by
# block (14 bytes): this is room for the outer module and two blocks of four.
SOME_STATES = 1_800_000

PLACEMENTS: dict[str, dict[str, Any]] = {
    "window-2": {"window": 2},
    "window-larger-than-model": {"window": 9},
    "4-threads": {"cpu_threads": 4},
    "delays-seed-0": {"debug": {"lane_delay_ms": 3.0, "seed": 0}},
    "delays-seed-7-window-2": {"window": 2, "gradient_buffers": 2, "debug": {"lane_delay_ms": 3.0, "seed": 7}},
    "some-states-on-gpu": {"gpu_states": SOME_STATES},
    "all-states-on-gpu": {"gpu_states": "1GiB"},
    "some-on-gpu-with-delays": {"gpu_states": SOME_STATES, "window": 2, "debug": {"lane_delay_ms": 3.0, "seed": 3}},
    "named-blocks": {"blocks": ["model.layers"]},
}
# (clipping, accumulation): held with clipping, updated as soon as it arrives, held by accumulation.
SCHEDULES = {"clipping": (1.0, 1), "immediate": (0.0, 1), "accumulation": (0.0, 2)}

Schedule = tuple[float, int]


def run(schedule: Schedule, slide: dict[str, Any], model: nn.Module | None = None) -> Result:
    clip, accumulation = schedule
    config = ds_config({"window": 3, "cpu_threads": 1, "gpu_states": 0, **slide}, clip=clip, accumulation=accumulation)
    return trained(llama() if model is None else model, config, batches(STEPS * accumulation))


@functools.cache
def reference(schedule: Schedule) -> Result:
    result = run(schedule, {})
    assert result.losses[-1] != result.losses[0]
    return result


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
@pytest.mark.parametrize("slide", PLACEMENTS.values(), ids=PLACEMENTS)
def test_placement_changes_no_bit(schedule: Schedule, slide: dict[str, Any]) -> None:
    assert differences(run(schedule, slide), reference(schedule)) == []


def test_holding_gradients_changes_no_bit() -> None:
    immediate = SCHEDULES["immediate"]
    assert differences(run(immediate, {"defer_updates": True}), reference(immediate)) == []


@pytest.mark.parametrize("schedule", [SCHEDULES["clipping"], SCHEDULES["immediate"]], ids=["clipping", "immediate"])
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
def test_checkpointing_changes_no_bit(schedule: Schedule, reentrant: bool) -> None:
    model = llama()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    slide = {"window": 2, "debug": {"lane_delay_ms": 2.0}}
    assert differences(run(schedule, slide, model), reference(schedule)) == []


def test_zero_init_changes_no_bit() -> None:
    schedule = SCHEDULES["clipping"]
    ordinary = reference(schedule)
    with deepspeed.zero.Init(config_dict_or_path=ds_config(None)):
        model = llama()
    _copy_values(model, llama())
    assert differences(run(schedule, {}, model), ordinary) == []


@torch.no_grad()
def _copy_values(partitioned: nn.Module, source: nn.Module) -> None:
    """Under zero.Init the model drew other weights, and its rotary table was computed in bf16."""
    parameters = list(partitioned.parameters())
    with deepspeed.zero.GatheredParameters(parameters, modifier_rank=0):
        for parameter, value in zip(parameters, source.parameters(), strict=True):
            parameter.copy_(value)
    for module, like in zip(partitioned.modules(), source.modules(), strict=True):
        for name, buffer in like.named_buffers(recurse=False):
            setattr(module, name, buffer.clone())
