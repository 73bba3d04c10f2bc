"""Training with compressed gradients, through DeepSpeed."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
)
from harness import (
    batches,
    differences,
    ds_config,
    engine_for,
    exchanged,
    llama,
    on_ssd,
    same_bits,
    states_of,
    to_bf16,
    train,
    unequal,
)
from permutations import between_permutations
from torch import nn

from ds_slide.checkpoint.compressed import NAME
from ds_slide.compression.lsp import codec
from ds_slide.errors import SlideConfigError, SlideError
from ds_slide.runtime.core.update import Update

pytestmark = pytest.mark.usefixtures("one_rank")

STEPS = 4
LSP: dict[str, Any] = {"type": "lsp", "d": 32, "r": 4}
BLOCKS = 6


def trained(
    slide: dict[str, Any],
    data: list[Any],
    frozen: Callable[[str], bool] | None = None,
    blocks: int = BLOCKS,
    **others: Any,
) -> tuple[Any, dict[str, Any]]:
    """A training, and the statistics of its last step."""
    model = llama(num_hidden_layers=blocks)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(frozen is None or not frozen(name))
    with engine_for(model, ds_config({"window": 2, "gpu_states": 0, **slide}, **others)) as engine:
        result = train(engine, data)
        result.states = states_of(model, ())
        return result, engine.optimizer.slide_stats()


@pytest.fixture
def permutations(monkeypatch: pytest.MonkeyPatch) -> None:
    between_permutations(monkeypatch)


@pytest.mark.usefixtures("permutations")
def test_states_may_be_on_ssd(tmp_path: Path) -> None:
    data, slide = batches(STEPS), {"compression": LSP | {"d": 64, "r": 1, "check_every": 2}}
    expected, _ = trained(slide, data)
    disk = on_ssd(ds_config(None), tmp_path)["zero_optimization"]
    found, statistics = trained(slide | {"host_memory": 0}, data, zero_optimization=disk)
    assert not differences(expected, found)
    assert statistics["memory"]["ssd_bytes"] > 0


@pytest.mark.usefixtures("permutations")
@pytest.mark.parametrize(
    ("slide", "others"),
    [
        pytest.param({}, {}, marks=pytest.mark.slow),  # as in the test above
        ({}, {"clip": 0.0}),
        ({}, {"accumulation": 4}),
        ({"update_passes": 2}, {}),
        ({"state_dtype": "fp32", "debug": {"lane_delay_ms": 2.0}}, {}),
    ],
)
def test_between_permutations_it_is_exact(slide: dict[str, Any], others: dict[str, Any]) -> None:
    data = batches(STEPS * others.get("accumulation", 1))
    expected, _ = trained(slide, data, **others)
    compressed = {"compression": LSP | {"d": 64, "r": 1, "check_every": 2}}
    found, statistics = trained(slide | compressed, data, **others)
    assert not differences(expected, found)
    assert statistics["compression"]["refits"] == STEPS // 2 * 6 * 2  # q and o of six blocks
    assert expected.norms == found.norms


@pytest.mark.slow
@pytest.mark.usefixtures("quick_fits")
def test_blocks_learn_and_move_less() -> None:
    data, fast = batches(1) * 12, {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}
    _, exactly = trained({}, data[:2], outside_the_blocks)
    found, compressed = trained({"compression": LSP}, data, outside_the_blocks, **fast)
    again, _ = trained({"compression": LSP}, data, outside_the_blocks, **fast)
    assert not differences(found, again)
    assert found.losses[-1] < found.losses[0] - 0.3
    # 128 numbers of a block go down as they are; a matrix as 32 x 32, those of k and v as 16 x 16.
    assert exactly["lanes"]["d2h"]["bytes"] == BLOCKS * 2 * 45_440
    assert compressed["lanes"]["d2h"]["bytes"] == BLOCKS * 2 * (128 + 5 * 32 * 32 + 2 * 16 * 16)


@pytest.mark.usefixtures("quick_fits")
def test_projectors_are_fitted_when_they_lose_too_much() -> None:
    data = batches(1) * STEPS

    def run(**how: Any) -> tuple[Any, dict[str, Any]]:
        result, statistics = trained({"compression": LSP | how}, data, outside_the_blocks, blocks=2)
        return result, statistics["compression"]

    random, never = run(check_every=2)
    fitted, always = run(check_every=2, threshold=0.0)
    assert (never["checks"], never["refits"]) == (2 * 2, 0)
    assert (always["checks"], always["refits"]) == (2 * 2, 2 * 2 * 7)
    assert always["bias"].keys() == never["bias"].keys() >= {"self_attn.q_proj", "mlp.down_proj"}
    assert all(always["bias"][kind] < min(1.0, never["bias"][kind]) for kind in never["bias"])
    # The first fit serves the second step, and fits that begin with other numbers end with others.
    assert fitted.losses[:2] == random.losses[:2] and fitted.losses[2:] != random.losses[2:]
    assert not differences(fitted, run(check_every=2, threshold=0.0)[0])
    assert differences(fitted, run(check_every=2, threshold=0.0, seed=1)[0])


def outside_the_blocks(name: str) -> bool:
    return "layers" not in name


@pytest.mark.slow
def test_four_micro_batches_are_near_one_of_their_size() -> None:
    data = batches(4 * STEPS)
    starts = range(0, len(data), 4)
    together = [{name: torch.cat([each[name] for each in data[i : i + 4]]) for name in data[0]} for i in starts]
    accumulated, _ = trained({"compression": LSP}, data, accumulation=4)
    whole, _ = trained({"compression": LSP}, together, train_micro_batch_size_per_gpu=8)
    assert accumulated.norms == pytest.approx(whole.norms, rel=0.02)
    began = {
        name: parameter.detach() for name, parameter in to_bf16(llama(num_hidden_layers=BLOCKS)).named_parameters()
    }
    for name, state in whole.states.items():
        moved = (state["master"] - began[name]).norm()
        assert (accumulated.states[name]["master"] - state["master"]).norm() < 0.3 * moved


@pytest.mark.parametrize(
    ("slide", "others", "said"),
    [
        ({"async_save": True}, {}, "async_save is true"),
        ({}, {"bf16": None, "fp16": {"enabled": True}}, "fp16.enabled is true"),
        (
            {},
            {"bf16": None, "torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
            "torch_autocast.enabled is true",
        ),
        ({}, {"optimizer": {"type": "Lion", "params": {"lr": 1e-3}}}, "the optimizer is Lion"),
        ({}, {"optimizer": {"type": "Adam", "params": {"lr": 1e-3, "adam_w_mode": False}}}, "Adam with L2"),
        ({"compression": LSP | {"d": 8}}, {}, "ds_slide.compression.d is 8; expected"),
        ({"compression": LSP | {"type": "topk"}}, {}, 'ds_slide.compression.type is "topk"; expected "lsp"'),
        ({"compression": {"d": 32}}, {}, 'ds_slide.compression.type is null; expected "lsp"'),
    ],
)
def test_it_is_refused_by_name(slide: dict[str, Any], others: dict[str, Any], said: str) -> None:
    with pytest.raises(SlideConfigError, match=re.escape(said)):
        with engine_for(llama(), ds_config({"compression": LSP, **slide}, **others)):
            pass


def test_a_state_in_a_subspace_is_no_parameters_own() -> None:
    model = llama(num_hidden_layers=2)
    with engine_for(model, ds_config({"compression": LSP})) as engine:
        engine.backward(engine(**batches(1)[0]).loss)
        compressed, exact = model.model.layers[0].mlp.up_proj.weight, model.model.layers[0].input_layernorm.weight
        assert safe_get_full_grad(exact) is not None
        with pytest.raises(SlideError, match=r"the gradient of model.layers.0 \(compressed\) is in the subspace"):
            safe_get_full_grad(compressed)
        engine.step()
        with pytest.raises(SlideError, match="the optimizer state of"):
            safe_get_full_optimizer_state(compressed, "exp_avg")


@pytest.mark.usefixtures("quick_fits")
@pytest.mark.parametrize("slide", [pytest.param({}, marks=pytest.mark.slow), {"state_dtype": "8bit"}])
def test_a_resumed_run_has_the_same_bits(slide: dict[str, Any], tmp_path: Path) -> None:
    data, resumed = batches(6), llama(seed=1, num_hidden_layers=2)
    config = ds_config({"window": 2, "compression": LSP | {"check_every": 2, "threshold": 0.0}, **slide})
    model = llama(num_hidden_layers=2)
    with engine_for(model, config) as engine:
        train(engine, data[:3])
        engine.save_checkpoint(tmp_path)
        expected = train(engine, data[3:])
        expected.states = states_of(model, ())
    with engine_for(resumed, config) as engine:
        engine.load_checkpoint(tmp_path)
        found = train(engine, data[3:])
        found.states = states_of(resumed, ())
        with pytest.raises(SlideError, match=f"has no {re.escape(NAME)}"):
            (tmp_path / "global_step3" / NAME).unlink()
            (tmp_path / "global_step3" / "ds_slide_manifest.json").unlink()
            engine.load_checkpoint(tmp_path)
    assert not differences(expected, found)


def test_others_load_the_weights_alone(tmp_path: Path) -> None:
    config = ds_config({"window": 2, "compression": LSP})
    model, exact, stock = (llama(seed, num_hidden_layers=2) for seed in range(3))
    with engine_for(model, config) as engine:
        train(engine, batches(2))
        engine.save_checkpoint(tmp_path)
        expected = states_of(model, ())
    with engine_for(exact, ds_config({"window": 2})) as engine:
        with pytest.raises(SlideError, match=r"was saved with ds_slide\.compression"):
            engine.load_checkpoint(tmp_path)
        engine.load_checkpoint(tmp_path, load_optimizer_states=False)
        weights = {name: {"weight": state["weight"]} for name, state in states_of(exact, ()).items()}
        assert not unequal({name: {"weight": state["weight"]} for name, state in expected.items()}, weights)
    with engine_for(stock, ds_config(None)) as engine:
        engine.load_checkpoint(tmp_path)
        assert not unequal(exchanged(expected, to_stock=True), states_of(stock, ()))
        assert not safe_get_full_optimizer_state(stock.model.layers[0].mlp.up_proj.weight, "exp_avg").any()


@pytest.mark.usefixtures("quick_fits")
def test_a_step_that_is_not_taken_checks_nothing() -> None:
    """Its gradients are not finite; those of the next one are looked at."""
    model = llama(num_hidden_layers=2)
    with engine_for(model, ds_config({"compression": LSP | {"check_every": 100, "threshold": 0.0}})) as engine:
        before = states_of(model, ())
        for step, batch in enumerate(batches(3)):
            loss = engine(**batch).loss
            engine.backward(loss * float("inf") if step == 0 else loss)
            engine.step()
            checks = engine.optimizer.runtime.parts.learning.statistics()["checks"]
            assert checks == (2, 4, 4)[step]
            if step == 0:
                assert engine.optimizer.overflow and not unequal(before, states_of(model, ()))


def test_weights_that_a_script_writes_are_the_masters() -> None:
    model = llama(num_hidden_layers=2)
    with engine_for(model, ds_config({"compression": LSP})) as engine:
        train(engine, batches(1))
        weight, other = model.model.layers[0].mlp.up_proj.weight, model.model.layers[1].mlp.up_proj.weight
        exact = torch.randn(other.ds_shape)
        safe_set_full_fp32_param(other, exact)
        with deepspeed.zero.GatheredParameters([weight], modifier_rank=0):
            weight.data.fill_(0.5)
        assert (safe_get_full_fp32_param(weight) == 0.5).all()
        assert same_bits(safe_get_full_fp32_param(other), exact)
        train(engine, batches(1))
        moved = (safe_get_full_fp32_param(weight) - 0.5).abs()
        assert 0 < moved.max() < 0.1


class Skipping(nn.Module):
    """Leaves its last block out of every forward but the first."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(3))
        self.used = 3

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in list(self.layers)[: self.used]:
            x = x + layer(x)
        self.used = 2
        return x.float().square().mean()


def test_a_block_is_checked_when_it_is_used() -> None:
    """For the first time, not in the first step, in which it has no gradient to be fitted to."""
    model, x, checks = Skipping(), torch.randn(2, 64).bfloat16(), []
    with engine_for(model, ds_config({"compression": LSP})) as engine:
        for model.used in (2, 2, 3, 3):
            train(engine, [x], lambda engine, x: engine(x))
            checks.append(engine.optimizer.runtime.parts.learning.statistics()["checks"])
    assert checks == [2, 2, 3, 3]


def test_a_change_is_applied_before_the_next_one_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    updates: list[str] = []
    second, last = threading.Event(), "layers.2 (compressed)"
    finish, apply = Update.finish, codec.Lsp.apply

    def finished(update: Any, index: int) -> None:
        finish(update, index)
        updates.append(update.done.what)
        if updates.count(f"the update of {last}") == 2:
            second.set()

    def applied_late(own: codec.Lsp, *arguments: Any) -> int:
        if own.layout.entries[0].name.startswith("layers.2") and not second.is_set():
            second.wait(1.0)  # for what must not come before this has gone on
        return apply(own, *arguments)

    def run() -> Any:
        torch.manual_seed(0)
        model, x = Skipping(), torch.randn(2, 64).bfloat16()
        with engine_for(model, ds_config({"compression": LSP})) as engine:
            result = train(engine, [x] * 2, lambda engine, x: engine(x))
            result.states = states_of(model, ())
            return result

    expected = run()
    monkeypatch.setattr(Update, "finish", finished)
    monkeypatch.setattr(codec.Lsp, "apply", applied_late)
    assert not differences(expected, run())
    assert second.is_set()
