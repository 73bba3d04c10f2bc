"""A second `deepspeed.initialize` of one model, and what a first one leaves behind that failed."""

from __future__ import annotations

import gc
import threading
import weakref
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK, DeepSpeedZeRoOffload
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from harness import batches, causal_loss, differences, ds_config, engine_for, llama, on_ssd, train
from torch import nn

from ds_slide.errors import SlideError
from ds_slide.integration.parameter_offload import SlideZeroOffload

pytestmark = pytest.mark.usefixtures("one_rank")


def ssd_config(folder: Path, **others: Any) -> dict[str, Any]:
    return on_ssd(ds_config({"host_memory": 0}, **others), folder)


def loss_of(model: nn.Module, config: dict[str, Any]) -> float:
    with engine_for(model, config) as engine, torch.no_grad():
        return float(causal_loss(engine, batches(1)[0]))


def is_registered(model: nn.Module) -> bool:
    return any(entry == model for entry in FWD_MODULE_STACK)


def test_weights_in_memory_outlive_their_engine() -> None:
    model = llama()
    assert loss_of(model, ds_config({})) == loss_of(model, ds_config({}))


def test_weights_that_went_with_an_ssd_are_missed_by_name(tmp_path: Path) -> None:
    # They were read as zeros, without a word.
    model = llama()
    loss_of(model, ssd_config(tmp_path))
    with pytest.raises(SlideError, match=r"model\.layers\.\S+ has no weights: they were on the SSD of an engine"):
        loss_of(model, ssd_config(tmp_path))
    assert list(tmp_path.iterdir()) == []
    assert loss_of(llama(), ssd_config(tmp_path)) == loss_of(llama(), ds_config({}))


def test_an_engine_that_fails_late_leaves_nothing(tmp_path: Path) -> None:
    model = llama()
    with pytest.raises(Exception, match="Nope"):
        deepspeed.initialize(
            model=model,
            model_parameters=list(model.parameters()),
            config=ssd_config(tmp_path, scheduler={"type": "Nope", "params": {}}),
        )
    assert list(tmp_path.iterdir()) == []
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("ds_slide")] == []
    assert not is_registered(model)


def test_a_refused_model_can_be_tried_again_and_is_let_go() -> None:
    model = llama()
    with pytest.raises(SlideError, match="GPU tier"):
        loss_of(model, ds_config({"gpu_memory": 1000}))
    assert not is_registered(model)
    assert loss_of(model, ds_config({})) == loss_of(llama(), ds_config({}))
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None


def test_an_engine_that_was_superseded_says_so() -> None:
    """Its lanes are gone: who went on with it would wait for them for ever."""
    model = llama()
    config = ds_config({"window": 2})
    first, *_ = deepspeed.initialize(model=model, config=config, model_parameters=list(model.parameters()))
    loss = causal_loss(first, batches(1)[0])
    with engine_for(model, config), pytest.raises(SlideError, match="this engine has ended"):
        first.backward(loss)
    first.destroy()


DTYPES = {
    "bf16": {},
    "autocast": {"bf16": {"enabled": False}, "torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
}


def forwards_only(**others: Any) -> dict[str, Any]:
    """What Lightning makes of a JSON for `validate()`: stage 3 and the data type, without the key."""
    config = ds_config(None, **others)
    return {name: config[name] for name in ("train_micro_batch_size_per_gpu", "zero_optimization", "bf16", *others)}


def validated(model: nn.Module, config: dict[str, Any]) -> float:
    """By an engine of stock, which nobody destroys."""
    engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=[])
    assert isinstance(engine.optimizer, DeepSpeedZeRoOffload) and not isinstance(engine.optimizer, SlideZeroOffload)
    with torch.no_grad():
        return float(causal_loss(engine, batches(1)[0]))


@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize("gpu_states", [0, "auto"])
def test_stock_validates_a_model_that_is_trained(gpu_states: Any, dtypes: str) -> None:
    """And training goes on with another engine, beside one that has not validated."""
    config, seen = ds_config({"gpu_states": gpu_states}, **DTYPES[dtypes]), []
    for is_validated in (False, True):
        model = llama()
        first, *_ = deepspeed.initialize(model=model, config=config, model_parameters=list(model.parameters()))
        losses = train(first, batches(2)).losses
        with torch.no_grad():
            expected = float(causal_loss(first, batches(1)[0]))
        if is_validated:
            assert validated(model, forwards_only(**DTYPES[dtypes])) == pytest.approx(expected, abs=2.0**-9)
            with pytest.raises(SlideError, match="this engine has ended"):
                first.backward(causal_loss(first, batches(1)[0]))
        else:
            first.destroy()
        with engine_for(model, config) as second:
            seen.append((losses, train(second, batches(2))))
    assert seen[0][0] == seen[1][0] and differences(seen[0][1], seen[1][1]) == []


def test_stock_trains_a_model_that_was_trained() -> None:
    """Its weights, and not what an engine had beside them."""
    seen = []
    for slide in ({}, None):
        model = llama()
        first, *_ = deepspeed.initialize(model=model, config=ds_config({}), model_parameters=list(model.parameters()))
        train(first, batches(2))
        with engine_for(model, ds_config(slide)) as second:
            assert isinstance(second.optimizer, DeepSpeedZeroOptimizer_Stage3)
            seen.append(train(second, batches(2)).losses)
    assert seen[1] == pytest.approx(seen[0], abs=2.0**-8)


def test_stock_does_not_validate_weights_that_are_on_ssd(tmp_path: Path) -> None:
    model = llama()
    config = ssd_config(tmp_path)
    first, *_ = deepspeed.initialize(model=model, config=config, model_parameters=list(model.parameters()))
    with pytest.raises(SlideError, match="the model belongs to an engine that has weights on SSD"):
        validated(model, forwards_only())
    train(first, batches(1))  # it goes on
    first.destroy()
    with pytest.raises(SlideError, match="has no weights: they were on the SSD of an engine that was destroyed"):
        validated(model, forwards_only())


def test_experts_that_deepspeed_flags_as_leaves_move_with_their_blocks() -> None:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 16, "num_experts": 4, "head_dim": 8}
    shape = {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts_per_tok": 2}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(vocab_size=256, use_cache=False, **sizes, **shape))
    with engine_for(model, ds_config({"window": 2})) as engine:
        assert [unit.name for unit in engine.optimizer.runtime.blocks] == [f"model.layers.{n}" for n in range(3)]
        assert causal_loss(engine, batches(1)[0]).isfinite()
