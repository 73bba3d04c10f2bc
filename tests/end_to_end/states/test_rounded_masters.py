"""Compressed matrices whose masters are their bf16 weights, rounded stochastically: through DeepSpeed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from harness import LAYERS, batches, differences, ds_config, engine_for, llama, states_of, train

from ds_slide.errors import SlideConfigError, SlideError
from ds_slide.optim.reference import encode_split
from ds_slide.report.log import size

pytestmark = pytest.mark.usefixtures("one_rank", "quick_fits")

LSP: dict[str, Any] = {"type": "lsp", "d": 32, "r": 4}
# At 1e-2 what little the rounding changes has grown to 0.04 of the loss after ten steps, up or down.
FAST = {"optimizer": {"type": "AdamW", "params": {"lr": 2e-3}}}


def config(master_dtype: str, slide: dict[str, Any] | None = None, **others: Any) -> dict[str, Any]:
    return ds_config({"window": 2, "compression": LSP | {"master_dtype": master_dtype}} | (slide or {}), **others)


def small(seed: int = 0) -> Any:
    return llama(seed=seed, num_hidden_layers=2)


def compressed(model: Any) -> torch.nn.Parameter:
    return model.model.layers[0].mlp.up_proj.weight


@pytest.mark.slow
def test_it_learns_as_with_exact_masters_and_repeats() -> None:
    data = batches(1) * 12

    def run(master_dtype: str, **slide: Any) -> tuple[Any, dict[str, Any]]:
        model = llama()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("layers" in name)
        with engine_for(model, config(master_dtype, slide, **FAST)) as engine:
            result = train(engine, data)
            result.states = states_of(model, ())
            return result, engine.optimizer.slide_stats()["memory"]

    exact, of_exact = run("fp32")
    rounded, of_rounded = run("bf16")
    late, _ = run("bf16", update_passes=2, debug={"lane_delay_ms": 2.0})
    assert rounded.losses[-1] < rounded.losses[0] - 0.5
    assert rounded.losses == pytest.approx(exact.losses, abs=0.03) and rounded.losses != exact.losses
    assert not differences(rounded, late)
    numel = LAYERS * (45_440 - 128)  # all of the blocks but their norms
    assert (of_exact["rounded_masters"], of_rounded["rounded_masters"]) == (0, numel)
    assert of_exact["gpu_bytes"] - of_rounded["gpu_bytes"] == 2 * numel


def test_checkpoints_have_the_weights_as_masters(tmp_path: Path) -> None:
    model, resumed, data = small(), small(seed=1), batches(8)
    often = config("bf16", {"compression": LSP | {"master_dtype": "bf16", "check_every": 3, "threshold": 0.5}})
    often["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
    with engine_for(model, often) as engine:
        train(engine, data[:4])
        engine.save_checkpoint(tmp_path)
        assert engine.save_16bit_model(str(tmp_path), "weights.bin")
        whole = safe_get_full_fp32_param(compressed(model))
        expected = train(engine, data[4:])
        expected.states = states_of(model, ())
    name = "model.layers.0.mlp.up_proj.weight"
    assert whole is not None and torch.equal(whole, whole.bfloat16().float())
    assert torch.equal(get_fp32_state_dict_from_zero_checkpoint(str(tmp_path))[name], whole)
    assert torch.equal(torch.load(tmp_path / "weights.bin")[name], whole.bfloat16())
    with engine_for(resumed, often) as engine:
        engine.load_checkpoint(tmp_path)
        found = train(engine, data[4:])
        found.states = states_of(resumed, ())
    assert not differences(expected, found)


@pytest.mark.parametrize(("saved", "loaded"), [("fp32", "bf16"), ("bf16", "fp32")])
def test_masters_of_the_other_kind_load(
    saved: str, loaded: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Exact ones lose their low halves, so that the weights stay; those of before get zeros for them."""
    model, other = small(), small(seed=1)
    with engine_for(model, config(saved)) as engine:
        train(engine, batches(2))
        # A tie, which torch's own cast rounds down.
        safe_set_full_fp32_param(compressed(model), torch.full(compressed(model).ds_shape, 1 + 2.0**-8))
        engine.save_checkpoint(tmp_path)
        before = states_of(model, ())
    with engine_for(other, config(loaded)) as engine:
        engine.load_checkpoint(tmp_path)
        after = states_of(other, ())
    assert f"were {saved} when this checkpoint was saved, and are {loaded} now" in caplog.text
    for name, state in before.items():
        assert torch.equal(state["weight"], after[name]["weight"]), name
        rounded = loaded == "bf16" and "proj" in name
        master = encode_split(state["master"])[0].view(torch.bfloat16).float() if rounded else state["master"]
        assert torch.equal(master, after[name]["master"]), name


def test_auto_takes_what_fits(caplog: pytest.LogCaptureFixture) -> None:
    def begun(master_dtype: str, gpu_memory: int) -> tuple[int, int]:
        with engine_for(small(), config(master_dtype, {"gpu_memory": gpu_memory})) as engine:
            report = engine.optimizer.runtime.parts.memory_report
            return report["rounded_masters"], report["gpu_bytes"]

    plenty = 1 << 30
    none, exact = begun("auto", plenty)
    some, rounded = begun("bf16", plenty)
    assert (none, exact - rounded) == (0, 2 * some)
    caplog.clear()
    assert begun("auto", exact) == (0, exact) and "rounded stochastically" not in caplog.text
    assert begun("auto", exact - 1) == begun("auto", rounded) == (some, rounded)
    assert f"masters of {some:,} parameters in bf16, rounded stochastically" in caplog.text
    said = f'set ds_slide.compression.master_dtype to "bf16" ({size(exact - rounded)} less)'
    with pytest.raises(SlideError, match=re.escape(said)):
        begun("fp32", exact - 1)
    with pytest.raises(
        SlideError, match=f"need {size(rounded)}, but ds_slide.gpu_memory is {size(rounded - 1)}, 1 byte short"
    ) as refused:
        begun("auto", rounded - 1)
    assert "master_dtype" not in str(refused.value)


def test_weights_in_fp32_are_their_own_masters() -> None:
    with pytest.raises(SlideConfigError, match=r"weights in torch\.float32, which are their own masters"):
        engine_for(small(), config("bf16", bf16=None)).__enter__()
    with engine_for(small(), config("auto", bf16=None)) as engine:
        assert engine.optimizer.runtime.parts.memory_report["rounded_masters"] == 0
