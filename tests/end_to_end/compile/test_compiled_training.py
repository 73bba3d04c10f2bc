"""`torch.compile` under the engine: stock's losses, and one compilation for all equal blocks."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
import transformers
from compiled import FP32, STEPS, WAYS, Counting, Net, losses, losses_of, no_compilation_after, tokens
from harness import batches, ds_config, engine_for, llama, train
from packaging.version import Version
from torch import nn
from torch._dynamo.utils import counters

from ds_slide.runtime.activations.costs import CallTimes
from ds_slide.runtime.core.compiled_code import uncompiled
from ds_slide.runtime.memory.tier_moves import move

pytestmark = pytest.mark.usefixtures("one_rank")

CHECKPOINTS = {"none": None, "non-reentrant": False, "reentrant": True}
PLACES: dict[str, dict[str, Any]] = {
    "streamed": {"window": 2},
    "mixed": {"window": 2, "gpu_states": 400_000},
    "resident": {"window": 2, "gpu_states": "1GiB"},
}
QUICK = [
    ("engine", "none", "streamed"),
    ("layers", "none", "mixed"),
    ("layers", "reentrant", "streamed"),
    ("layers", "non-reentrant", "streamed"),
    ("forwards", "non-reentrant", "resident"),
    ("mlps", "none", "streamed"),
]
CASES = [
    pytest.param(*case, marks=[] if case in QUICK else pytest.mark.slow)
    for case in itertools.product(WAYS, CHECKPOINTS, PLACES)
]


@functools.cache
def stock(*, fp32: bool) -> list[float]:
    return losses_of(Net(), None, **(FP32 if fp32 else {}))


def counts(way: str, reentrant: bool | None) -> int:
    """How often a block is compiled: also for the forward without gradients of the re-entrant form."""
    if way == "mlps" or (way == "engine" and reentrant is not None):
        return 0  # dynamo leaves a checkpoint alone that has a hook inside, and so what the checkpoint calls
    return 2 if reentrant else 1


@pytest.mark.parametrize(("way", "checkpointing", "places"), CASES)
def test_losses_are_stocks_and_blocks_are_compiled_once(way: str, checkpointing: str, places: str) -> None:
    reentrant = CHECKPOINTS[checkpointing]
    backend = Counting("aot_eager")
    found = losses_of(Net(reentrant), PLACES[places], way, backend, **FP32)
    assert found == pytest.approx(stock(fp32=True), abs=1e-6)
    assert backend.blocks == counts(way, reentrant)


# 0.01: single roundings of bf16. A compiled block keeps more of its numbers in fp32.
@pytest.mark.parametrize(
    ("way", "fp32", "tolerance"),
    [
        ("layers", True, 1e-5),
        pytest.param("engine", True, 1e-5, marks=pytest.mark.slow),
        pytest.param("layers", False, 0.01, marks=pytest.mark.slow),
        pytest.param("engine", False, 0.01, marks=pytest.mark.slow),
    ],
)
def test_losses_of_inductor_are_stocks(way: str, fp32: bool, tolerance: float) -> None:
    backend = Counting("inductor")
    found = losses_of(Net(), PLACES["streamed"], way, backend, **(FP32 if fp32 else {}))
    assert found == pytest.approx(stock(fp32=fp32), abs=tolerance)
    assert backend.blocks == 1


def test_a_block_in_another_slot_is_not_compiled_again() -> None:
    backend = Counting("aot_eager")
    with no_compilation_after(1), engine_for(Net(), ds_config({"window": 3}, **FP32)) as engine:
        WAYS["layers"](engine, backend)
        places: set[int] = set()
        first = engine.module.layers[0]
        first.register_forward_pre_hook(uncompiled(lambda *_: places.add(first.mlp.up.weight.data_ptr())))
        losses(engine, tokens(STEPS))
        slots = engine.optimizer.runtime.parts.window.slots
        slots.append(slots.pop(0))  # blocks take the slots in their order
        losses(engine, tokens(STEPS))
    assert len(places) == 2
    assert backend.blocks == 1


@pytest.mark.parametrize("way", ["engine", "layers"])
def test_nothing_is_compiled_after_the_first_step(way: str) -> None:
    """Neither in a later step, nor where all weights come to stay on the GPU. Each step compiled what the engine does
    before a forward, which took 10 s for 3 B."""
    with no_compilation_after(), engine_for(Net(), ds_config({"window": 2, "gpu_states": 0}, **FP32)) as engine:
        WAYS[way](engine, "aot_eager")
        losses(engine, tokens(1))
        counters.clear()
        losses(engine, tokens(2))
        runtime = engine.optimizer.runtime
        assert move(runtime, frozenset(unit.order for unit in runtime.units))
        losses(engine, tokens(2))
        assert not counters["frames"]


def test_a_step_after_one_that_began_eager_is_not_compiled_again() -> None:
    """Where all weights stay on the GPU, the dictionaries of parameters have another class before `compile()`."""
    (ids,) = tokens(1)
    with no_compilation_after(), engine_for(Net(), ds_config(PLACES["resident"], **FP32)) as engine:
        with torch.no_grad():
            engine(ids)
        WAYS["layers"](engine, "aot_eager")
        losses(engine, [ids])
        assert counters["frames"]
        counters.clear()
        losses(engine, tokens(2))
        assert not counters["frames"]


def test_the_first_step_of_transformers_compiles_alone() -> None:
    with no_compilation_after(), engine_for(llama(), ds_config({"window": 2}, **FP32)) as engine:
        engine.compile(backend="aot_eager")
        train(engine, batches(1))
        counters.clear()
        train(engine, batches(3))
        assert not counters["frames"]


def adapted() -> nn.Module:
    """LoRA in fp32 beside frozen weights. The first block's input has no gradient."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    return peft.get_peft_model(Net(), peft.LoraConfig(r=4, target_modules=["up", "mix"], init_lora_weights=False))


@pytest.mark.parametrize("way", ["layers", pytest.param("engine", marks=pytest.mark.slow)])
def test_losses_of_adapters_are_stocks(way: str) -> None:
    expected = losses_of(adapted(), None, **FP32)
    backend = Counting("aot_eager")
    assert losses_of(adapted(), PLACES["streamed"], way, backend, **FP32) == pytest.approx(expected, abs=1e-6)
    assert backend.blocks == 2  # the first block, and all others


def test_blocks_with_narrowed_weights_are_compiled_once() -> None:
    """Under `torch_autocast` the linear layers inside of a block have hooks, too."""
    autocast = {"bf16": None, "torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
    expected = losses_of(Net(), PLACES["streamed"], **autocast)
    backend = Counting("aot_eager")
    assert losses_of(Net(), PLACES["streamed"], "layers", backend, **autocast) == expected
    assert backend.blocks == 1


@pytest.mark.skipif(
    Version(transformers.__version__) >= Version("5.23"),
    reason="the checkpoint is around the forward alone, in the hooks",
)
@pytest.mark.parametrize("asked", [None, pytest.param(False, marks=pytest.mark.slow)])
def test_what_decides_about_activations_is_not_compiled(monkeypatch: pytest.MonkeyPatch, asked: bool | None) -> None:
    """transformers' layers call their checkpoint inside of the compiled model, also where the script asks for none. On
    a GPU, timing events that were recorded in a graph ended the third step with an error."""
    timed: list[int] = []
    leave = CallTimes.leave

    def noted(times: CallTimes, order: int, shape: Any, *, is_mixed: bool) -> None:
        timed.append(order)
        leave(times, order, shape, is_mixed=is_mixed)

    monkeypatch.setattr(CallTimes, "leave", noted)

    def trained(compiles: bool) -> list[float]:
        with engine_for(llama(), ds_config({"window": 2, "gpu_memory": "1GiB"}, **FP32)) as engine:
            if asked is not None:
                engine.module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": asked})
            if compiles:
                engine.compile(backend="aot_eager")
            return train(engine, batches(STEPS)).losses

    expected = trained(compiles=False)
    assert timed
    timed.clear()
    assert trained(compiles=True) == pytest.approx(expected, abs=1e-5)
    assert timed == []
