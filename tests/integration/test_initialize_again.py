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
from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK
from harness import batches, causal_loss, ds_config, engine_for, llama, on_ssd
from torch import nn

from ds_slide.errors import SlideError

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


def test_experts_that_deepspeed_flags_as_leaves_move_with_their_blocks() -> None:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 16, "num_experts": 4, "head_dim": 8}
    shape = {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts_per_tok": 2}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(vocab_size=256, use_cache=False, **sizes, **shape))
    with engine_for(model, ds_config({"window": 2})) as engine:
        assert [unit.name for unit in engine.optimizer.runtime.blocks] == [f"model.layers.{n}" for n in range(3)]
        assert causal_loss(engine, batches(1)[0]).isfinite()
