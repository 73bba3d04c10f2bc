"""Adapters of PEFT on linear layers: what is replaced, what a call computes, and when PEFT's own forward runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import DEVICE, build
from torch import nn

from ds_slide.kernels.lora import low_rank
from ds_slide.patching.apply import apply_kernels

peft = pytest.importorskip("peft")

PROJECTIONS = ["q_proj", "v_proj", "down_proj"]


def adapted(dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """A model of two layers with adapters, whose B has random numbers: PEFT's are zero."""
    config = peft.LoraConfig(**{"r": 4, "lora_alpha": 6, "target_modules": PROJECTIONS, **options})
    model = peft.get_peft_model(build("qwen2"), config).to(DEVICE, dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.2)
    return model


def tokens() -> torch.Tensor:
    return torch.arange(1, 13, device=DEVICE).view(2, 6)


def logits_and_gradients(model: nn.Module) -> list[torch.Tensor]:
    model.zero_grad(set_to_none=True)
    torch.manual_seed(7)
    logits = model(input_ids=tokens()).logits
    logits.float().square().mean().backward()
    return [logits.detach(), *(each.grad for each in model.parameters() if each.grad is not None)]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The scalings of the products that the kernel has added."""
    found: list[float] = []
    added_to = low_rank.LowRank.added_to

    def noted(self: low_rank.LowRank, result: torch.Tensor) -> torch.Tensor:
        found.append(self.scaling)
        return added_to(self, result)

    monkeypatch.setattr(low_rank.LowRank, "added_to", noted)
    return found


@pytest.mark.parametrize(
    ("dtype", "options", "tolerance"),
    [
        (torch.float32, {}, 1e-5),
        (torch.float32, {"use_rslora": True, "r": 5}, 1e-5),
        (torch.float32, {"lora_dropout": 0.3}, 1e-5),
        (torch.bfloat16, {}, 3e-2),
    ],
    ids=["plain", "rank stabilised", "dropout", "bf16"],
)
def test_a_step_is_that_of_peft(
    dtype: torch.dtype, options: dict[str, Any], tolerance: float, launched: list[float]
) -> None:
    model = adapted(dtype, **options)
    expected = logits_and_gradients(model)
    replaced = apply_kernels(model, ["lora"])
    assert dict(replaced.counts) == {"lora": 6} and not replaced.reasons
    found = logits_and_gradients(model)
    assert len(launched) == 6 and len(found) == len(expected) == 13
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() <= tolerance * other.norm()
    replaced.undo()
    assert all(torch.equal(*each) for each in zip(logits_and_gradients(model), expected, strict=True))


def _disabled(model: Any) -> None:
    model.base_model.disable_adapter_layers()


def _merged(model: Any) -> None:
    model.merge_adapter()


def _two(model: Any) -> None:
    model.add_adapter("other", peft.LoraConfig(r=2, target_modules=PROJECTIONS))
    model.base_model.set_adapter(["default", "other"])


def _hooked(model: Any) -> None:
    for name, module in model.named_modules():
        if name.endswith("lora_B.default"):
            module.register_forward_hook(lambda _module, _inputs, output: 2 * output)


def _widened(model: Any) -> None:
    for name, module in model.named_modules():
        if name.endswith(("lora_A", "lora_B")):
            module.double()


@pytest.mark.parametrize("change", [_disabled, _merged, _two, _hooked, _widened])
def test_what_the_kernel_does_not_compute_runs_as_peft_has_it(
    change: Callable[[Any], None], launched: list[float]
) -> None:
    model = adapted()
    apply_kernels(model, ["lora"])
    change(model)
    found = model(input_ids=tokens()).logits
    other = adapted()
    change(other)
    other.load_state_dict(model.state_dict())
    torch.testing.assert_close(found, other(input_ids=tokens()).logits)
    assert not launched


@pytest.mark.parametrize("options", [{"use_dora": True}, {"lora_bias": True}, {"r": low_rank.LARGEST_RANK + 1}])
def test_other_kinds_of_adapters_run_as_peft_has_them(options: dict[str, Any], launched: list[float]) -> None:
    model = adapted(**options)
    expected = logits_and_gradients(model)
    apply_kernels(model, ["lora"])
    assert all(torch.equal(*each) for each in zip(logits_and_gradients(model), expected, strict=True))
    assert not launched


def test_an_adapter_that_is_added_and_switched_to_is_the_one_that_counts(launched: list[float]) -> None:
    model = adapted()
    apply_kernels(model, ["lora"])
    model.add_adapter("other", peft.LoraConfig(r=2, lora_alpha=16, target_modules=PROJECTIONS))
    model.set_adapter("other")
    model(input_ids=tokens())
    assert launched == 6 * [8.0]


def test_under_autocast_peft_computes(launched: list[float]) -> None:
    model = adapted()
    apply_kernels(model, ["lora"])
    with torch.autocast(DEVICE, torch.bfloat16):
        model(input_ids=tokens())
    assert not launched


def test_a_base_that_returns_another_data_type_is_added_to_by_peft(launched: list[float]) -> None:
    layer = adapted(torch.bfloat16).base_model.model.model.layers[0].mlp.down_proj
    layer.base_layer.register_forward_hook(lambda _module, _inputs, output: output.float())
    x = torch.randn(2, 6, layer.in_features, device=DEVICE).bfloat16()
    expected = layer(x)
    apply_kernels(layer, ["lora"])
    assert torch.equal(layer(x), expected) and expected.dtype == torch.float32 and not launched


def test_adapters_of_embeddings_are_no_candidates() -> None:
    model = adapted(target_modules=["embed_tokens"])
    replaced = apply_kernels(model, ["lora"])
    assert dict(replaced.counts) == {}
    assert dict(replaced.reasons) == {"lora": "the model has no adapters of PEFT on linear layers"}


def test_a_layer_that_computes_something_else_stays() -> None:
    class Halved(peft.tuners.lora.Linear):  # type: ignore[name-defined, misc]
        def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            return super().forward(x, *args, **kwargs) / 2

    model = adapted()
    for module in list(model.modules()):
        if type(module) is peft.tuners.lora.Linear:
            module.__class__ = Halved
    replaced = apply_kernels(model, ["lora"])
    assert dict(replaced.counts) == {}
    assert "Halved computes something else than base(x) + scaling * B(A(x))" in replaced.reasons["lora"]


def test_a_model_without_adapters_says_nothing_unless_asked() -> None:
    model = build("qwen2")
    assert "lora" not in apply_kernels(model, "auto").reasons
    assert "no adapters" in apply_kernels(model, ["lora"]).reasons["lora"]
