"""Faults of stock ZeRO-Infinity that DS-Slide must not have, each with the settings that bring it about there."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import deepspeed
import pytest
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from harness import (
    Result,
    batches,
    differences,
    ds_config,
    engine_for,
    llama,
    loaded,
    same_bits,
    states_of,
    train,
    trained,
    unequal,
)
from torch import nn
from transformers import LlamaConfig

CHUNK_NUMEL = 4096
STEPS, HALF = 4, 2
SMALL: dict[str, Any] = {"num_hidden_layers": 3}

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ds_slide.plan.ssd_settings.CHUNK_NUMEL", CHUNK_NUMEL)


@pytest.fixture(autouse=True)
def no_swapper(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed's own swappers are never made."""

    def refuse(*_args: Any, **_kwargs: Any) -> None:
        raise AssertionError("DeepSpeed's swapper was started")

    for name in (
        "deepspeed.runtime.zero.partition_parameters.AsyncPartitionedParameterSwapper",
        "deepspeed.runtime.zero.stage3.PartitionedOptimizerSwapper",
        "deepspeed.runtime.zero.stage3.PipelinedOptimizerSwapper",
    ):
        monkeypatch.setattr(f"{name}.__init__", refuse)


def on_host(slide: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Small groups, as large models have many: with one of 1e9 elements stock never comes to its pipeline."""
    config = ds_config(slide, **options)
    config["zero_optimization"]["sub_group_size"] = 20_000
    return config


def on_ssd(
    disk: Path,
    slide: dict[str, Any] | None = None,
    param: dict[str, Any] | None = None,
    optimizer: dict[str, Any] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """A config with everything on SSD. `param`, `optimizer`: more of DeepSpeed's offload settings."""
    config = on_host({"host_memory": 0, **(slide or {})}, **options)
    nvme = {"device": "nvme", "nvme_path": str(disk)}
    config["zero_optimization"] |= {
        "offload_param": nvme | (param or {}),
        "offload_optimizer": nvme | (optimizer or {}),
    }
    return config


def small_llama(checkpointing: bool | None = None) -> nn.Module:
    """`checkpointing`: None, or whether activation checkpointing is re-entrant."""
    model = llama(**SMALL)
    if checkpointing is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": checkpointing})
    return model


@pytest.fixture(scope="module")
def in_memory() -> Callable[[bool | None], Result]:
    return cache(lambda checkpointing: trained(small_llama(checkpointing), on_host({}), batches(STEPS)))


def test_the_default_pipeline_trains(in_memory: Callable[..., Result], tmp_path: Path) -> None:
    """Stock stops at its first step: AssertionError: new_alloc_buffers is not None (buffer_count is 4)."""
    config = on_ssd(tmp_path, optimizer={"pipeline_read": True, "pipeline_write": True})
    assert differences(trained(small_llama(), config, batches(STEPS)), in_memory(None)) == []
    assert not list(tmp_path.iterdir())


def test_the_default_buffers_are_enough(in_memory: Callable[..., Result], tmp_path: Path) -> None:
    """Stock: "Not enough buffers 0 for swapping 1" by default; here also with the fewest that one can ask for."""
    for slide in ({}, {"weight_buffers": 2, "ssd_buffers": 2, "window": 2}):
        config = on_ssd(tmp_path, slide, param={"max_in_cpu": 0})
        assert differences(trained(small_llama(), config, batches(STEPS)), in_memory(None)) == []


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(in_memory: Callable[..., Result], tmp_path: Path, reentrant: bool) -> None:
    """Stock: "param already assigned swap buffer id" with reuse distance 0, else "Not enough buffers"."""
    config = on_ssd(tmp_path, {"weight_buffers": 2}, param={"max_in_cpu": 0})
    config["zero_optimization"]["stage3_max_reuse_distance"] = 0
    assert differences(trained(small_llama(reentrant), config, batches(STEPS)), in_memory(reentrant)) == []


def second_half(engine: Any) -> Result:
    result = train(engine, batches(STEPS)[HALF:])
    result.states = states_of(engine.module)
    return result


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Result, Result]]:
    """Of a dtype of the moments: a run saved twice into one tag (stock: FileExistsError), the states then, the rest."""

    @cache
    def run(state_dtype: str) -> tuple[Path, Result, Result]:
        folder, disk = tmp_path_factory.mktemp("saves"), tmp_path_factory.mktemp("disk")
        with engine_for(small_llama(), on_ssd(disk, {"state_dtype": state_dtype})) as engine:
            train(engine, batches(1, seed=9))
            engine.save_checkpoint(folder, "tag")
            train(engine, batches(HALF))
            engine.save_checkpoint(folder, "tag")
            half = Result(states=states_of(engine.module))
            rest = second_half(engine)
        assert not list(disk.iterdir())
        return folder, half, rest

    return run


dtypes = pytest.mark.parametrize("state_dtype", ["fp32", "bf16", "8bit"])


@dtypes
def test_zero_to_fp32_gives_the_true_weights(saved: Callable[..., Any], state_dtype: str) -> None:
    """Stock's NVMe checkpoints are empty, or hold what was in the swap buffers last."""
    folder, half, _ = saved(state_dtype)
    exported = get_fp32_state_dict_from_zero_checkpoint(str(folder))
    assert exported.keys() == half.states.keys()
    for name, tensors in half.states.items():
        assert same_bits(exported[name].contiguous(), tensors["master"]), name


@dtypes
def test_resume_is_exact(saved: Callable[..., Any], tmp_path: Path, state_dtype: str) -> None:
    """Short formats too: what was read back in fp32 becomes the same short value again."""
    folder, half, rest = saved(state_dtype)
    model = llama(seed=5, **SMALL)
    with engine_for(model, on_ssd(tmp_path, {"state_dtype": state_dtype})) as engine:
        train(engine, batches(1, seed=8))
        assert engine.load_checkpoint(folder)[0] is not None
        assert unequal(states_of(engine.module), half.states) == []
        assert differences(second_half(engine), rest) == []


@dtypes
def test_a_checkpoint_from_ssd_resumes_in_host_memory(saved: Callable[..., Any], state_dtype: str) -> None:
    folder, _, rest = saved(state_dtype)
    with engine_for(llama(seed=5, **SMALL), on_host({"state_dtype": state_dtype})) as engine:
        engine.load_checkpoint(folder)
        assert differences(second_half(engine), rest) == []


def from_zero_init(config: dict[str, Any]) -> nn.Module:
    with deepspeed.zero.Init(config_dict_or_path=config):
        return llama(**SMALL)


def from_hugging_face(config: dict[str, Any]) -> nn.Module:
    sizes = {"hidden_size": 64, "intermediate_size": 172, "num_attention_heads": 4, "vocab_size": 256}
    return loaded(LlamaConfig(**sizes, num_hidden_layers=3, use_cache=False), config)


@pytest.mark.parametrize("make", [from_zero_init, from_hugging_face])
def test_parameters_born_on_ssd(make: Callable[..., nn.Module], tmp_path: Path) -> None:
    """Stock compiles and starts its swapper at zero.Init and writes a file for every parameter."""
    made = []
    for config in (on_ssd(tmp_path), on_host({})):
        model = make(config)
        assert all(hasattr(parameter, "ds_id") for parameter in model.parameters())
        assert not list(tmp_path.iterdir())
        made.append(trained(model, config, batches(STEPS)))
    assert differences(*made) == []
    assert not list(tmp_path.iterdir())
