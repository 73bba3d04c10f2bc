"""Presets have the published shapes."""

from __future__ import annotations

import runpy

import finetune_models
import pytest
import torch
from finetune_models import build_model, num_parameters

# Parameters of the released checkpoints, tied matrices counted once.
PUBLISHED = {
    "gpt2": 124_439_808,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
}


def test_every_preset_is_checked() -> None:
    # Read anew: benchmarks, which other tests import, add shapes of their own.
    presets = runpy.run_path(finetune_models.__file__)["PRESETS"]
    assert presets.keys() == PUBLISHED.keys() | {"tiny"}


@pytest.mark.parametrize("name", PUBLISHED)
def test_preset_has_the_published_size(name: str) -> None:
    model = build_model(name, dtype=torch.bfloat16, device="meta")
    assert num_parameters(model) == PUBLISHED[name]
    assert model.config.use_cache is False
    assert model.config._attn_implementation == "sdpa"
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_weights_depend_on_the_seed_alone() -> None:
    first, again, other = (
        build_model("tiny", dtype=torch.bfloat16, device="cpu", seed=seed).state_dict() for seed in (0, 0, 1)
    )
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["model.embed_tokens.weight"], other["model.embed_tokens.weight"])
