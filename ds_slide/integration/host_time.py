"""What the host takes under an engine, for an operation and for a block that passes by, measured in small steps."""

from __future__ import annotations

import copy
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import deepspeed
import torch

from ds_slide.config import CONFIG_KEY
from ds_slide.errors import SlideError
from ds_slide.patching.apply import apply_kernels
from ds_slide.plan.trace import TracedUnit, trace_step
from ds_slide.runtime.memory.spare_memory import LOOKS

MICRO_BATCHES = 2
"""A step has so many."""
WARM_UP_STEPS, TIMED_STEPS = LOOKS[-1] + 2, 16
"""The engine decides about spare GPU memory until the last of `LOOKS`; the step behind it allocates what is new."""
_CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": MICRO_BATCHES,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
    },
    "steps_per_print": 1_000_000,
    CONFIG_KEY: {"enabled": True},
}
_LAUNCHER = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
"""What DeepSpeed's launcher would set for one process. Port 0: any free one, which nobody else needs to know."""
_GPU_MEMORY = 1 << 30
"""By which kernels choose their temporary memory. How many operations there are does not depend on it."""


def engine_host_s(
    build: Callable[[torch.device], Any], blocks: int, tokens: int, device: torch.device
) -> tuple[float, float]:
    """Seconds of the host for an operation, and for a block that passes through the window, beside its operations, each
    way. The first is that of a micro-batch, forward and backward of one sequence of `tokens` tokens, over the number of
    operations that the plan counts in it, with all states on the GPU, where so small a model has them. The second is
    what the micro-batch takes longer with none there, also by the updates beside it. Each is the median of several
    steps. `build` makes a causal language model of `blocks` blocks on a device, one so small that the GPU waits for the
    host. The process has another environment afterwards. Raises SlideError where the engine is not DS-Slide's, and
    whatever building it raises."""
    count = _operations(build(torch.device("meta")), tokens, device)
    # Also where a launcher has started this process: the engine would wait for the other ranks.
    os.environ.update(_LAUNCHER)
    resident = _micro_batch_s(build(device), tokens, device, {})
    passing = _micro_batch_s(build(device), tokens, device, {"gpu_states": 0})
    return resident / count, max(0.0, passing - resident) / (2 * blocks)


def _micro_batch_s(model: Any, tokens: int, device: torch.device, settings: dict[str, Any]) -> float:
    """Seconds of a micro-batch under an engine with `settings` in its block."""
    # DeepSpeed writes into the dict that it is given.
    config = copy.deepcopy(_CONFIG)
    config[CONFIG_KEY].update(settings)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    if not hasattr(engine.optimizer, "slide_stats"):
        raise SlideError(f"DeepSpeed has built an engine with {type(engine.optimizer).__name__}, not DS-Slide's")
    inputs = torch.zeros(1, tokens, dtype=torch.long, device=device)
    seconds = [_step_s(engine, inputs) for _ in range(WARM_UP_STEPS + TIMED_STEPS)]
    engine.destroy()
    return statistics.median(seconds[WARM_UP_STEPS:]) / MICRO_BATCHES


def _operations(model: Any, tokens: int, device: torch.device) -> int:
    """Of a micro-batch of `model`, which is on the meta device, with the kernels that the engine puts into it on
    `device`."""
    apply_kernels(model, "auto", device.type)
    trace = trace_step(model, [TracedUnit(list(model.parameters()))], 1, tokens, _GPU_MEMORY)
    return sum(segment.operations.total() for segment in (*trace.forward, *trace.backward))


def _step_s(engine: Any, tokens: torch.Tensor) -> float:
    """Of all micro-batches of a step, with the host ahead of the GPU from one to the next. What the step itself takes
    is left out: the plan has a figure of its own for it."""
    _synchronize(tokens.device)
    begin = time.perf_counter()
    for micro_batch in range(MICRO_BATCHES):
        if micro_batch:
            engine.step()  # of the one before, in the middle of an accumulation
        engine.backward(engine(input_ids=tokens, labels=tokens, use_cache=False).loss)
    _synchronize(tokens.device)
    seconds = time.perf_counter() - begin
    engine.step()
    return seconds


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
