"""Lists of settings that belong on one page. The first rows matter most: a time limit cuts the last ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import machine
from settings import Setting

SMALL_GPU_GIB = 24
# Of those 24 GiB the logits of HF's loss take about 15 at batch 4 x 2048 and a vocabulary of 152k (bf16, fp32 and both
# gradients), so the engine must leave the larger part of the card to the model.
SMALL_GPU_SLIDE = {"gpu_memory": "6GiB", "gpu_states": 0}
ALL_STATES_ON_HOST = {"gpu_states": 0}


def main() -> list[Setting]:
    """Qwen2.5-3B, 8 x 2048 tokens: the three systems with and without clipping."""
    return [
        Setting("gpu-only", clip=0),
        Setting("stock", clip=1.0),
        Setting("slide", clip=1.0, slide=ALL_STATES_ON_HOST),
        Setting("slide", clip=0, slide=ALL_STATES_ON_HOST),
        Setting("slide", clip=1.0),
        Setting("slide", clip=0),
        Setting("gpu-only", clip=1.0),
        Setting("stock", clip=0),
    ]


def large() -> list[Setting]:
    """Qwen2.5-7B, 8 x 2048 tokens. Stock is left out: its 26 B/param are 198 GB of host memory, and a machine that runs
    out of that kills whatever it likes instead of returning an error."""
    model = "qwen2.5-7b"
    return [
        Setting("slide", model, clip=1.0, slide=ALL_STATES_ON_HOST, steps=6),
        Setting("slide", model, clip=0, slide=ALL_STATES_ON_HOST, steps=6),
        Setting("gpu-only", model, clip=0, steps=6),
    ]


def small_gpu() -> list[Setting]:
    """Both shapes at batch 4 with torch limited to 24 GiB; the GPU-only row has the whole card, as it needs more."""
    cards = machine.gpus()
    fraction = round(min(1.0, SMALL_GPU_GIB * 1024 / cards[0][1]), 4) if cards else 1.0
    return [
        Setting("slide", batch=4, clip=1.0, gpu_fraction=fraction, slide=SMALL_GPU_SLIDE),
        Setting("stock", batch=4, clip=1.0, gpu_fraction=fraction),
        Setting("slide", "qwen2.5-7b", batch=4, clip=1.0, gpu_fraction=fraction, slide=SMALL_GPU_SLIDE, steps=6),
        Setting("slide", batch=4, clip=0, gpu_fraction=fraction, slide=SMALL_GPU_SLIDE),
        Setting("slide", "qwen2.5-7b", batch=4, clip=0, gpu_fraction=fraction, slide=SMALL_GPU_SLIDE, steps=6),
        Setting("gpu-only", batch=4, clip=0),
    ]


def quick() -> list[Setting]:
    """Qwen2.5-0.5B, 4 x 1024 tokens: does everything run, and in the right order of speed?"""
    shape: dict[str, Any] = {"model": "qwen2.5-0.5b", "batch": 4, "seq": 1024, "steps": 5}
    return [
        Setting("slide", clip=1.0, slide=ALL_STATES_ON_HOST, **shape),
        Setting("slide", clip=0, slide=ALL_STATES_ON_HOST, **shape),
        Setting("stock", clip=1.0, **shape),
        Setting("gpu-only", clip=1.0, **shape),
    ]


def tiny() -> list[Setting]:
    """A model of 6 M parameters: the scripts themselves, on a machine without a GPU."""
    shape: dict[str, Any] = {"model": "tiny", "batch": 2, "seq": 128, "steps": 3, "warmup": 2, "lr": 1e-3}
    return [
        Setting("slide", clip=1.0, **shape),
        Setting("slide", clip=0, **shape),
        Setting("stock", clip=1.0, **shape),
        Setting("gpu-only", clip=1.0, **shape),
    ]


PLANS: dict[str, Callable[[], list[Setting]]] = {
    "main": main,
    "large": large,
    "small-gpu": small_gpu,
    "quick": quick,
    "tiny": tiny,
}
