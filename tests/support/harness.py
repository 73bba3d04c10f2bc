"""Small models, and what is needed to train them on an engine and to compare what came out."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.utils import logger as deepspeed_logger
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad, safe_get_full_optimizer_state
from torch import nn
from torch.utils import _pytree as pytree

from ds_slide.optim.adamw import AdamWHyper
from ds_slide.optim.reference import decode_split, encode_split, reference_update_
from ds_slide.optim.rule import Elements
from ds_slide.runtime.core.device import PASSED
from ds_slide.runtime.core.futures import Future

deepspeed_logger.setLevel(logging.ERROR)

Batch = dict[str, torch.Tensor]
VOCABULARY = 256
BATCH, LENGTH = 2, 32
LAYERS = 4
ADAMW_STATES = ("exp_avg", "exp_avg_sq")

HYPER = AdamWHyper(lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
ADAMW = {"lr": HYPER.lr, "betas": list(HYPER.betas), "eps": HYPER.eps, "weight_decay": HYPER.weight_decay}


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


def on_ssd(config: dict[str, Any], folder: Path | str, *sections: str) -> dict[str, Any]:
    """`config` with the offload `sections`, both where none is named, on the SSD at `folder`."""
    for section in sections or ("offload_param", "offload_optimizer"):
        config["zero_optimization"][section] = {"device": "nvme", "nvme_path": str(folder)}
    return config


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
    """A Llama of four blocks with 45 thousand parameters each."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 172,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
        "use_cache": False,
    }
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**(sizes | options)))


def loaded(shape: Any, config: dict[str, Any]) -> nn.Module:
    """A model of `shape`, a configuration of transformers, made under `zero.Init` as `from_pretrained` makes it."""
    from transformers import AutoModelForCausalLM
    from transformers.integrations import HfDeepSpeedConfig

    alive = HfDeepSpeedConfig(config)  # transformers looks for it, and keeps a weak reference
    torch.manual_seed(0)
    model: nn.Module = AutoModelForCausalLM.from_config(shape)
    del alive
    return model


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


def let_run_ahead(engine: Any) -> None:
    """Wait until all blocks have been updated ahead whose gradients are final."""
    parts = engine.optimizer.runtime.parts
    parts.context.lanes.d2h.drain()
    parts.context.lanes.update.drain()
    last = Future(parts.context.failures)

    def run() -> int:
        last.complete()
        return 0

    parts.context.lanes.update.submit(len(parts.units), PASSED, run, turn="spare")
    last.wait()


def states_of(model: nn.Module, keys: Sequence[str] = ADAMW_STATES) -> dict[str, dict[str, torch.Tensor]]:
    """Weights as the model reads them, and for the trainable ones master and the states `keys`, by parameter name."""
    parameters = dict(model.named_parameters())
    states: dict[str, dict[str, torch.Tensor]] = {name: {} for name in parameters}
    with deepspeed.zero.GatheredParameters(list(parameters.values())):
        for name, parameter in parameters.items():
            states[name]["weight"] = parameter.detach().clone()
    for name, parameter in parameters.items():
        if not parameter.requires_grad:
            continue
        states[name]["master"] = safe_get_full_fp32_param(parameter).clone()
        for key in keys:
            states[name][key] = safe_get_full_optimizer_state(parameter, key).clone()
    return states


def trained(model: nn.Module, config: dict[str, Any], data: Sequence[Batch], **arguments: Any) -> Result:
    """Train `model` on a new engine and read everything back."""
    loss_of = arguments.pop("loss_of", causal_loss)
    with engine_for(model, config, **arguments) as engine:
        result = train(engine, data, loss_of)
        result.states = states_of(model)
    return result


def first_gradients(model: nn.Module, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Those of the first step, as a script reads them before it."""
    gradients = {}
    with engine_for(model, config) as engine:
        for batch in batches(config["gradient_accumulation_steps"]):
            engine.backward(causal_loss(engine, batch))
            if engine.is_gradient_accumulation_boundary():
                trains = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
                gradients = {name: safe_get_full_grad(parameter).clone() for name, parameter in trains.items()}
            engine.step()
    assert any(bool(gradient.any()) for gradient in gradients.values())
    return gradients


def distance_of_masters(found: Result, expected: Result, start: nn.Module) -> float:
    """How far apart two runs have ended, over the way that `expected` has come."""
    begin = dict(start.named_parameters())
    apart = come = 0.0
    for name, states in expected.states.items():
        apart += float((found.states[name]["master"] - states["master"]).abs().sum())
        come += float((states["master"] - begin[name].detach()).abs().sum())
    return apart / come


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal to the bit, so that 0 and -0 differ and NaN equals itself."""
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[left.element_size()]
    return left.dtype == right.dtype and left.shape == right.shape and torch.equal(left.view(bits), right.view(bits))


def unequal(left: Any, right: Any) -> list[str]:
    """Names under which two nested dictionaries of tensors differ in any bit."""
    if isinstance(left, dict):
        assert left.keys() == right.keys()
        return [f"{key}.{name}" for key in left for name in unequal(left[key], right[key])]
    return [] if same_bits(left, right) else [""]


def half_up(masters: torch.Tensor) -> torch.Tensor:
    """The bf16 weights of fp32 masters. Torch's cast differs from it in ties (low half 0x8000) with an even upper half:
    it rounds half to even, by which masters could not be told from their weights and remainders."""
    return encode_split(masters)[0].view(torch.bfloat16)


def exchanged(states: dict[str, dict[str, torch.Tensor]], *, to_stock: bool) -> dict[str, dict[str, torch.Tensor]]:
    """States in the form of `states_of`, as the other engine has them after loading: of one bf16 weight in 131,072,
    whose master is a tie, the engines make different ones."""
    there = {name: dict(tensors) for name, tensors in states.items()}
    for tensors in there.values():
        if "master" in tensors and tensors["weight"].dtype == torch.bfloat16:
            tensors["weight"] = tensors["master"].bfloat16() if to_stock else half_up(tensors["master"])
    return there


def with_every_low_half(masters: torch.Tensor, first: int = 0) -> torch.Tensor:
    """fp32 `masters` whose low halves count up from `first` in the even elements and are ties in the odd ones."""
    low = torch.arange(first, first + masters.numel()) & 0xFFFF
    low[1::2] = 0x8000
    bits = masters.view(-1).view(torch.int32)
    return ((bits & ~0xFFFF) | low.int()).view(torch.float32).view(masters.shape)


def differences(left: Result, right: Result) -> list[str]:
    """Names of the states in which two runs differ; empty when they agree to the bit, losses included."""
    return ["losses"] * (left.losses != right.losses) + unequal(left.states, right.states)


def to_bf16(model: nn.Module) -> nn.Module:
    """As DeepSpeed does it under ZeRO-3: parameters only, tables such as the rotary one stay in fp32, and integers."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.bfloat16()
    return model


class PlainAdamW:
    """What the engine has to do, without one: global norm in fp64, fp32 masters of bf16 weights in two state buffers,
    each parameter by itself through the reference update. A parameter without gradient counts as zero.

    `gradient_dtype`: in which gradients are reduced. `hypers` of `step`: by parameter name, where they are not `hyper`,
    whose rule may be another than AdamW.
    """

    def __init__(
        self, model: nn.Module, clip: float, gradient_dtype: torch.dtype = torch.bfloat16, hyper: Any = HYPER
    ) -> None:
        self.clip = clip
        self.hyper = hyper
        self.gradient_dtype = gradient_dtype
        self.count = 0
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad}
        self.remainder = {
            name: None if p.dtype == torch.float32 else torch.zeros(p.numel(), dtype=torch.int16, device=p.device)
            for name, p in self.parameters.items()
        }
        self.moments = {
            name: [torch.zeros(p.numel(), device=p.device) for _ in hyper.rule.states]
            for name, p in self.parameters.items()
        }

    def step(
        self, hypers: dict[str, AdamWHyper] | None = None, gradients: dict[str, torch.Tensor] | None = None
    ) -> float:
        """Update from `gradients`, or from `parameter.grad`, which is cleared; returns the norm."""
        self.count += 1
        gradients = gradients or {
            name: torch.zeros_like(p) if p.grad is None else p.grad.detach().to(self.gradient_dtype)
            for name, p in self.parameters.items()
        }
        norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients.values()))
        scale = 1.0 / max(1.0, (norm + 1e-6) / self.clip) if self.clip > 0 else 1.0
        for name, p in self.parameters.items():
            hyper = dataclasses.replace((hypers or {}).get(name, self.hyper), step=self.count)
            weight, states = p.data.view(-1), self.moments[name]
            elements = Elements(weight, self.remainder[name], states, gradients[name].reshape(-1))
            reference_update_(elements, hyper, scale)
            p.grad = None
        return float(torch.tensor(norm, dtype=torch.float32))

    def states(self) -> dict[str, dict[str, torch.Tensor]]:
        """In the form of `states_of`."""
        states = {name: {"weight": p.detach()} for name, p in self.frozen.items()}
        for name, p in self.parameters.items():
            remainder, flat = self.remainder[name], p.detach().view(-1)
            master = flat if remainder is None else decode_split(flat.view(torch.int16), remainder)
            values = zip(("master", *self.hyper.rule.state_names), (master, *self.moments[name]), strict=True)
            states[name] = {"weight": p.detach(), **{key: value.view(p.shape) for key, value in values}}
        return states


def plain_training(
    model: nn.Module, data: Sequence[Batch], clip: float, loss_of: Loss = causal_loss, **options: Any
) -> Result:
    """As `trained`, without an engine. `options`: more of PlainAdamW's."""
    return stepped(PlainAdamW(model, clip, **options), model, data, loss_of)


def stepped(optimizer: Any, model: nn.Module, data: Sequence[Batch], loss_of: Loss = causal_loss) -> Result:
    """What comes of a step of `optimizer`, a `PlainAdamW` or its like, for each micro-batch."""
    result = Result()
    for batch in data:
        loss = loss_of(model, batch)
        loss.backward()
        result.losses.append(loss.item())
        result.norms.append(optimizer.step())
    result.states = optimizer.states()
    return result


class _Identity(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(_ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return gradients


def sum_gradients_by_block(layers: Iterable[nn.Module]) -> None:
    """Make a tensor that is read by several layers, or by a layer and the loss, get one gradient from each of them.

    Gradients are added in bf16, so the order of the sum shows: plain autograd adds the parts of all readers one by one,
    the engine adds those of one layer first, as re-entrant checkpointing does.
    """

    def separate(_layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        leaves, tree = pytree.tree_flatten((args, kwargs))
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        if places and torch.is_grad_enabled():
            for place, tensor in zip(places, _Identity.apply(*(leaves[i] for i in places)), strict=True):
                leaves[place] = tensor
        return pytree.tree_unflatten(leaves, tree)

    for layer in layers:
        layer.register_forward_pre_hook(separate, with_kwargs=True)
