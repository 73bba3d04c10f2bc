"""Lion and SGD through the JSON: bits of the reference in every tier, plain fp32 loops, checkpoints, refusals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.ops.lion import DeepSpeedCPULion
from deepspeed.utils import safe_get_full_optimizer_state
from harness import (
    Batch,
    Result,
    batches,
    differences,
    ds_config,
    engine_for,
    exchanged,
    llama,
    on_ssd,
    plain_training,
    states_of,
    sum_gradients_by_block,
    to_bf16,
    train,
)
from torch import nn

from ds_slide.checkpoint.state_buffers import MASTER
from ds_slide.errors import SlideConfigError, SlideError
from ds_slide.integration.contract import optimizer_choice_problems, optimizer_problems
from ds_slide.integration.update_rules import without_kernels
from ds_slide.optim.lion import LionHyper
from ds_slide.optim.rule import Hyper
from ds_slide.optim.sgd import SgdHyper

pytestmark = pytest.mark.usefixtures("one_rank")

STEPS = 4
LAYERS = 3
# The outer module of the embedding and one block.
SOME_STATES = 900_000


@dataclass(frozen=True)
class Case:
    """An optimizer of the JSON, and its step in `ds_slide.optim`."""

    type: str
    params: dict[str, Any]
    hyper: Hyper

    @property
    def keys(self) -> tuple[str, ...]:
        return self.hyper.rule.state_names

    def config(self, slide: dict[str, Any] | None, **others: Any) -> dict[str, Any]:
        optimizer = {"type": self.type, "params": self.params}
        # Stock takes torch's optimizers under ZeRO with this only; DS-Slide leaves that to it.
        return ds_config(slide, optimizer=optimizer, zero_allow_untested_optimizer=True, **others)


CASES = {
    "lion": Case(
        "Lion", {"lr": 3e-4, "betas": [0.9, 0.98], "weight_decay": 0.1}, LionHyper(3e-4, (0.9, 0.98), weight_decay=0.1)
    ),
    "sgd_momentum": Case(
        "SGD",
        {"lr": 0.05, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01},
        SgdHyper(0.05, momentum=0.9, dampening=0.1, weight_decay=0.01),
    ),
    "sgd_nesterov": Case(
        "SGD", {"lr": 0.05, "momentum": 0.8, "nesterov": True}, SgdHyper(0.05, momentum=0.8, nesterov=True)
    ),
    "sgd": Case("SGD", {"lr": 0.05}, SgdHyper(0.05, keeps_momentum=False)),
}
cases = pytest.mark.parametrize("name", CASES)


def model(seed: int = 0) -> nn.Module:
    return llama(seed, num_hidden_layers=LAYERS)


def trained(name: str, config: dict[str, Any], data: Sequence[Batch] = ()) -> Result:
    own = model()
    with engine_for(own, config) as engine:
        result = train(engine, data or batches(STEPS))
        result.states = states_of(own, CASES[name].keys)
    return result


@cache
def in_host_memory(name: str, clip: float) -> Result:
    return trained(name, CASES[name].config({"window": 2, "gpu_states": 0}, clip=clip))


@pytest.mark.by_turns(2)
@pytest.mark.parametrize("clip", [1.0, 0.0], ids=["clipping", "immediate"])
@cases
def test_the_engine_has_the_bits_of_the_reference(name: str, clip: float) -> None:
    plain = to_bf16(model())
    sum_gradients_by_block(plain.model.layers)
    expected = plain_training(plain, batches(STEPS), clip, hyper=CASES[name].hyper)
    found = in_host_memory(name, clip)
    assert differences(found, expected) == []
    assert found.losses[0] > found.losses[-1]


@pytest.mark.by_turns(2)
@pytest.mark.parametrize("clip", [1.0, 0.0], ids=["clipping", "immediate"])
@cases
def test_no_tier_changes_a_bit(name: str, clip: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ds_slide.plan.ssd_settings.CHUNK_NUMEL", 4096)
    config = CASES[name].config({"window": 2, "gpu_states": SOME_STATES}, clip=clip)
    assert differences(trained(name, config), in_host_memory(name, clip)) == []
    config = CASES[name].config({"window": 2, "host_memory": 0}, clip=clip)
    assert differences(trained(name, on_ssd(config, tmp_path)), in_host_memory(name, clip)) == []


def test_a_unit_without_any_optimizer_buffer_trains_from_ssd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """fp32 weights under SGD without momentum: their chunks on SSD hold nothing."""
    monkeypatch.setattr("ds_slide.plan.ssd_settings.CHUNK_NUMEL", 4096)
    there = on_ssd(CASES["sgd"].config({"window": 2, "host_memory": 0}, bf16=None), tmp_path)
    in_memory = CASES["sgd"].config({"window": 2}, bf16=None)
    assert differences(trained("sgd", there), trained("sgd", in_memory)) == []


def published_lion(own: nn.Module, params: dict[str, Any]) -> Callable[[], None]:
    """Algorithm 2 of arXiv 2302.06675 on the parameters of a model."""
    momenta = {parameter: torch.zeros_like(parameter) for parameter in own.parameters()}
    beta1, beta2 = params["betas"]

    @torch.no_grad()
    def step() -> None:
        for parameter, momentum in momenta.items():
            assert parameter.grad is not None
            update = (beta1 * momentum + (1 - beta1) * parameter.grad).sign()
            parameter -= params["lr"] * (update + params["weight_decay"] * parameter)
            momentum.mul_(beta2).add_(parameter.grad, alpha=1 - beta2)

    return step


@cases
def test_losses_of_a_plain_fp32_loop(name: str) -> None:
    """Without bf16 the engine's weights are fp32, and the loop differs from it by roundings only."""
    case, data, clip = CASES[name], batches(2) * 6, 1.0
    plain = model()
    if case.type == "Lion":
        step = published_lion(plain, case.params)
    else:
        step = torch.optim.SGD(plain.parameters(), **case.params).step
    losses = []
    for batch in data:
        loss = plain(**batch).loss
        plain.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), clip)
        step()
        losses.append(loss.item())
    found = trained(name, case.config({"window": 2}, clip=clip, bf16=None), data).losses
    # Lion moves a weight by lr whatever its gradient's size: one sign that turns out otherwise shows at 2 lr.
    assert found == pytest.approx(losses, rel=2e-4 if case.type == "Lion" else 1e-5)
    assert losses[0] - losses[-1] > 0.05  # it learns


def continued(engine: Any, case: Case) -> Result:
    result = train(engine, batches(2 * STEPS)[STEPS:])
    result.states = states_of(engine.module, case.keys)
    return result


@pytest.mark.by_turns(2)
@pytest.mark.parametrize("device", ["cpu", "nvme"])
@cases
def test_a_resumed_run_continues_to_the_bit(name: str, device: str, tmp_path: Path) -> None:
    case = CASES[name]
    config = case.config({"window": 2, **({"host_memory": 0} if device == "nvme" else {})})
    if device == "nvme":
        on_ssd(config, tmp_path)
    with engine_for(model(), config) as engine:
        train(engine, batches(STEPS))
        engine.save_checkpoint(tmp_path / "saved")
        expected = continued(engine, case)
    (file,) = (tmp_path / "saved").rglob("*optim_states.pt")
    saved = torch.load(file, weights_only=False)["optimizer_state_dict"]["optimizer_state_dict"]["state"]
    assert all(set(state) == {"step", *case.keys} for state in saved.values())
    with engine_for(model(7), config) as engine:
        train(engine, batches(1))  # so that there is something to forget
        engine.load_checkpoint(tmp_path / "saved")
        found = continued(engine, case)
    assert differences(found, expected) == []
    assert found.norms == expected.norms


@pytest.mark.by_turns(2)
@pytest.mark.parametrize("name", ["sgd_momentum", "sgd"])
@pytest.mark.parametrize("to_stock", [True, False], ids=["slide_to_stock", "stock_to_slide"])
def test_checkpoints_of_sgd_are_exchanged_with_stock(name: str, to_stock: bool, tmp_path: Path) -> None:
    case = CASES[name]
    slide, stock = case.config({"window": 2}), case.config(None)
    with engine_for(model(), slide if to_stock else stock) as engine:
        train(engine, batches(STEPS))
        engine.save_checkpoint(tmp_path)
        expected = Result(states=states_of(engine.module, case.keys))
        rest = train(engine, batches(2 * STEPS)[STEPS:])
    with engine_for(model(7), stock if to_stock else slide) as engine:
        engine.load_checkpoint(tmp_path)
        found = Result(states=states_of(engine.module, case.keys))
        continued_losses = train(engine, batches(2 * STEPS)[STEPS:]).losses
    assert differences(found, Result(states=exchanged(expected.states, to_stock=to_stock))) == []
    assert continued_losses == pytest.approx(rest.losses, rel=2e-3)


def test_a_checkpoint_of_another_optimizer_is_refused_by_name(tmp_path: Path) -> None:
    with engine_for(model(), ds_config({"window": 2})) as engine:
        engine.save_checkpoint(tmp_path)
    with engine_for(model(), CASES["sgd_momentum"].config({"window": 2})) as engine:
        with pytest.raises(SlideError, match=r"has no momentum_buffer, .* but exp_avg, exp_avg_sq; load it with"):
            engine.load_checkpoint(tmp_path)
        engine.load_checkpoint(tmp_path, load_optimizer_states=False)
        train(engine, batches(1))


def test_universal_checkpoints_have_no_momentum_buffer(tmp_path: Path) -> None:
    with engine_for(model(), CASES["sgd_momentum"].config({"window": 2})) as engine:
        checkpoint = engine.optimizer.universal_checkpoint(tmp_path)
        with pytest.raises(SlideError, match=r"exp_avg_sq only, but the optimizer needs momentum_buffer; load the"):
            checkpoint.check(engine.optimizer.sub_groups, 1, (MASTER, *CASES["sgd_momentum"].keys))


def test_the_plan_counts_the_states_of_the_rule() -> None:
    """Host bytes a parameter: bf16 weight, remainder, and 4 for each state."""
    taken = {}
    for name, config in (("adamw", ds_config({})), *((name, CASES[name].config({})) for name in CASES)):
        config["ds_slide"] |= {"gpu_states": 0, "window": 2}
        with engine_for(model(), config) as engine:
            runtime = engine.optimizer.runtime
            numel = sum(unit.layout.trainable_numel for unit in runtime.units)
            taken[name] = runtime.parts.memory_report["host_state_bytes"] / numel
            assert runtime.parts.memory_report["host_state_bytes"] == sum(
                unit.state.nbytes() - unit.state.buffers["gradient"].tensor.nbytes for unit in runtime.units
            )
    assert taken == {"adamw": 12, "lion": 8, "sgd_momentum": 8, "sgd_nesterov": 8, "sgd": 4}


def test_states_are_read_by_their_names() -> None:
    own = model()
    with engine_for(own, CASES["sgd_momentum"].config({"window": 2})) as engine:
        train(engine, batches(1))
        parameter = own.model.layers[0].mlp.up_proj.weight
        assert safe_get_full_optimizer_state(parameter, "momentum_buffer").any()
        with pytest.raises(SlideError, match="no optimizer state 'exp_avg'; SGD with momentum has momentum_buffer"):
            safe_get_full_optimizer_state(parameter, "exp_avg")


@pytest.mark.parametrize("name", ["lion", "sgd_momentum"])
def test_optimizers_from_the_script(name: str) -> None:
    case, own = CASES[name], model()
    if case.type == "Lion":
        with without_kernels():  # their compilation takes a minute; they are not called
            optimizer = DeepSpeedCPULion(own.parameters(), **case.params)
    else:
        optimizer = torch.optim.SGD(own.parameters(), **case.params)
    config = case.config({"window": 2, "gpu_states": 0}) | {"zero_force_ds_cpu_optimizer": False}
    del config["optimizer"]
    with engine_for(own, config, optimizer=optimizer) as engine:
        result = train(engine, batches(STEPS))
        result.states = states_of(own, case.keys)
    assert differences(result, in_host_memory(name, 1.0)) == []


def test_momentum_that_comes_later_is_refused() -> None:
    with engine_for(model(), CASES["sgd"].config({"window": 2})) as engine:
        engine.optimizer.param_groups[0]["momentum"] = 0.9
        with pytest.raises(SlideConfigError, match=r"'momentum' is 0\.9, but it was 0 in all parameter groups"):
            train(engine, batches(1))


@pytest.mark.parametrize("name", ["lion", "sgd_momentum", "sgd"])
@pytest.mark.parametrize("state_dtype", ["bf16", "8bit"])
def test_short_states_are_refused_by_name(name: str, state_dtype: str) -> None:
    words = rf'ds_slide\.state_dtype is "{state_dtype}", but {CASES[name].type}.* in fp32 only; set it to "fp32"'
    with pytest.raises(SlideConfigError, match=words):
        engine_for(model(), CASES[name].config({"state_dtype": state_dtype})).__enter__()


def test_variants_are_refused_by_name() -> None:
    parameters = [nn.Parameter(torch.zeros(2))]
    assert list(optimizer_problems(torch.optim.SGD(parameters, lr=0.1, momentum=0.9))) == []
    (problem,) = optimizer_problems(torch.optim.SGD(parameters, lr=0.1, maximize=True))
    assert problem == "maximize is true in parameter group 0, but DS-Slide does not support it; set it to false"

    class SGD(torch.optim.SGD):
        pass

    (problem,) = optimizer_problems(SGD(parameters, lr=0.1))
    assert "DS-Slide updates with Adam, Lion and SGD only; use" in problem
    (problem,) = optimizer_choice_problems("sgd", None)  # torch.optim.sgd is a module
    assert problem.endswith('only; use "adamw", "adam", "lion" or "SGD"')
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    optimizer.param_groups[0]["lr"] = float("nan")
    (problem,) = optimizer_problems(optimizer)
    assert problem.startswith("parameter group 0 of SGD cannot be used: optimizer parameter 'lr' is nan")
