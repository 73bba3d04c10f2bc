"""Frozen experts that pass through the GPU a few at a time: the same bits as in plain torch, and fewer bytes."""

from __future__ import annotations

from typing import Any

import deepspeed
import pytest
import torch
from allocated import counted
from fused_experts import EXPERT_BYTES, EXPERTS, LAYERS, TOP_K, mixture
from harness import batches, differences, ds_config, engine_for, plain_training, states_of, train
from packed import forward_between
from torch import nn

from ds_slide.errors import SlideConfigError, SlideError
from ds_slide.plan import allocations as names

pytestmark = pytest.mark.usefixtures("one_rank")

# Three experts at a time, of eight: three passes, the last one short.
PARTS = {"window": 2, "gpu_states": 0, "experts": 3 * EXPERT_BYTES + 100}
CHECKPOINTS: dict[str, Any] = {"none": None, "hooks": {"use_reentrant": False}, "reentrant": {"use_reentrant": True}}


def h2d_bytes(engine: Any) -> int:
    """Bytes that went up since the last call."""
    context = engine.optimizer.runtime.parts.context
    context.lanes.h2d.drain()
    moved: int = context.recorder.meters["h2d"].take()[1]
    return moved


@pytest.mark.thinned(2)
@pytest.mark.parametrize("implementation", ["grouped_mm", "eager", "batched_mm"])
@pytest.mark.parametrize("checkpoints", CHECKPOINTS)
@pytest.mark.parametrize("shape", ["qwen3", "mixtral", "deepseek", "gpt-oss"])
def test_training_has_the_bits_of_plain_torch(shape: str, checkpoints: str, implementation: str) -> None:
    """An evaluation comes between each forward and its backward."""
    options = (implementation, CHECKPOINTS[checkpoints])
    plain = plain_training(mixture(shape, *options), batches(2), 1.0, loss_of=forward_between)
    model = mixture(shape, *options)
    with engine_for(model, ds_config(PARTS | {"debug": {"lane_delay_ms": 1.0, "seed": 3}})) as engine:
        assert all(unit.experts for unit in engine.optimizer.runtime.blocks[1:])
        found = train(engine, batches(2), forward_between)
        found.states = states_of(model)
    assert differences(found, plain) == []
