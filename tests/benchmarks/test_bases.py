"""Packed bases for adapters, made one layer at a time."""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from typing import Any

import bases
import pytest
import settings
import shapes
import torch
from torch import nn

CPU = torch.device("cpu")
LAYER = "model.layers.3.mlp.gate_proj"  # 704 x 256: no whole number of fp8's tiles
# How far the layer's results may be from those of the bf16 weight, of their norm.
FARTHEST = {"bf16": 0.0, "fp8": 0.04, "int8": 0.02, "nf4": 0.12, "nf4-double": 0.12}
FARTHEST |= {"torchao-int8": 0.02, "torchao-fp8": 0.04}


def needs_library(base: str) -> list[pytest.MarkDecorator]:
    if base in ("bf16", "fp8"):
        return []
    library = "torchao" if base.startswith("torchao") else "bitsandbytes"
    missing = pytest.mark.skipif(find_spec(library) is None, reason=f"{library} is not installed")
    return [missing, pytest.mark.clients]


KINDS = [pytest.param(base, marks=needs_library(base)) for base in bases.BASES]


def linear_layers(model: Any) -> dict[str, nn.Module]:
    return {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}


def is_subclass(tensor: torch.Tensor) -> bool:
    return hasattr(tensor, "__tensor_flatten__")


def bits(tensor: Any) -> list[torch.Tensor]:
    plain = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]] if is_subclass(tensor) else [tensor]
    return [each.detach().contiguous().view(torch.uint8) for each in plain]


@pytest.mark.parametrize("base", KINDS)
def test_a_packed_base_has_the_weights_of_the_bf16_model(base: str) -> None:
    plain, model = (shapes.build_in_host_memory("tiny", CPU, 0, each) for each in ("bf16", base))
    ours, theirs = linear_layers(model), linear_layers(plain)
    assert ours.keys() == theirs.keys() and type(ours["lm_head"]) is nn.Linear
    changed = [name for name, layer in ours.items() if type(layer) is not nn.Linear or is_subclass(layer.weight)]
    assert len(changed) == (0 if base == "bf16" else len(ours) - 1)
    x = torch.randn(64, 256, dtype=torch.bfloat16)
    expected = theirs[LAYER](x)
    error = (ours[LAYER](x) - expected).norm() / expected.norm()
    assert error <= FARTHEST[base] and (error > 0 or base == "bf16")
    scales = sum(each.numel() for name, each in model.named_parameters() if name.endswith("weight_scale_inv"))
    assert bases.elements(model) - scales == bases.elements(plain) == sum(each.numel() for each in plain.parameters())


@pytest.mark.parametrize("base", KINDS)
def test_a_base_that_is_kept_elsewhere_has_the_same_bits(base: str) -> None:
    """ "cpu:0" is another device than "cpu" to the code that copies."""
    models = [
        shapes.one_by_one(shapes._without_weights("tiny"), CPU, home, 0, base) for home in (CPU, torch.device("cpu:0"))
    ]
    first, second = (model.state_dict() for model in models)
    assert first.keys() == second.keys()
    assert all(
        torch.equal(*both) for name in first for both in zip(*map(bits, (first[name], second[name])), strict=True)
    )


@pytest.mark.parametrize("base", [pytest.param(base, marks=needs_library(base)) for base in ("nf4", "nf4-double")])
def test_packed_experts_have_the_weights_of_the_bf16_model(base: str) -> None:
    plain, model = (shapes.build_in_host_memory("tiny-mixture", CPU, 0, each) for each in ("bf16", base))
    ours, theirs = (each.model.layers[2].mlp.experts for each in (model, plain))
    for name in ("gate_up_proj", "down_proj"):
        original, expected = ours.parametrizations[name].original, getattr(theirs, name)
        assert original.dtype == torch.uint8 and original.numel() == expected.numel() // 2
        error = (getattr(ours, name) - expected).norm() / expected.norm()
        assert 0 < error <= FARTHEST[base]
    assert bases.elements(model) == bases.elements(plain) == sum(each.numel() for each in plain.parameters())


def test_a_packed_base_needs_adapters() -> None:
    parser = argparse.ArgumentParser()
    settings.add_arguments(parser)
    with pytest.raises(ValueError, match="--base nf4 cannot be trained itself: add --adapter RANK"):
        settings.from_arguments(parser.parse_args(["--system", "slide", "--base", "nf4"]))
