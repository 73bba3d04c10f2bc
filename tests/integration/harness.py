"""Small models, and what is needed to train them on an engine and to compare what came out."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import deepspeed
import torch
from deepspeed.utils import logger as deepspeed_logger
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch import nn

deepspeed_logger.setLevel(logging.ERROR)

Batch = dict[str, torch.Tensor]
VOCABULARY = 256
BATCH, LENGTH = 2, 32

ADAMW = {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}


def ds_config(
    slide: dict[str, Any] | None, *, clip: float = 1.0, accumulation: int = 1, **others: Any
) -> dict[str, Any]:
    """A DeepSpeed config; `slide` None is stock ZeRO-3 with CPU offload."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": clip,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
        "optimizer": {"type": "AdamW", "params": ADAMW},
        "steps_per_print": 10**9,
        **others,
    }
    if slide is not None:
        config["ds_slide"] = {"enabled": True, **slide}
    return {key: value for key, value in config.items() if value is not None}


@contextmanager
def engine_for(model: nn.Module, config: dict[str, Any], **arguments: Any) -> Iterator[Any]:
    """A DeepSpeed engine that is destroyed at the end. `arguments`: more of `deepspeed.initialize`'s."""
    if "model_parameters" not in arguments and not isinstance(arguments.get("optimizer"), torch.optim.Optimizer):
        arguments["model_parameters"] = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, config=config, **arguments)
    expected = "SlideZeroOptimizer" if "ds_slide" in config else "DeepSpeedZeroOptimizer_Stage3"
    assert type(engine.optimizer).__name__ == expected
    try:
        yield engine
    finally:
        engine.destroy()


def llama(seed: int = 0, **options: Any) -> nn.Module:
    """A Llama of six blocks with 45 thousand parameters each."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 172,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
        "use_cache": False,
    }
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**(sizes | options)))


def batches(count: int, seed: int = 1, length: int = LENGTH) -> list[Batch]:
    """Random tokens with themselves as labels."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCABULARY, (count, BATCH, length), generator=generator)
    return [{"input_ids": ids, "labels": ids} for ids in tokens]


@dataclass
class Result:
    """What a training run left: losses of every micro-batch, norms of every step, and every bit of the states."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    states: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)


Loss = Callable[[Any, Batch], torch.Tensor]


def causal_loss(engine: Any, batch: Batch) -> torch.Tensor:
    loss: torch.Tensor = engine(**batch).loss
    return loss


def train(engine: Any, data: Sequence[Batch], loss_of: Loss = causal_loss) -> Result:
    """One micro-batch after the other through forward, backward and step."""
    result = Result()
    for batch in data:
        boundary = engine.is_gradient_accumulation_boundary()
        loss = loss_of(engine, batch)
        engine.backward(loss)
        engine.step()
        result.losses.append(loss.item())
        if boundary:
            result.norms.append(float(engine.get_global_grad_norm() or 0.0))
    return result


def states_of(model: nn.Module) -> dict[str, dict[str, torch.Tensor]]:
    """Weights as the model reads them, and for the trainable ones master and moments, by parameter name."""
    parameters = dict(model.named_parameters())
    states: dict[str, dict[str, torch.Tensor]] = {name: {} for name in parameters}
    with deepspeed.zero.GatheredParameters(list(parameters.values())):
        for name, parameter in parameters.items():
            states[name]["weight"] = parameter.detach().clone()
    for name, parameter in parameters.items():
        if not parameter.requires_grad:
            continue
        states[name]["master"] = safe_get_full_fp32_param(parameter).clone()
        for key in ("exp_avg", "exp_avg_sq"):
            states[name][key] = safe_get_full_optimizer_state(parameter, key).clone()
    return states


def trained(model: nn.Module, config: dict[str, Any], data: Sequence[Batch], **arguments: Any) -> Result:
    """Train `model` on a new engine and read everything back."""
    loss_of = arguments.pop("loss_of", causal_loss)
    with engine_for(model, config, **arguments) as engine:
        result = train(engine, data, loss_of)
        result.states = states_of(model)
    return result


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal to the bit, so that 0 and -0 differ and NaN equals itself."""
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[left.element_size()]
    return left.dtype == right.dtype and left.shape == right.shape and torch.equal(left.view(bits), right.view(bits))


def differences(left: Result, right: Result) -> list[str]:
    """Names of the states in which two runs differ; empty when they agree to the bit, losses included."""
    found = ["losses"] if left.losses != right.losses else []
    assert left.states.keys() == right.states.keys()
    for name, tensors in left.states.items():
        assert tensors.keys() == right.states[name].keys()
        found += [f"{name}.{key}" for key in tensors if not same_bits(tensors[key], right.states[name][key])]
    return found
