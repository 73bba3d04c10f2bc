"""Gradients of units whose states are not on the GPU are added up there: the same bits, and one copy down a step."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import adapted
from deepspeed.accelerator import get_accelerator
from harness import (
    Batch,
    Result,
    batches,
    causal_loss,
    differences,
    ds_config,
    engine_for,
    llama,
    on_ssd,
    states_of,
    train,
)
from moving import sum_on_gpu, summable
from torch import nn

pytestmark = pytest.mark.usefixtures("one_rank")

DELAYS = {"lane_delay_ms": 2.0, "seed": 4}
FP32_SUMS = {"data_types": {"grad_accum_dtype": "fp32"}}


class RandomSums:
    """`causal_loss` behind an attempt to give another random set of units a sum on the GPU."""

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)
        self.made: list[int] = []

    def __call__(self, engine: Any, batch: Batch) -> torch.Tensor:
        runtime = engine.optimizer.runtime
        chosen = [order for order in summable(runtime) if self._random.random() < 0.7]
        if sum_on_gpu(runtime, *chosen) is not None:
            assert {unit.order for unit in runtime.units if unit.gradient.gpu_sum is not None} == set(chosen)
            self.made.append(len(chosen))
        return causal_loss(engine, batch)


Case = tuple[dict[str, Any], dict[str, Any], Callable[[], nn.Module]]
CASES: dict[str, Case] = {
    # slide, settings of DeepSpeed, model
    "two": ({}, {"accumulation": 2}, llama),
    "four, delays": ({"window": 2, "debug": DELAYS}, {"accumulation": 4}, llama),
    "no clipping": ({"defer_updates": True}, {"accumulation": 2, "clip": 0.0}, llama),
    "in fp32": ({"debug": DELAYS}, {"accumulation": 3, **FP32_SUMS}, llama),
    "fp32": ({}, {"accumulation": 2, "bf16": None}, llama),
    "fp16": ({}, {"accumulation": 2, "bf16": None, "fp16": {"enabled": True, "loss_scale": 128.0}}, llama),
    "two passes": ({"update_passes": 2, "debug": DELAYS}, {"accumulation": 2}, llama),
    "speculative": ({"speculate": True, "debug": DELAYS}, {"accumulation": 2, "clip": 1e6}, llama),
    "adapters in fp32": (
        {},
        {"accumulation": 2},
        functools.partial(adapted, trained=("input_layernorm", "lm_head")),
    ),
    "all on SSD": ({"host_memory": 0, "debug": DELAYS}, {"accumulation": 3}, llama),
    "all on SSD, in fp32": ({"host_memory": 0}, {"accumulation": 2, **FP32_SUMS}, llama),
    "streamed head": ({"stream_head": True}, {"accumulation": 2}, llama),
}


def config(slide: dict[str, Any] | None = None, **settings: Any) -> dict[str, Any]:
    return ds_config({"cpu_threads": 1, "gpu_states": 0, **(slide or {})}, **settings)


@pytest.mark.parametrize(("slide", "settings", "make"), [pytest.param(*case, id=name) for name, case in CASES.items()])
def test_sums_change_no_bit(
    slide: dict[str, Any],
    settings: dict[str, Any],
    make: Callable[[], nn.Module],
    disk: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(get_accelerator(), "is_fp16_supported", lambda: True)  # slow on a CPU, but it works
    accumulation = settings["accumulation"]
    data, sums = batches(4 * accumulation), RandomSums(len(slide))

    def run(loss_of: Any) -> Result:
        given = config(slide, **settings)
        with engine_for(model := make(), on_ssd(given, disk) if "host_memory" in slide else given) as engine:
            result = train(engine, data, loss_of)
            result.states = states_of(model)
        return result

    assert differences(run(sums), run(causal_loss)) == []
    assert len(sums.made) == 4 and any(sums.made)
