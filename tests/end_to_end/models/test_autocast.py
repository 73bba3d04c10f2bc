"""DeepSpeed's `torch_autocast`: a model in fp32 whose linear layers compute in bf16, beside stock on the same JSON.

The weights of linear layers are kept in bf16 beside the low halves of their exact masters, the rest in fp32.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad
from harness import (
    ADAMW,
    Result,
    batches,
    differences,
    distance_of_masters,
    ds_config,
    engine_for,
    first_gradients,
    llama,
    on_ssd,
    same_bits,
    states_of,
    train,
    trained,
    unequal,
)
from torch import nn

from ds_slide.errors import SlideConfigError, SlideError
from ds_slide.integration.early import check_json

pytestmark = [pytest.mark.usefixtures("one_rank"), pytest.mark.thinned(2)]

STEPS = 8
# Of a loss around 5, as in test_parity: half a bf16 ulp of a logit. Measured: 2.8e-4.
TOLERANCE = 2.0**-9
SCHEDULES = {"clipping": (1.0, 1), "immediate": (0.0, 1), "accumulation": (1.0, 2)}
schedules = pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
SMALL_STEPS = {"type": "AdamW", "params": ADAMW | {"lr": 2e-4}}
AUTOCAST = {"enabled": True, "dtype": "bfloat16"}


def config_of(slide: dict[str, Any] | None, schedule: tuple[float, int] = (1.0, 1), **others: Any) -> dict[str, Any]:
    clip, accumulation = schedule
    if slide is not None:
        slide = {"window": 2, "cpu_threads": 1, "gpu_states": 0, **slide}
    settings = {"bf16": None, "torch_autocast": AUTOCAST, "optimizer": SMALL_STEPS, **others}
    return ds_config(slide, clip=clip, accumulation=accumulation, **settings)


def model(seed: int = 0, *, tied: bool = False) -> nn.Module:
    return llama(seed, num_hidden_layers=3, tie_word_embeddings=tied)


@functools.cache
def reference(schedule: tuple[float, int], *, slide: bool = True, tied: bool = False) -> Result:
    """Ours has all states in host memory."""
    return trained(model(tied=tied), config_of({} if slide else None, schedule), batches(STEPS * schedule[1]))


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    ("schedule", "tied"),
    [*((schedule, False) for schedule in SCHEDULES.values()), (SCHEDULES["clipping"], True)],
    ids=[*SCHEDULES, "tied"],
)
def test_losses_and_masters_are_stocks(schedule: Any, tied: bool) -> None:
    stock, slide = reference(schedule, slide=False, tied=tied), reference(schedule, tied=tied)
    assert slide.losses[: schedule[1]] == stock.losses[: schedule[1]]
    assert slide.losses == pytest.approx(stock.losses, abs=TOLERANCE)
    assert slide.norms == pytest.approx(stock.norms, rel=1e-2)
    for result in (stock, slide):
        assert {states["weight"].dtype for states in result.states.values()} == {torch.float32}
    assert distance_of_masters(slide, stock, model(tied=tied)) < 0.02


def test_first_gradients_are_stocks() -> None:
    """But for single elements: where sums of fp32 are taken in another order, and in weights that are ties."""
    stock, slide = (first_gradients(model(), config_of(slide)) for slide in (None, {}))
    for name, expected in stock.items():
        assert float((slide[name] - expected).norm()) < 5e-3 * float(expected.norm()), name
    reduced = {name: same_bits(gradient, gradient.bfloat16().float()) for name, gradient in slide.items()}
    assert reduced == {name: "proj" in name or "lm_head" in name for name in reduced}


PLACEMENTS: dict[str, dict[str, Any]] = {
    "a slot for each block": {"window": 9},
    "delays": {"debug": {"lane_delay_ms": 2.0, "seed": 1}},
    "the first states on the GPU": {"gpu_states": 300_000},
    "all states on the GPU": {"gpu_states": "1GiB"},
    "held": {"defer_updates": True},
}


@pytest.mark.slow
@schedules
@pytest.mark.parametrize("slide", PLACEMENTS.values(), ids=PLACEMENTS)
def test_placement_changes_no_bit(schedule: Any, slide: dict[str, Any]) -> None:
    found = trained(model(), config_of(slide, schedule), batches(STEPS * schedule[1]))
    assert differences(found, reference(schedule)) == []


@schedules
def test_states_on_ssd_change_no_bit(schedule: Any, disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ds_slide.plan.ssd_settings.CHUNK_NUMEL", 4096)
    own = model()
    with engine_for(own, on_ssd(config_of({"host_memory": 0}, schedule), disk)) as engine:
        assert engine.optimizer.runtime.parts.memory_report["ssd_units"] > 3
        found = train(engine, batches(STEPS * schedule[1]))
        found.states = states_of(own)
    assert differences(found, reference(schedule)) == []


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
def test_checkpointing_changes_no_bit(reentrant: bool) -> None:
    """What is recomputed in backward runs under autocast again."""
    own = model()
    own.enable_input_require_grads()
    own.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    found = trained(own, config_of({}), batches(STEPS))
    assert differences(found, reference(SCHEDULES["clipping"])) == []


def test_gradients_take_the_bytes_of_their_collectives() -> None:
    with engine_for(model(), config_of({})) as engine:
        units = {unit.name: unit for unit in engine.optimizer.runtime.units}
        blocks = [unit for unit in units.values() if unit.spec.kind == "block"]
        assert [(unit.dtype, unit.parameter_dtype) for unit in blocks] == [(torch.bfloat16, torch.float32)] * 3
        assert [[part.dtype for part in unit.parts] for unit in blocks] == [[torch.float32]] * 3
        held = {name: unit.state.dtype_of("gradient") for name, unit in units.items()}
        assert {held[unit.name] for unit in blocks} == {torch.bfloat16}
        assert {held[part.name] for unit in blocks for part in unit.parts} == {torch.float32}


def test_modules_that_are_named_are_the_only_ones() -> None:
    own = model()
    settings = {**AUTOCAST, "lower_precision_safe_modules": ["torch.nn.modules.conv.Conv1d"]}
    results = []
    for slide in (None, {}):
        results.append(trained(own if slide else model(), config_of(slide, torch_autocast=settings), batches(4)))
    assert results[1].losses == pytest.approx(results[0].losses, abs=TOLERANCE)
    with engine_for(model(), config_of({}, torch_autocast=settings)) as engine:
        assert {unit.dtype for unit in engine.optimizer.runtime.units} == {torch.float32}


def test_weights_that_a_weight_is_made_of_are_in_fp32() -> None:
    """Power iterations of the spectral norm multiply them by fp32 vectors, outside of autocast."""
    results = []
    for slide in (None, {}):
        own = model()
        for layer in own.model.layers:
            nn.utils.spectral_norm(layer.mlp.up_proj)
            nn.utils.weight_norm(layer.mlp.down_proj)
        results.append(trained(own, config_of(slide), batches(4)))
    assert results[1].losses == pytest.approx(results[0].losses, abs=TOLERANCE)


# ---- what a script sees ----------------------------------------------------------------------------------------------


def test_parameters_keep_their_values_to_the_bit() -> None:
    """Of weights that are kept in bf16, scripts read and write the masters."""
    own, start = model(), {name: p.detach().clone() for name, p in model().named_parameters()}
    with engine_for(own, config_of({})):
        named = dict(own.named_parameters())
        assert {p.dtype for name, p in named.items() if "layers" in name} == {torch.float32}
        assert all(same_bits(safe_get_full_fp32_param(p), start[name]) for name, p in named.items())
        with deepspeed.zero.GatheredParameters(list(named.values()), modifier_rank=0):
            assert all(same_bits(p.detach(), start[name]) for name, p in named.items())
            for p in named.values():
                p.data[..., 0] *= 1.1
        with deepspeed.zero.GatheredParameters(list(named.values())):
            for name, p in named.items():
                start[name][..., 0] *= 1.1
                assert same_bits(p.detach(), start[name]), name
    # The next engine takes them from this one.
    with engine_for(own, config_of({})):
        assert all(same_bits(safe_get_full_fp32_param(p), start[name]) for name, p in own.named_parameters())


def test_halves_that_went_with_an_ssd_are_missed_by_name(disk: Path) -> None:
    own = model()
    with engine_for(own, on_ssd(config_of({"host_memory": 0}), disk, "offload_optimizer")):
        pass
    with pytest.raises(SlideError, match=r"parameter \S+ has no exact weights: half of each was on the SSD"):
        deepspeed.initialize(model=own, config=config_of({}), model_parameters=list(own.parameters()))


def test_forwards_without_autocast_are_in_fp32() -> None:
    """`generate()` and whatever else calls the module, not the engine; with a backward too."""
    plain, own, batch = model(), model(), batches(1)[0]
    for name, p in plain.named_parameters():
        if "proj" in name or "lm_head" in name:
            p.data = p.data.bfloat16().float()
    expected = plain(**batch)
    expected.loss.backward()
    with engine_for(own, config_of({})) as engine:
        with torch.no_grad():
            assert engine(**batch).logits.dtype == torch.bfloat16
        found = engine.module(**batch)
        assert found.logits.dtype == torch.float32
        # A weight that is a tie is rounded up here, and half to even in `plain`.
        assert torch.allclose(found.logits, expected.logits, atol=1e-4)
        engine.backward(found.loss)
        for name, p in own.named_parameters():
            theirs = plain.get_parameter(name).grad
            assert float((safe_get_full_grad(p) - theirs).norm()) < 5e-3 * float(theirs.norm()), name
        engine.step()
        with torch.no_grad():
            tokens = engine.module.generate(
                batch["input_ids"][:, :4], max_new_tokens=3, do_sample=False, pad_token_id=0
            )
        assert tokens.shape == (2, 7)
        assert not any("weight" in vars(module) for module in own.modules())


def test_forwards_without_an_optimizer_are_stocks() -> None:
    losses = []
    for slide in (None, {}):
        own = model().requires_grad_(False)
        engine, *_ = deepspeed.initialize(model=own, config=config_of(slide, optimizer=None))
        with torch.no_grad():
            losses.append([engine(**batch).loss.item() for batch in batches(3)])
        engine.destroy()
    assert losses[0] == losses[1]


def test_frozen_parameters_stay_exact() -> None:
    results = []
    for slide in (None, {}):
        own = model()
        for name, p in own.named_parameters():
            p.requires_grad_("layers.0" not in name and "up_proj" not in name)
        results.append(trained(own, config_of(slide), batches(STEPS)))
    stock, slide = results
    assert slide.losses == pytest.approx(stock.losses, abs=TOLERANCE)
    frozen = [name for name, tensors in slide.states.items() if "master" not in tensors]
    assert "model.layers.1.mlp.up_proj.weight" in frozen
    assert all(same_bits(slide.states[name]["weight"], stock.states[name]["weight"]) for name in frozen)


def test_a_model_in_bf16_trains_under_autocast() -> None:
    results = []
    for slide in (None, {}):
        results.append(trained(model(), config_of(slide, bf16={"enabled": True}), batches(STEPS)))
    assert results[1].losses == pytest.approx(results[0].losses, abs=TOLERANCE)


# ---- checkpoints -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("saver", ["slide", "stock"])
@pytest.mark.parametrize("loader", ["slide", "stock"])
def test_checkpoints_go_both_ways(saver: str, loader: str, tmp_path: Path) -> None:
    configs = {"slide": config_of({}), "stock": config_of(None)}
    first = model()
    with engine_for(first, configs[saver]) as engine:
        train(engine, batches(2))
        saved = states_of(first)
        engine.save_checkpoint(str(tmp_path))
        following = train(engine, batches(2, seed=7))
    second = model(seed=3)
    with engine_for(second, configs[loader]) as engine:
        engine.load_checkpoint(str(tmp_path))
        assert unequal(states_of(second), saved) == []
        found = train(engine, batches(2, seed=7))
    assert found.losses == pytest.approx(following.losses, abs=TOLERANCE)
    if saver == loader:
        assert found.losses == following.losses


def test_weights_without_optimizer_states_are_the_masters(tmp_path: Path) -> None:
    first = model()
    with engine_for(first, config_of({})) as engine:
        train(engine, batches(2))
        saved = states_of(first)
        engine.save_checkpoint(str(tmp_path))
    second = model(seed=3)
    with engine_for(second, config_of({})) as engine:
        engine.load_checkpoint(str(tmp_path), load_optimizer_states=False)
        assert all(same_bits(tensors["master"], saved[name]["master"]) for name, tensors in states_of(second).items())


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "others", "sentence"),
    [
        ({"enabled": True, "dtype": "float16"}, {}, 'dtype is "float16", but DS-Slide runs autocast in bfloat16 only'),
        ({"enabled": True}, {}, r"torch_autocast\.dtype is not set"),
        (AUTOCAST, {"fp16": {"enabled": True}}, r"torch_autocast\.enabled and fp16\.enabled are both true"),
    ],
    ids=["fp16", "none", "model in fp16"],
)
def test_what_is_refused(settings: dict[str, Any], others: dict[str, Any], sentence: str) -> None:
    config = config_of({}, torch_autocast=settings, **others)
    with pytest.raises(SlideConfigError, match=sentence):
        check_json(config)
    own = model()
    with pytest.raises(SlideConfigError, match=sentence):
        deepspeed.initialize(model=own, config=config, model_parameters=list(own.parameters()))
