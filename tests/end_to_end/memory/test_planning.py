"""What is planned without an engine is what an engine of the same JSON takes, to the byte."""

from __future__ import annotations

import copy
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import ds_config, engine_for, llama, on_ssd

from ds_slide.cli.planning.model import ModelShape, read_adapter
from ds_slide.errors import SlideConfigError
from ds_slide.integration.planning import filled, plan_json
from ds_slide.plan.forecast import Room

RUNS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "host": ({}, {}),
    "under backward": ({}, {"clip": 0.0}),
    "accumulation in fp32": ({}, {"accumulation": 3, "data_types": {"grad_accum_dtype": "fp32"}}),
    "fp32": ({}, {"bf16": None}),
    "gpu states, window": ({"gpu_states": 700_000, "window": 2}, {}),
    "8 bit": ({"state_dtype": "8bit"}, {"clip": 0.0}),
    "lion": ({}, {"optimizer": {"type": "Lion", "params": {"lr": 1e-4}}}),
    "streamed head": ({"stream_head": True}, {}),
    "ssd": ({"host_memory": 0}, {}),
    "ssd, a part": ({"host_memory": 2_000_000, "checksums": False}, {"accumulation": 2}),
}
ROOM = Room(None, 8 << 30)


def on_meta() -> Any:
    with torch.device("meta"):
        return llama(num_hidden_layers=4)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("name", RUNS)
def test_it_is_what_an_engine_takes(name: str, disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ds_slide.plan.ssd_settings.CHUNK_NUMEL", 4096)
    slide, settings = RUNS[name]
    config = ds_config(slide, **settings)
    if name.startswith("ssd"):
        on_ssd(config, disk)
    planned = plan_json(on_meta(), filled(copy.deepcopy(config), None, 1)[0], ROOM)
    with engine_for(llama(num_hidden_layers=4), config) as engine:
        parts = engine.optimizer.runtime.parts
        assert planned.plan.report() == parts.memory_report
        assert planned.plan.allocations == parts.plan.allocations
        assert planned.plan.host_bytes == parts.context.memory.total_bytes


@pytest.mark.usefixtures("one_rank")
def test_an_adapter_is_what_an_engine_takes() -> None:
    import peft

    bare = llama(num_hidden_layers=4)
    shape = ModelShape("small", bare.config, read_adapter("4"))
    config = ds_config({})
    planned = plan_json(shape.build(), filled(copy.deepcopy(config), None, 1)[0], ROOM)
    model = peft.get_peft_model(bare, peft.LoraConfig(r=4, target_modules="all-linear"))
    with engine_for(model, config) as engine:
        parts = engine.optimizer.runtime.parts
        assert planned.plan.allocations == parts.plan.allocations
        assert planned.plan.host_bytes == parts.context.memory.total_bytes


SHAPE = {"num_hidden_layers": 4, "hidden_size": 128, "intermediate_size": 512}
WITH_BITSANDBYTES = [
    pytest.mark.clients,
    pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="no bitsandbytes"),
]


def quantized(kind: str, folder: Path) -> Any:
    """A small model that a library has packed."""
    from transformers import BitsAndBytesConfig, LlamaForCausalLM
    from transformers.integrations.finegrained_fp8 import FP8Linear

    bare = llama(**SHAPE).bfloat16()
    if kind == "fp8":
        for layer in bare.model.layers:
            for parent in list(layer.modules()):
                for name, child in list(parent.named_children()):
                    if type(child) is torch.nn.Linear:
                        packed = FP8Linear(child.in_features, child.out_features, block_size=(128, 128))
                        torch.nn.init.zeros_(packed.weight_scale_inv)
                        setattr(parent, name, packed)
        return bare.requires_grad_(False)
    bare.save_pretrained(folder)
    four = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": kind == "nf4-double"}
    options = {"load_in_8bit": True} if kind == "int8" else {"load_in_4bit": True} | four
    config = BitsAndBytesConfig(**options)
    return LlamaForCausalLM.from_pretrained(folder, quantization_config=config, device_map={"": "cpu"})


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    "kind", ["fp8", *(pytest.param(each, marks=WITH_BITSANDBYTES) for each in ("nf4", "nf4-double", "int8"))]
)
def test_a_packed_base_is_what_an_engine_takes(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import peft

    monkeypatch.setattr("ds_slide.model.carried.LEAST_BYTES", 256)  # the model is small, so its scales are
    shape = ModelShape("small", llama(**SHAPE).config, read_adapter("4"), kind)
    config = ds_config({"window": 3, "gpu_states": 0})
    planned = plan_json(shape.build(), filled(copy.deepcopy(config), None, 1)[0], ROOM)
    model = peft.get_peft_model(quantized(kind, tmp_path), peft.LoraConfig(r=4, target_modules="all-linear"))
    with engine_for(model, config) as engine:
        parts = engine.optimizer.runtime.parts
        assert planned.plan.allocations == parts.plan.allocations
        assert planned.plan.host_bytes == parts.context.memory.total_bytes


@pytest.mark.parametrize(
    ("slide", "settings", "message"),
    [
        ({"defer_updates": False}, {}, "ds_slide.defer_updates is false"),
        ({}, {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}, "bf16": None}, "torch_autocast"),
        ({}, {"optimizer": {"type": "Adagrad", "params": {"lr": 1}}}, "adagrad"),
    ],
)
def test_what_an_engine_refuses_is_refused(slide: dict[str, Any], settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SlideConfigError, match=message):
        plan_json(on_meta(), ds_config(slide, **settings), ROOM)
