"""PEFT's adapters on models that transformers has quantised with bitsandbytes, in the documented order, beside plain
torch. See `test_packed` for where these tests run."""

from __future__ import annotations

import importlib
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from harness import batches, differences, ds_config, engine_for, llama, plain_training, states_of, train
from packed import SHAPE, forward_between
from torch import nn

from ds_slide.errors import SlideConfigError, SlideError
from ds_slide.model.carried import packed_tensors

pytest.importorskip("bitsandbytes")
pytest.importorskip("peft")
pytestmark = [pytest.mark.usefixtures("one_rank"), pytest.mark.clients]


@pytest.fixture(autouse=True)
def small_tensors_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """The models are small, so tensors beside their packed weights are."""
    monkeypatch.setattr("ds_slide.model.carried.LEAST_BYTES", 256)


WINDOW = {"window": 3, "gpu_states": 0}
NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.bfloat16}
BASES: dict[str, dict[str, Any]] = {
    "nf4": NF4,
    "nf4 double": NF4 | {"bnb_4bit_use_double_quant": True},
    "nf4 in bf16": NF4 | {"bnb_4bit_quant_storage": torch.bfloat16},
    "fp4": NF4 | {"bnb_4bit_quant_type": "fp4"},
    "int8": {"load_in_8bit": True},
}
EXPERTS = {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
# Base, whether it is a mixture of experts, whether it is checkpointed, and settings of the adapter.
CASES: dict[str, tuple[str, bool, bool, dict[str, Any]]] = {
    "lora": ("nf4", False, True, {}),
    "dora": ("nf4 double", False, True, {"use_dora": True}),
    "modules_to_save": ("fp4", False, False, {"modules_to_save": ["lm_head"]}),
    "storage": ("nf4 in bf16", False, False, {"use_rslora": True}),
    "int8": ("int8", False, True, {}),
    "experts": ("nf4", True, False, EXPERTS),
    "packed experts": ("nf4 double", True, True, {"target_modules": ["q_proj", "v_proj"]}),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """A dense model and a mixture of experts (fused, 3-D), saved in bf16."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    folder = tmp_path_factory.mktemp("bases")
    llama(0, **SHAPE).bfloat16().save_pretrained(folder / "dense")
    sizes = {"vocab_size": 256, "hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 64}
    sizes |= {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    config = Qwen3MoeConfig(**sizes, num_experts=8, num_experts_per_tok=2, use_cache=False)
    Qwen3MoeForCausalLM(config).bfloat16().save_pretrained(folder / "mixture")
    return {False: folder / "dense", True: folder / "mixture"}


def base_of(name: str, path: Path) -> nn.Module:
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    quantization = BitsAndBytesConfig(**BASES[name])
    model: nn.Module = AutoModelForCausalLM.from_pretrained(
        path, quantization_config=quantization, device_map={"": "cpu"}, dtype=torch.bfloat16
    )
    return model


def adapted(case: str, saved: dict[bool, Path]) -> nn.Module:
    from bitsandbytes.nn.parametrize import replace_parameter_4bit
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training

    base, mixture, checkpointed, options = CASES[case]
    model = base_of(base, saved[mixture])
    if case == "packed experts":
        for layer in model.model.layers:
            for name in ("gate_up_proj", "down_proj"):
                replace_parameter_4bit(layer.mlp.experts, name, compress_statistics=True)
    model = prepare_model_for_kbit_training(
        model,
        use_gradient_checkpointing=checkpointed,
        gradient_checkpointing_kwargs={"use_reentrant": False},
    )
    torch.manual_seed(3)
    settings = {"r": 4, "target_modules": ["q_proj", "v_proj", "down_proj"], "init_lora_weights": False} | options
    return get_peft_model(model, LoraConfig(**settings)).train()


def cast(model: nn.Module) -> nn.Module:
    """As DeepSpeed does it with `bf16.enabled`."""
    for parameter in model.parameters():
        if parameter.dtype == torch.float32:
            parameter.data = parameter.data.bfloat16()
    return model


@pytest.mark.parametrize("case", CASES)
def test_losses_and_states_are_plain_torchs(case: str, saved: dict[bool, Path]) -> None:
    plain = plain_training(cast(adapted(case, saved)), batches(2), 1.0, loss_of=forward_between)
    model = adapted(case, saved)
    with engine_for(model, ds_config(WINDOW)) as engine:
        if case == "packed experts":  # 8 experts of 64 x 128 x 3
            places = {entry.name: entry.numel for entry in engine.optimizer.runtime.blocks[2].layout.entries}
            packed = [numel for name, numel in places.items() if "experts.parametrizations" in name]
            beside = [each.name for each in engine.optimizer.runtime.blocks[2].spec.carried if "experts" in each.name]
            assert sum(packed) == 8 * 64 * 128 * 3 // 2 and len(beside) == 4
        found = train(engine, batches(2), forward_between)
        found.states = states_of(model)
    assert differences(found, plain) == []


@pytest.fixture
def packed_experts(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module `examples/packed_experts.py`."""
    monkeypatch.syspath_prepend(Path(__file__).parents[3] / "examples")
    return importlib.import_module("packed_experts")


def packed_mixture(path: Path, packed_experts: Any) -> Any:
    from transformers import AutoModelForCausalLM

    options = {"device_map": {"": "cpu"}, "dtype": torch.bfloat16}
    return AutoModelForCausalLM.from_pretrained(
        path, quantization_config=packed_experts.PackedExpertsConfig(), **options
    )


def widened_mixture(path: Path, packed_experts: Any) -> Any:
    """The same numbers, with experts in bf16."""
    model, packed = base_of("nf4 double", path), dict(packed_mixture(path, packed_experts).named_modules())
    for place, module in model.named_modules():
        for name in ("gate_up_proj", "down_proj"):
            if name in module._parameters:
                module._parameters[name].data = getattr(packed[place], name).detach()
    return model


def test_experts_are_packed_while_the_checkpoint_is_loaded(saved: dict[bool, Path], packed_experts: Any) -> None:
    """By `examples/packed_experts.py`, one expert after the other: as bitsandbytes packs a whole parameter."""
    from bitsandbytes.nn.parametrize import replace_parameter_4bit

    found = packed_mixture(saved[True], packed_experts)
    expected: Any = base_of("nf4 double", saved[True])
    for layer in expected.model.layers:
        for name in ("gate_up_proj", "down_proj"):
            replace_parameter_4bit(layer.mlp.experts, name, compress_statistics=True)
    mine, others = dict(found.named_parameters()), dict(expected.named_parameters())
    assert mine.keys() == others.keys() and all(torch.equal(mine[name], others[name]) for name in others)
    for name in ("gate_up_proj", "down_proj"):
        path = f"model.layers.2.mlp.experts.parametrizations.{name}"
        beside = [list(packed_tensors(model.get_submodule(path))) for model in (found, expected)]
        assert len(beside[1]) == 5 and all(map(torch.equal, *beside))


@pytest.mark.parametrize("targets", [EXPERTS["target_parameters"], EXPERTS["target_parameters"][:1]])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_adapters_on_packed_experts_are_those_on_widened_ones(
    checkpointed: bool, targets: list[str], saved: dict[bool, Path], packed_experts: Any, tmp_path: Path
) -> None:
    """In plain torch PEFT fails on the packed ones in the second forward. What was trained is saved, and read on a base
    whose experts are in bf16."""
    from peft import LoraConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training

    def made(base: Any) -> Any:
        model = prepare_model_for_kbit_training(
            base, use_gradient_checkpointing=checkpointed, gradient_checkpointing_kwargs={"use_reentrant": False}
        )
        torch.manual_seed(3)
        settings = LoraConfig(r=4, init_lora_weights=False, **(EXPERTS | {"target_parameters": targets}))
        with packed_experts.as_parameters(model):
            return get_peft_model(model, settings).train()

    plain = plain_training(
        cast(made(widened_mixture(saved[True], packed_experts))), batches(2), 1.0, loss_of=forward_between
    )
    model = made(packed_mixture(saved[True], packed_experts))
    with engine_for(model, ds_config(WINDOW)) as engine:
        found = train(engine, batches(2), forward_between)
        found.states = states_of(model)
        engine.eval()
        with torch.no_grad():
            logits = engine(**batches(1)[0]).logits
        with deepspeed.zero.GatheredParameters([p for p in model.parameters() if p.requires_grad]):
            model.save_pretrained(tmp_path)
        with pytest.raises(SlideError, match=r"the adapter on \w+_proj cannot be merged, because the packed weight is"):
            model.merge_and_unload()
    for each in (plain, found):
        each.states = {name: states for name, states in each.states.items() if "master" in states}
    assert sum("experts" in name for name in found.states) == 4 * 2 * len(targets)
    assert differences(found, plain) == []
    offline = cast(PeftModel.from_pretrained(widened_mixture(saved[True], packed_experts), tmp_path)).eval()
    for module in offline.modules():  # bitsandbytes has another multiplication for evaluations on some CPUs
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    with torch.no_grad():
        assert torch.equal(offline(**batches(1)[0]).logits, logits)


def test_packed_experts_that_peft_has_not_found_are_refused(saved: dict[bool, Path], packed_experts: Any) -> None:
    """PEFT says nothing, because `q_proj` was found."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(packed_mixture(saved[True], packed_experts), LoraConfig(r=4, **EXPERTS))
    message = (
        r"target_parameters has mlp\.experts\.\w+_proj, but PEFT has put no adapter on model\.layers\.0\.mlp\.experts\."
        r"\w+_proj, because it is packed; call get_peft_model inside of as_parameters"
    )
    with pytest.raises(SlideConfigError, match=message), engine_for(model, ds_config(WINDOW)):
        pass


@pytest.mark.parametrize(("kind", "checkpointed"), [("Int8", False), ("Int8", True), ("Float8", True)])
def test_torchaos_subclasses_have_the_losses_and_adapters_of_plain_torch(
    kind: str, checkpointed: bool, saved: dict[bool, Path], tmp_path: Path
) -> None:
    """The engine takes them apart, so that their names are others, and adapters are merged on a fresh base."""
    quantization = pytest.importorskip("torchao.quantization")
    from peft import LoraConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training
    from transformers import AutoModelForCausalLM, TorchAoConfig

    def base() -> nn.Module:
        packed = TorchAoConfig(getattr(quantization, f"{kind}WeightOnlyConfig")())
        options = {"device_map": {"": "cpu"}, "dtype": torch.bfloat16}
        return AutoModelForCausalLM.from_pretrained(saved[False], quantization_config=packed, **options)

    def made() -> Any:
        model = prepare_model_for_kbit_training(
            base(),
            use_gradient_checkpointing=checkpointed,
            gradient_checkpointing_kwargs={"use_reentrant": False},
        )
        torch.manual_seed(3)
        settings = {"r": 4, "target_modules": ["q_proj", "v_proj", "down_proj"], "init_lora_weights": False}
        return get_peft_model(model, LoraConfig(**settings)).train()

    whole, model = cast(made()), made()
    plain = plain_training(whole, batches(2), 1.0, loss_of=forward_between)
    tokens = torch.arange(1, 9)[None]
    with engine_for(model, ds_config(WINDOW)) as engine:
        found = train(engine, batches(2), forward_between)
        found.states = states_of(model)
        generated = model.eval().generate(input_ids=tokens, max_new_tokens=8, do_sample=False)
        with deepspeed.zero.GatheredParameters([p for p in model.parameters() if p.requires_grad]):
            model.save_pretrained(tmp_path)
        refuses_to_merge(model)
    refuses_to_merge(model)
    for each in (plain, found):
        each.states = {name: states for name, states in each.states.items() if "master" in states}
    assert differences(found, plain) == []
    offline = cast(PeftModel.from_pretrained(base(), tmp_path)).eval()
    assert torch.equal(offline.generate(input_ids=tokens, max_new_tokens=8, do_sample=False), generated)
    merged, expected = (dict(each.merge_and_unload().named_parameters()) for each in (offline, whole))
    assert merged.keys() == expected.keys()
    assert sum(hasattr(each, "__tensor_flatten__") for each in merged.values()) == 5 * 7
    for name, weight in expected.items():
        assert type(merged[name]) is type(weight) and torch.equal(numbers(merged[name]), numbers(weight)), name


def numbers(weight: Any) -> torch.Tensor:
    return weight.dequantize() if hasattr(weight, "__tensor_flatten__") else weight


def refuses_to_merge(model: Any) -> None:
    """Whether its weights are here or not, and it says the way out. Nothing has changed then."""
    message = (
        r"the adapter on .*_proj cannot be merged, .*; save the adapters, load them on a fresh base, and merge there"
    )
    for here in (nullcontext(), deepspeed.zero.GatheredParameters(list(model.parameters()))):
        with here, pytest.raises(SlideError, match=message):
            model.merge_and_unload()
    assert not any(getattr(layer, "merged", False) for layer in model.modules())


def test_adapters_resume_generate_save_and_merge(saved: dict[bool, Path], tmp_path: Path) -> None:
    from peft import PeftModel

    model, tokens = adapted("lora", saved), torch.arange(1, 9)[None]
    with engine_for(model, ds_config(WINDOW)) as engine:
        train(engine, batches(1))
        engine.save_checkpoint(tmp_path / "checkpoint")
        expected = train(engine, batches(3)[1:])
        expected.states = states_of(model)
    model = adapted("lora", saved)
    with engine_for(model, ds_config(WINDOW)) as engine:
        engine.load_checkpoint(tmp_path / "checkpoint", load_module_strict=False)
        found = train(engine, batches(3)[1:])
        found.states = states_of(model)
        assert differences(found, expected) == []
        model.eval()
        generated = model.generate(input_ids=tokens, max_new_tokens=8, do_sample=False)
        with deepspeed.zero.GatheredParameters([p for p in model.parameters() if p.requires_grad]):
            model.save_pretrained(tmp_path / "adapter")
        with deepspeed.zero.GatheredParameters(list(model.parameters())):
            merged = {name: p.detach().clone() for name, p in model.merge_and_unload().named_parameters()}
    offline = cast(PeftModel.from_pretrained(base_of("nf4", saved[False]), tmp_path / "adapter")).eval()
    for module in offline.modules():  # bitsandbytes has another multiplication for evaluations on some CPUs
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    assert torch.equal(offline.generate(input_ids=tokens, max_new_tokens=8, do_sample=False), generated)
    for name, parameter in offline.merge_and_unload().named_parameters():
        assert torch.equal(parameter, merged[name]), name
