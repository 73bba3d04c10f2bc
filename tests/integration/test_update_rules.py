"""Lion through the JSON: bits of the reference in every tier, plain fp32 loops, checkpoints, refusals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.ops.lion import DeepSpeedCPULion
from harness import (
    Batch,
    PlainAdamW,
    Result,
    batches,
    differences,
    ds_config,
    engine_for,
    llama,
    states_of,
    sum_gradients_by_block,
    to_bf16,
    train,
)
from torch import nn

from ds_slide.errors import SlideConfigError
from ds_slide.integration.bare_optimizers import without_kernels
from ds_slide.optim.lion import LionHyper
from ds_slide.optim.rule import Hyper

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


@cases
@pytest.mark.parametrize("clip", [1.0, 0.0], ids=["clipping", "immediate"])
def test_the_engine_has_the_bits_of_the_reference(name: str, clip: float) -> None:
    plain = to_bf16(model())
    sum_gradients_by_block(plain.model.layers)
    optimizer = PlainAdamW(plain, clip, hyper=CASES[name].hyper)
    expected = Result()
    for batch in batches(STEPS):
        loss = plain(**batch).loss
        loss.backward()
        expected.norms.append(optimizer.step())
        expected.losses.append(loss.item())
    expected.states = optimizer.states()
    found = in_host_memory(name, clip)
    assert differences(found, expected) == []
    assert found.losses[0] > found.losses[-1]


@cases
@pytest.mark.parametrize("clip", [1.0, 0.0], ids=["clipping", "immediate"])
def test_no_tier_changes_a_bit(name: str, clip: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ds_slide.integration.ssd_settings.CHUNK_NUMEL", 4096)
    config = CASES[name].config({"window": 2, "gpu_states": SOME_STATES}, clip=clip)
    assert differences(trained(name, config), in_host_memory(name, clip)) == []
    config = CASES[name].config({"window": 2, "host_memory": 0}, clip=clip)
    nvme = {"device": "nvme", "nvme_path": str(tmp_path)}
    config["zero_optimization"] |= {"offload_param": nvme, "offload_optimizer": nvme}
    assert differences(trained(name, config), in_host_memory(name, clip)) == []


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
    step = published_lion(plain, case.params)
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
    assert found == pytest.approx(losses, rel=2e-4)
    assert losses[0] - losses[-1] > 0.05  # it learns


def continued(engine: Any, case: Case) -> Result:
    result = train(engine, batches(2 * STEPS)[STEPS:])
    result.states = states_of(engine.module, case.keys)
    return result


@cases
@pytest.mark.parametrize("device", ["cpu", "nvme"])
def test_a_resumed_run_continues_to_the_bit(name: str, device: str, tmp_path: Path) -> None:
    case = CASES[name]
    config = case.config({"window": 2, **({"host_memory": 0} if device == "nvme" else {})})
    if device == "nvme":
        nvme = {"device": "nvme", "nvme_path": str(tmp_path)}
        config["zero_optimization"] |= {"offload_param": nvme, "offload_optimizer": nvme}
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
                unit.state.nbytes() - unit.state.gradient.nbytes for unit in runtime.units
            )
    assert taken == {"adamw": 12, "lion": 8}


@cases
def test_optimizers_from_the_script(name: str) -> None:
    case, own = CASES[name], model()
    with without_kernels():  # their compilation takes a minute; they are not called
        optimizer = DeepSpeedCPULion(own.parameters(), **case.params)
    config = case.config({"window": 2, "gpu_states": 0}) | {"zero_force_ds_cpu_optimizer": False}
    del config["optimizer"]
    with engine_for(own, config, optimizer=optimizer) as engine:
        result = train(engine, batches(STEPS))
        result.states = states_of(own, case.keys)
    assert differences(result, in_host_memory(name, 1.0)) == []


@pytest.mark.parametrize("name", ["lion"])
@pytest.mark.parametrize("state_dtype", ["bf16", "8bit"])
def test_short_states_are_refused_by_name(name: str, state_dtype: str) -> None:
    words = rf'ds_slide\.state_dtype is "{state_dtype}", but {CASES[name].type}.* in fp32 only; set it to "fp32"'
    with pytest.raises(SlideConfigError, match=words):
        engine_for(model(), CASES[name].config({"state_dtype": state_dtype})).__enter__()
