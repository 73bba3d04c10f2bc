"""The runs that two trees are compared on: tiny models, a few steps each, on the CPU accelerator.

Only what users may call is named here, because both trees run this file: DeepSpeed's JSON and engine, Hugging Face's
models. Settings that depend on the machine (window, budgets, threads) are given.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

BATCH, LENGTH, VOCABULARY = 2, 32, 256
STEPS = 3
AUTOCAST = {"enabled": True, "dtype": "bfloat16"}
OVERFLOWING = {"enabled": True, "initial_scale_power": 20, "hysteresis": 1}
SGDR = {"type": "WarmupLR", "params": {"warmup_min_lr": 1e-4, "warmup_max_lr": 1e-3, "warmup_num_steps": 3}}


@dataclass(frozen=True)
class Run:
    """One training, or the forwards of an engine without an optimizer.

    `slide`: more of the "ds_slide" block. `others`: more of DeepSpeed's JSON, None takes a key away. `ssd`: which of
    the offload sections name a disk. `saves`: a checkpoint after the last step, and one more step.
    """

    slide: dict[str, Any] = field(default_factory=dict)
    clip: float = 1.0
    accumulation: int = 1
    others: dict[str, Any] = field(default_factory=dict)
    ssd: tuple[str, ...] = ()
    tied: bool = False
    checkpointing: bool = False
    frozen: Callable[[str], bool] | None = None
    groups: bool = False
    forwards_only: bool = False
    saves: bool = False

    def config(self, disk: Path) -> dict[str, Any]:
        """DeepSpeed's JSON; states on SSD go to `disk`."""
        offload = {section: {"device": "cpu"} for section in ("offload_optimizer", "offload_param")}
        for section in self.ssd:
            offload[section] = {"device": "nvme", "nvme_path": str(disk)}
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": BATCH,
            "gradient_accumulation_steps": self.accumulation,
            "gradient_clipping": self.clip,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": 3, **offload},
            "optimizer": {
                "type": "AdamW",
                "params": {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1},
            },
            "steps_per_print": 10**9,
            "ds_slide": {"enabled": True, "window": 2, "gpu_states": 0, "cpu_threads": 1, "cpu_cores": "none"},
            **self.others,
        }
        if self.forwards_only:
            config["optimizer"] = None
        config["ds_slide"] |= self.slide
        return {key: value for key, value in config.items() if value is not None}

    def model(self, seed: int) -> nn.Module:
        """A Llama of four blocks with 45 thousand parameters each."""
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(seed)
        sizes = {"hidden_size": 64, "intermediate_size": 172, "num_hidden_layers": 4, "max_position_embeddings": 64}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
        config = LlamaConfig(vocab_size=VOCABULARY, tie_word_embeddings=self.tied, use_cache=False, **sizes, **heads)
        model = LlamaForCausalLM(config)
        if self.checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(self.frozen is None or not self.frozen(name))
        return model

    def parameters(self, model: nn.Module) -> list[Any]:
        """What is given to the optimizer: all that is trained, or two groups of it."""
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if not self.groups:
            return trained
        return [
            {"params": [parameter for parameter in trained if parameter.ndim > 1], "weight_decay": 0.1},
            {"params": [parameter for parameter in trained if parameter.ndim == 1], "weight_decay": 0.0, "lr": 5e-4},
        ]


def batches(first: int, count: int) -> list[torch.Tensor]:
    """Random tokens, [BATCH, LENGTH]: the micro-batches `first` to `first + count - 1` of one sequence."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCABULARY, (first + count, BATCH, LENGTH), generator=generator)
    return list(tokens[first:])


BOTH = ("offload_optimizer", "offload_param")
DELAYS = {"debug": {"lane_delay_ms": 2.0, "seed": 3}}
# Room for the states of the outer modules and of one block or two.
SOME_STATES = {"gpu_states": 1_300_000}

ONE_RANK: dict[str, Run] = {
    "host, clipping": Run(saves=True),
    "host, clipping, accumulation": Run(accumulation=4),
    "host, immediate": Run(clip=0.0),
    "host, immediate, accumulation": Run(clip=0.0, accumulation=4),
    "host, held without clipping": Run({"defer_updates": True}, clip=0.0),
    "host, window of 9": Run({"window": 9}, accumulation=4),
    "host, 2 threads, delays": Run({"cpu_threads": 2, "window": 3, **DELAYS}),
    "host, activation checkpointing": Run(checkpointing=True, clip=0.0),
    "host, schedule and groups": Run(groups=True, others={"scheduler": SGDR}, saves=True),
    "host, asynchronous save": Run({"async_save": True}, saves=True),
    "tied": Run(tied=True),
    "tied, immediate, accumulation": Run(tied=True, clip=0.0, accumulation=4),
    "frozen outer modules": Run(frozen=lambda name: "layers" not in name),
    "frozen blocks": Run(frozen=lambda name: "layers.1" in name or "layers.2" in name, saves=True),
    "frozen but the norms": Run(frozen=lambda name: "norm" not in name, clip=0.0),
    "8-bit moments": Run({"state_dtype": "8bit"}, saves=True),
    "bf16 moments": Run({"state_dtype": "bf16"}, clip=0.0, saves=True),
    "streamed head": Run({"stream_head": True}, saves=True),
    "streamed head, immediate": Run({"stream_head": True}, clip=0.0),
    "GPU states, all": Run({"gpu_states": "1GiB"}, saves=True),
    "GPU states, some": Run(SOME_STATES, accumulation=4),
    "GPU states, some, immediate": Run(SOME_STATES, clip=0.0),
    "SSD, clipping": Run({"host_memory": 0}, ssd=BOTH, saves=True),
    "SSD, immediate, accumulation": Run({"host_memory": 0}, ssd=BOTH, clip=0.0, accumulation=4),
    "SSD, fewest buffers, delays": Run(
        {"host_memory": 0, "ssd_buffers": 2, "weight_buffers": 2, "io_backend": "threads", **DELAYS}, ssd=BOTH, clip=0.0
    ),
    "SSD, half": Run({"host_memory": 1_500_000, "checksums": False}, ssd=BOTH),
    "SSD, moments only, 8 bit": Run({"host_memory": 0, "state_dtype": "8bit"}, ssd=("offload_optimizer",)),
    "SSD, streamed head": Run({"host_memory": 0, "stream_head": True}, ssd=BOTH),
    "fp16, overflow": Run(others={"bf16": None, "fp16": OVERFLOWING}, saves=True),
    "fp32": Run(others={"bf16": None}),
    "torch_autocast": Run(others={"bf16": None, "torch_autocast": AUTOCAST}, saves=True),
    "inference, host": Run(forwards_only=True),
    "inference, SSD": Run({"host_memory": 0}, ssd=("offload_param",), forwards_only=True),
}
TWO_RANKS: dict[str, Run] = {
    "2 ranks, clipping": Run(saves=True),
    "2 ranks, immediate, accumulation": Run(clip=0.0, accumulation=4),
    "2 ranks, gathered": Run({"share_weights": False, **DELAYS}),
    "2 ranks, gathered, GPU states, immediate": Run({"share_weights": False, **SOME_STATES}, clip=0.0),
    "2 ranks, SSD": Run({"host_memory": 0}, ssd=BOTH, saves=True),
    "2 ranks, 8-bit moments": Run({"state_dtype": "8bit"}),
    "2 ranks, inference": Run(forwards_only=True),
}
