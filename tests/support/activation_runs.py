"""Trainings of small models whose blocks are kept or recomputed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import harness
import pytest
import torch
from adapters import adapted
from harness import Batch, Result, batches, ds_config, engine_for, states_of, train
from torch import nn

from ds_slide.plan.keeping import Keepable, Kept
from ds_slide.plan.spare import Input
from ds_slide.runtime.activations import activations as activations_module
from ds_slide.runtime.activations.input_buffers import NAME
from ds_slide.runtime.memory.gpu_room import Budget, GpuRoom

transformers = pytest.importorskip("transformers")

STEPS = 5
"""Two after the first look at spare memory."""
FUNCTION = "_gradient_checkpointing_func"
FORMS = pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
ASKED = pytest.mark.parametrize("reentrant", [False, True, None], ids=["non-reentrant", "reentrant", "unasked"])
"""Forms of checkpointing that a script asks for; None: it asks for none."""
SCHEDULES = {"clipping": (1.0, 1), "immediate": (0.0, 1), "accumulation": (1.0, 2)}
CASES = [("llama", schedule) for schedule in SCHEDULES] + [("qwen2", "clipping"), ("adapters", "clipping")]
"""Of `MODELS` and `SCHEDULES`."""
OWN_BYTES = 800_000
"""More than the engine itself places on the GPU of these models (window of 2, states in host memory)."""
BLOCK_BYTES = 260_000
"""A little more than a block of these models saves in a batch of 2 x 32."""

INPUT = 2 * 32 * 64 * 2
"""Bytes of the input of a block of these models, in bf16, in a batch of 2 x 32."""
DELAYS = {"debug": {"lane_delay_ms": 40.0, "seed": 3}}
"""Longer than a block of these models computes, also on a busy machine."""
Handle = Callable[[int, int], None]

DROPOUT = {"attention_dropout": 0.1, "attn_implementation": "eager"}
llama = functools.partial(harness.llama, num_hidden_layers=6)
"""So many blocks that some are kept, some moved and some recomputed."""


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


def partly_frozen(model: nn.Module) -> nn.Module:
    """As people fine-tune the last blocks, with checkpointing. No backward comes to the embeddings and two blocks."""
    checkpointed(model, reentrant=False)
    for module in (model.model.embed_tokens, *model.model.layers[:2]):
        module.requires_grad_(False)
    model.disable_input_require_grads()
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


@functools.cache
def expected(name: str, reentrant: bool | None, schedule: str) -> Result:
    data = batches(STEPS * SCHEDULES[schedule][1])
    return run(asked(name, reentrant), {"activations": "as_written", "gpu_memory": "1GiB"}, data, schedule)[0]


def asked(name: str, reentrant: bool | None) -> nn.Module:
    """None: the script asks for no checkpointing."""
    model = MODELS[name]()
    return model if reentrant is None else checkpointed(model, reentrant)


def free_buffers(engine: Any) -> bool:
    """Whether all buffers of inputs are free again."""
    pools = engine.optimizer.slide_stats()["pools"]
    return all(pool["free"] == pool["buffers"] for what, pool in pools.items() if what.startswith(NAME))


def handle_of(monkeypatch: pytest.MonkeyPatch) -> Handle:
    """Keep the last so many blocks from then on, and move the inputs of the first so many."""

    def choose(keep: int, move: int) -> None:
        def kept(_room: float, candidates: list[Keepable], **_: bool) -> Kept:
            orders = sorted(each.order for each in candidates)
            return Kept(frozenset(orders[len(orders) - keep :] if keep else ()))

        def moved(_missing: float, inputs: list[Input], _places: Any) -> frozenset[int]:
            return frozenset(each.order for each in inputs[:move])

        monkeypatch.setattr(activations_module, "kept_within", kept)
        monkeypatch.setattr(activations_module, "inputs_to_move", moved)
        monkeypatch.setattr(GpuRoom, "of", lambda *_, **__: -1.0)
        monkeypatch.setattr(GpuRoom, "inputs_missing", lambda *_: 1.0)

    return choose


class SmallGpu:
    """A GPU that holds what the engine places, what is kept, and while a batch runs 3,000 bytes a token: as much as two
    blocks keep."""

    def __init__(self, parts: Any, total: int) -> None:
        self.parts, self.total, self.most = parts, total, 0

    def take_place(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Be the engine's GPU."""
        spare = self.parts.spare
        monkeypatch.setattr(spare.room, "budget", Budget(self, None))
        monkeypatch.setattr(spare.need.peaks, "_gpu", self)

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

    def memory_rate(self) -> float | None:
        return None

    def release_cached(self) -> None: ...

    def compute(self, batch: Batch, *, elsewhere: int = 0) -> None:
        """`elsewhere`: bytes of it that are not on the GPU."""
        self.most = max(self.most, self.allocated() + 3_000 * batch["input_ids"].numel() - elsewhere)
        assert self.most <= self.total, "out of memory"


def with_hooks_inside(model: nn.Module) -> nn.Module:
    """As older transformers have it (5.17), which checkpoint the call of a layer, hooks included, not its forward."""
    kind = type(layers_of(model)[0])
    if not hasattr(kind.forward, "__wrapped__"):
        return model  # one of those

    class Layer(kind):  # type: ignore[misc, valid-type]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            if not self.gradient_checkpointing:
                return super().__call__(*args, **kwargs)
            return self._gradient_checkpointing_func(functools.partial(super().__call__, **kwargs), *args)

    Layer.forward = kind.forward.__wrapped__
    for layer in layers_of(model):
        layer.__class__ = Layer
    return model


class Twice(nn.Module):
    """Calls its blocks twice."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        model = self.inner.model
        hidden = model.embed_tokens(input_ids)
        positions = torch.arange(hidden.size(1))[None]
        around = model.rotary_emb(hidden, positions)
        for layer in (*model.layers, *model.layers):
            hidden = layer(hidden, position_ids=positions, position_embeddings=around)
        logits = self.inner.lm_head(model.norm(hidden))
        return Output(self.inner.loss_function(logits, labels, logits.size(-1)))


class Output(NamedTuple):
    loss: torch.Tensor
