"""Blocks with experts are found in the models of transformers, and no others."""

from __future__ import annotations

import pytest
from activation_runs import MODELS, layers_of
from fused_experts import SHAPES, mixture

from ds_slide.runtime.captured.checks import has_experts


@pytest.mark.parametrize("shape", SHAPES)
def test_blocks_with_experts(shape: str) -> None:
    assert any(has_experts(list(layer.modules())) for layer in layers_of(mixture(shape)))


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("name", MODELS)
def test_blocks_without(name: str) -> None:
    assert not any(has_experts(list(layer.modules())) for layer in layers_of(MODELS[name]()))
