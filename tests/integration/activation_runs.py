"""Trainings of small models whose blocks are kept or recomputed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from adapters import adapted
from harness import Batch, Result, ds_config, engine_for, llama, states_of, train
from torch import nn

transformers = pytest.importorskip("transformers")

STEPS = 6
FUNCTION = "_gradient_checkpointing_func"
FORMS = pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
SCHEDULES = {"clipping": (1.0, 1), "immediate": (0.0, 1), "accumulation": (1.0, 3)}
OWN_BYTES = 800_000
"""More than the engine itself places on the GPU of these models (window of 2, states in host memory)."""
BLOCK_BYTES = 260_000
"""A little more than a block of these models saves in a batch of 2 x 32."""

DROPOUT = {"attention_dropout": 0.1, "attn_implementation": "eager"}


def qwen2() -> nn.Module:
    sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    torch.manual_seed(0)
    return transformers.Qwen2ForCausalLM(
        transformers.Qwen2Config(**sizes, **heads, **DROPOUT, use_cache=False, tie_word_embeddings=True)
    )


def lora() -> nn.Module:
    model = adapted()
    model.enable_input_require_grads()
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {"llama": lambda: llama(**DROPOUT), "qwen2": qwen2, "adapters": lora}


def checkpointed(model: nn.Module, reentrant: bool, **options: Any) -> nn.Module:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant, **options})
    return model


def config_of(slide: dict[str, Any], schedule: str = "clipping") -> dict[str, Any]:
    clip, accumulation = SCHEDULES[schedule]
    config = ds_config({"window": 2, "cpu_threads": 1, "gpu_states": 0, **slide}, clip=clip, accumulation=accumulation)
    return config


def layers_of(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, transformers.GradientCheckpointingLayer)]


def run(model: nn.Module, slide: dict[str, Any], data: list[Batch], schedule: str = "clipping") -> tuple[Result, Any]:
    """-> what came out, and the report on activations."""
    before = [vars(layer).get(FUNCTION) for layer in layers_of(model)]
    torch.manual_seed(3)
    with engine_for(model, config_of(slide, schedule)) as engine:
        result = train(engine, data)
        result.states = states_of(model)
        assert [vars(layer).get(FUNCTION) for layer in layers_of(model)] == before
        return result, engine.optimizer.slide_stats()["activations"]


class SmallGpu:
    """A GPU that holds what the engine places, what is kept, and while a batch runs 3,000 bytes a token: as much as two
    blocks keep."""

    def __init__(self, parts: Any, total: int) -> None:
        self.parts, self.total, self.most = parts, total, 0

    def allocated(self) -> int:
        return int(self.parts.plan.gpu_bytes + self.parts.spare.activations.alive())

    def memory(self) -> tuple[int, int]:
        return self.total - self.allocated(), self.total

    def peak(self) -> int:
        return self.most

    def reset_peak(self) -> None:
        self.most = self.allocated()

    def allocation_retries(self) -> int:
        return 0

    def compute(self, batch: Batch, *, elsewhere: int = 0) -> None:
        """`elsewhere`: bytes of it that are not on the GPU."""
        self.most = max(self.most, self.allocated() + 3_000 * batch["input_ids"].numel() - elsewhere)
        assert self.most <= self.total, "out of memory"
