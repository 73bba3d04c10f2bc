"""gpt-oss in MXFP4, as its checkpoints are: widened by transformers, and packed as raw tensors. Random weights."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from fused_experts import COMMON, LAYERS
from harness import batches, differences, ds_config, engine_for, plain_training, states_of, to_bf16, train
from packed import forward_between
from safetensors.torch import save_file
from torch import nn
from torch.nn.utils.parametrize import register_parametrization

from ds_slide.errors import SlideConfigError

pytest.importorskip("peft")
pytestmark = pytest.mark.usefixtures("one_rank")
SLIDE: dict[str, Any] = {"window": 2, "gpu_states": 0}
PROJECTIONS = ("gate_up_proj", "down_proj")
EXPERTS, INNER = 4, 64


@functools.cache
def config() -> Any:
    from transformers import GptOssConfig

    own = {"intermediate_size": INNER, "num_local_experts": EXPERTS, "head_dim": 16}
    return GptOssConfig(**(COMMON | own), initial_context_length=64, dtype="bfloat16", use_cache=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with blocks of 32 numbers in 16 bytes, [experts, out, in / 32, 16], and an exponent for each."""
    from transformers import GptOssForCausalLM

    torch.manual_seed(0)
    path, saved = tmp_path_factory.mktemp("mxfp4"), {}
    for name, weight in to_bf16(GptOssForCausalLM(config())).state_dict().items():
        if name.endswith(PROJECTIONS):
            experts, into, out = weight.shape
            shape = (experts, out, into // 32)
            saved[f"{name}_blocks"] = torch.randint(256, (*shape, 16), dtype=torch.uint8)
            saved[f"{name}_scales"] = torch.randint(118, 123, shape, dtype=torch.uint8)
        else:
            saved[name] = weight.clone()
    save_file(saved, path / "model.safetensors", metadata={"format": "pt"})
    written = config().to_dict() | {"architectures": ["GptOssForCausalLM"]}
    type(config())(**written, quantization_config={"quant_method": "mxfp4"}).save_pretrained(path)
    return path


def loaded(folder: Path, **options: Any) -> Any:
    from transformers import AutoModelForCausalLM, Mxfp4Config

    widened = Mxfp4Config(dequantize=True)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, quantization_config=widened, **options)


class Widened(nn.Module):
    """A parametrization: raw blocks and scales -> a 3-D parameter of experts in bf16, by transformers' own function."""

    def __init__(self, *packed: torch.Tensor) -> None:
        super().__init__()
        self.packed = packed

    def right_inverse(self, _: torch.Tensor) -> tuple[torch.Tensor, ...]:
        packed, self.packed = self.packed, ()
        return packed

    def forward(self, blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        from transformers.integrations.mxfp4 import convert_moe_packed_tensors

        return convert_moe_packed_tensors(blocks, scales)


def packed(folder: Path) -> Any:
    """The model with its experts as in the checkpoint."""
    from safetensors import safe_open

    model = loaded(folder).requires_grad_(False)
    with safe_open(folder / "model.safetensors", "pt") as file:
        for number, layer in enumerate(model.model.layers):
            for name in PROJECTIONS:
                place = f"model.layers.{number}.mlp.experts.{name}"
                raw = [file.get_tensor(f"{place}_{part}") for part in ("blocks", "scales")]
                register_parametrization(layer.mlp.experts, name, Widened(*raw), unsafe=True)
    return model


def adapted(model: Any, *, on: Sequence[str] = (), checkpointed: bool) -> Any:
    """With adapters on attention and on these parameters of experts, by their full names."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    names = [f"model.layers.{number}.mlp.experts.{name}" for number in range(LAYERS) for name in on]
    targets = {"target_parameters": names} if on else {}
    model = get_peft_model(model, LoraConfig(r=4, init_lora_weights=False, target_modules=["q_proj"], **targets))
    if checkpointed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    return to_bf16(model).train()


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("way", ["widened", "packed"])
def test_adapters_have_the_bits_of_plain_torch(way: str, checkpointed: bool, folder: Path) -> None:
    def made() -> Any:
        base = packed(folder) if way == "packed" else loaded(folder)
        return adapted(base, on=PROJECTIONS if way == "widened" else (), checkpointed=checkpointed)

    plain, model = plain_training(made(), batches(2), 1.0, loss_of=forward_between), made()
    with engine_for(model, ds_config(SLIDE)) as engine:
        blocks = engine.optimizer.runtime.blocks
        raw = sum(entry.numel for entry in blocks[1].layout.entries if ".original" in entry.name)
        assert raw == (EXPERTS * 3 * INNER * INNER * 17 // 32 if way == "packed" else 0)
        found = train(engine, batches(2), forward_between)
        found.states = states_of(model)
    assert len(blocks) == LAYERS and differences(found, plain) == []


@pytest.mark.parametrize("name", PROJECTIONS)
def test_adapters_on_packed_experts_are_those_on_widened_ones(name: str, folder: Path) -> None:
    """In plain torch PEFT fails on the packed ones: it expects one tensor that a parametrization begins with."""
    options = {"on": [name], "checkpointed": True}
    plain = plain_training(adapted(loaded(folder), **options), batches(2), 1.0, loss_of=forward_between)
    model = adapted(packed(folder), **options)
    with engine_for(model, ds_config(SLIDE)) as engine:
        found = train(engine, batches(2), forward_between)
        found.states = states_of(model)
    for each in (plain, found):
        each.states = {key: states for key, states in each.states.items() if "master" in states}
    assert sum("experts" in key for key in found.states) == 2 * LAYERS and differences(found, plain) == []


def test_packed_experts_are_those_that_transformers_widens(folder: Path) -> None:
    ids = batches(1)[0]["input_ids"]
    with torch.no_grad():
        assert torch.equal(packed(folder)(input_ids=ids).logits, loaded(folder)(input_ids=ids).logits)


def test_weights_in_the_layout_of_kernels_are_refused() -> None:
    """They are on the GPU in objects that are no tensors, and their kernels have no backward."""
    from transformers import GptOssForCausalLM
    from transformers.integrations.mxfp4 import Mxfp4GptOssExperts

    model = to_bf16(GptOssForCausalLM(config())).requires_grad_(False)
    model.model.layers[1].mlp.experts = Mxfp4GptOssExperts(config())
    model.lm_head.requires_grad_(True)
    message = (
        r"the MXFP4 experts of model.layers.1.mlp.experts have no backward.*; load the model with "
        r"quantization_config=Mxfp4Config\(dequantize=True\)"
    )
    with pytest.raises(SlideConfigError, match=message), engine_for(model, ds_config(SLIDE)):
        pass
