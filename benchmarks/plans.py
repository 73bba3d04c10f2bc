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


def small_gpu_share() -> float:
    """Share of this machine's GPU that 24 GiB are; 1 without one."""
    cards = machine.gpus()
    return round(min(1.0, SMALL_GPU_GIB * 1024 / cards[0][1]), 4) if cards else 1.0


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
    fraction = small_gpu_share()
    return [
        Setting("slide", batch=4, clip=1.0, gpu_fraction=fraction, slide=SMALL_GPU_SLIDE),
        Setting("stock", batch=4, clip=1.0, gpu_fraction=fraction),
        Setting("slide", "qwen2.5-7b", batch=4, clip=1.0, gpu_fraction=fraction, slide=SMALL_GPU_SLIDE, steps=6),
        Setting("slide", batch=4, clip=0, gpu_fraction=fraction, slide=SMALL_GPU_SLIDE),
        Setting("slide", "qwen2.5-7b", batch=4, clip=0, gpu_fraction=fraction, slide=SMALL_GPU_SLIDE, steps=6),
        Setting("gpu-only", batch=4, clip=0),
    ]


# Every state on the host's side of the engine that may leave it goes to the SSD.
ALL_ON_SSD = {"gpu_states": 0, "host_memory": 0}
HALF_ON_SSD = {"gpu_states": 0, "host_memory": "half"}
# A step of stock takes 20 to 60 s here: enough of them to see the spread, with a first one for its trace.
FEW: dict[str, Any] = {"steps": 2, "warmup": 1}
# The first update reads parts of the file that were never written, which costs the disk nothing.
AFTER_FIRST_UPDATE: dict[str, Any] = {"steps": 3, "warmup": 2}


def ssd_of(model: str) -> list[Setting]:
    """8 x 2048 tokens with clipping: ZeRO-Infinity; all states on SSD, half of them, and all with 8-bit moments."""
    return [
        Setting("slide", model, offload="nvme", slide=ALL_ON_SSD, **AFTER_FIRST_UPDATE),
        Setting("stock", model, offload="nvme", **FEW),
        Setting("slide", model, offload="nvme", slide=HALF_ON_SSD, **AFTER_FIRST_UPDATE),
        Setting("slide", model, offload="nvme", slide={**ALL_ON_SSD, "state_dtype": "8bit"}, **AFTER_FIRST_UPDATE),
    ]


def ssd_ga() -> list[Setting]:
    """Qwen2.5-1.5B, 16 micro batches a step: the SSD's share falls for an engine that reads states once a step."""
    shape: dict[str, Any] = {"model": "qwen2.5-1.5b", "grad_accum": 16, "offload": "nvme"}
    return [
        Setting("slide", slide=ALL_ON_SSD, steps=1, warmup=2, **shape),
        Setting("stock", steps=1, warmup=1, **shape),
        Setting("slide", slide=HALF_ON_SSD, steps=1, warmup=2, **shape),
    ]


def larger_than_memory(model: str) -> dict[str, Any]:
    """A model whose states fit neither a small GPU nor host memory, and must not pass through either as a whole."""
    return {"model": model, "offload": "nvme", "build": "host", "gpu_fraction": small_gpu_share()}


def ssd_large() -> list[Setting]:
    """12 G parameters with torch limited to 24 GiB of the GPU, states partly on SSD: 145 GB of them, or 74 with 8 bits.

    On a host of 128 GiB with 60 GB of free disk: 53 GB of the fp32 states on SSD and 24 GB of held gradients beside the
    others in memory; 34 GB with 8 bits. Stock needs 18 B/param of disk and 2 of memory: 217 GB.
    """
    shape = larger_than_memory("llama-12b")
    eight_bit = {"gpu_states": 0, "host_memory": "40GB", "state_dtype": "8bit"}
    return [
        Setting("slide", batch=2, slide={"gpu_states": 0, "host_memory": "92GB"}, **AFTER_FIRST_UPDATE, **shape),
        Setting("slide", batch=2, slide=eight_bit, **AFTER_FIRST_UPDATE, **shape),
        Setting("slide", batch=4, slide=eight_bit, **AFTER_FIRST_UPDATE, **shape),
    ]


def ssd_largest() -> list[Setting]:
    """The largest shape for 126 GiB of memory and 64 of disk, with torch limited to 24 GiB of the GPU: 8-bit states.

    The timed step is the first with an update under it: what it reads was never written. Two warm-up steps time a
    whole one.
    """
    eight_bit = {"gpu_states": 0, "host_memory": "79GB", "state_dtype": "8bit"}
    return [Setting("slide", batch=2, slide=eight_bit, steps=1, warmup=1, **larger_than_memory("llama-22b"))]


def quick() -> list[Setting]:
    """Qwen2.5-0.5B, 4 x 1024 tokens: does everything run, and in the right order of speed?"""
    shape: dict[str, Any] = {"model": "qwen2.5-0.5b", "batch": 4, "seq": 1024, "steps": 5}
    return [
        Setting("slide", clip=1.0, slide=ALL_STATES_ON_HOST, **shape),
        Setting("slide", clip=0, slide=ALL_STATES_ON_HOST, **shape),
        Setting("stock", clip=1.0, **shape),
        Setting("gpu-only", clip=1.0, **shape),
    ]


KERNELS_OFF: dict[str, Any] = {**ALL_STATES_ON_HOST, "kernels": "off"}
KERNELS_AUTO: dict[str, Any] = {**ALL_STATES_ON_HOST, "kernels": "auto"}


def kernels() -> list[Setting]:
    """Qwen2.5-3B, 8 x 2048 tokens: Hugging Face's modules, our kernels and Liger's, under the engine and without it.

    Liger's fused loss reads the head's weight without running the head, so no engine knows that it is needed. Here it
    is there, because this model's head is its embedding, which has run: with an untied head use `liger-plain-loss`.
    """
    return [
        Setting("slide", slide=KERNELS_OFF),
        Setting("slide", slide=KERNELS_AUTO),
        Setting("slide", patch="liger", slide=KERNELS_OFF),
        Setting("gpu-only"),
        Setting("gpu-only", patch="ours"),
        Setting("gpu-only", patch="liger"),
        Setting("slide", gpu_fraction=small_gpu_share(), slide={**SMALL_GPU_SLIDE, "kernels": "auto"}),
        Setting("slide", gpu_fraction=small_gpu_share(), slide={**SMALL_GPU_SLIDE, "kernels": "off"}),
    ]


def kernels_curves() -> list[Setting]:
    """200 steps of few tokens, all states on the GPU: do the losses stay together, the updates' kernels included?"""
    long: dict[str, Any] = {"batch": 2, "steps": 200, "warmup": 0, "distinct_batches": 16}
    room = {"gpu_states": "46GB"}
    return [
        Setting("slide", slide={**KERNELS_OFF, **room}, **long),
        Setting("slide", slide={**KERNELS_AUTO, **room}, **long),
        Setting("slide", patch="liger", slide={**KERNELS_OFF, **room}, **long),
    ]


def streamed_head() -> list[Setting]:
    """Qwen2.5-3B with a head of its own, 8 x 2048 tokens: the head on the GPU, and its rows passing through it."""
    streamed = {**KERNELS_AUTO, "stream_head": True}
    model = "qwen2.5-3b-untied"
    return [Setting("slide", model, slide=KERNELS_AUTO), Setting("slide", model, slide=streamed)]


def tiny() -> list[Setting]:
    """A model of 6 M parameters: the scripts themselves, on a machine without a GPU."""
    shape: dict[str, Any] = {"model": "tiny", "batch": 2, "seq": 128, "steps": 3, "warmup": 2, "lr": 1e-3}
    return [
        Setting("slide", clip=1.0, **shape),
        Setting("slide", clip=0, **shape),
        Setting("stock", clip=1.0, **shape),
        Setting("gpu-only", clip=1.0, **shape),
    ]


def tiny_ssd() -> list[Setting]:
    """The rows of the SSD plans with a model of 6 M parameters, on a machine without a GPU."""
    shape: dict[str, Any] = {"model": "tiny", "batch": 2, "seq": 128, "offload": "nvme", "lr": 1e-3, **FEW}
    return [
        Setting("slide", slide=ALL_ON_SSD, **shape),
        Setting("stock", **shape),
        Setting("slide", slide=HALF_ON_SSD, build="host", **shape),
        Setting("slide", slide={**ALL_ON_SSD, "state_dtype": "8bit"}, **shape),
        Setting("slide", slide=ALL_ON_SSD, grad_accum=4, **shape),
        Setting("stock", grad_accum=4, **shape),
    ]


PLANS: dict[str, Callable[[], list[Setting]]] = {
    "main": main,
    "large": large,
    "small-gpu": small_gpu,
    "quick": quick,
    "tiny": tiny,
    "kernels": kernels,
    "kernels-curves": kernels_curves,
    "streamed-head": streamed_head,
    "ssd-1.5b": lambda: ssd_of("qwen2.5-1.5b"),
    "ssd-3b": lambda: ssd_of("qwen2.5-3b"),
    "ssd-ga": ssd_ga,
    "ssd-large": ssd_large,
    "ssd-largest": ssd_largest,
    "tiny-ssd": tiny_ssd,
}
