"""Deferred updates in two passes, the weights under the next forward and the states under its backward: the same bits
as in one, whoever reads in between."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from harness import Result, batches, causal_loss, differences, ds_config, engine_for, llama, on_ssd, trained

from ds_slide.plan.step_model import PASS_SHARE, UpdateTimes
from ds_slide.runtime.updates import passes
from ds_slide.runtime.updates.passes import Passes

STEPS = 4
DELAYS = {"lane_delay_ms": 3.0, "seed": 2}
# What a whole update of the same time would be, and what the two passes take.
WHOLE, TWO = 1.0, 2 * PASS_SHARE

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "usual": ({}, {}),
    "window 2": ({"window": 2}, {}),
    "a limit that always holds": ({}, {"clip": 1e-3}),
    "accumulation": ({}, {"accumulation": 2}),
    "moments in bf16": ({"state_dtype": "bf16"}, {}),
    "moments in 8 bits": ({"state_dtype": "8bit"}, {}),
    "some states on the GPU": ({"gpu_states": 1_800_000}, {}),
    # In one pass all the same: the new states of these depend on the old weight.
    "Adam with L2": (
        {},
        {"optimizer": {"type": "Adam", "params": {"lr": 1e-3, "weight_decay": 0.1, "adam_w_mode": False}}},
    ),
}


def config(slide: dict[str, Any], other: dict[str, Any], number: int, **debug: Any) -> dict[str, Any]:
    fixed = {"window": 3, "cpu_threads": 1, "gpu_states": 0, "update_passes": number, "debug": debug}
    return ds_config({**fixed, **slide}, **{"clip": 1.0, **other})


@pytest.mark.thinned(2)
@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(("slide", "other"), CASES.values(), ids=CASES)
def test_two_passes_change_no_bit(slide: dict[str, Any], other: dict[str, Any]) -> None:
    data = batches(STEPS * other.get("accumulation", 1))
    one = trained(llama(), config(slide, other, 1), data)
    assert differences(trained(llama(), config(slide, other, 2, **DELAYS), data), one) == []
    assert one.losses[-1] != one.losses[0]


@pytest.mark.usefixtures("one_rank")
def test_some_states_on_ssd_change_no_bit(tmp_path: Path) -> None:
    def run(number: int) -> Result:
        given = on_ssd(config({"host_memory": 1_000_000}, {}, number, **DELAYS), tmp_path, "offload_optimizer")
        return trained(llama(), given, batches(STEPS))

    assert differences(run(2), run(1)) == []


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("rule", "states"),
    [("AdamW", ("exp_avg", "exp_avg_sq")), ("Lion", ("exp_avg",))],
)
def test_whoever_reads_between_steps_has_the_new_states(rule: str, states: tuple[str, ...]) -> None:
    other = {"optimizer": {"type": rule, "params": {"lr": 1e-3, "weight_decay": 0.1}}}

    def read(number: int) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        model = llama()
        with engine_for(model, config({}, other, number, **DELAYS)) as engine:
            for batch in batches(STEPS):
                engine.backward(causal_loss(engine, batch))
                engine.step()
                # The last block's states come last: the first ones are still to come then.
                for parameter in list(model.model.layers[-1].parameters())[:2]:
                    found += [safe_get_full_optimizer_state(parameter, name) for name in states]
                    found.append(safe_get_full_fp32_param(parameter))
            assert engine.optimizer.slide_stats()["update_passes"] == number
            updates = {unit.completed is not unit.updated for unit in engine.optimizer.runtime.units}
            assert updates == {number == 2}
        return [tensor.clone() for tensor in found]

    assert all(torch.equal(a, b) for a, b in zip(read(1), read(2), strict=True))


@pytest.fixture
def step_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., bool]:
    """One step of so many seconds of forward, backward and update lane. -> whether the next one has two passes."""
    now = [0.0]
    monkeypatch.setattr(passes.time, "perf_counter", lambda: now[0])

    def step(of: Passes, forward: float, backward: float, update: float, **found: float) -> bool:
        began = now[0]
        with of.timed():
            now[0] += update
        now[0] = began + forward
        of.begin_backward()
        now[0] += backward
        of.begin_step(**found)  # type: ignore[arg-type]
        of.end_step()
        return of.two

    return step


# Forward and backward alone, the whole update.
@pytest.mark.parametrize(
    ("forward", "backward", "update", "two"),
    [
        (0.2, 0.45, 0.63, True),  # 3 B on 16 cores
        (0.2, 0.45, 0.15, False),  # hidden by the forward
        (0.2, 0.45, 0.185, True),
        (0.2, 0.4, 0.7, True),  # the second pass does not fit under backward, and takes less than it saves
        (0.2, 0.3, 0.7, False),
    ],
)
def test_two_where_updates_hold_up_the_forward_and_backward_has_room(
    step_of: Callable[..., bool], forward: float, backward: float, update: float, two: bool
) -> None:
    of = Passes("auto")
    decided = []
    for _ in range(6):  # each step is as long as the choice before it makes it
        before = of.two
        share = PASS_SHARE if of.two else 1.0
        took = update * (TWO if of.two else WHOLE)
        later = update * share if of.two else 0.0
        decided.append(step_of(of, max(forward, update * share), max(backward, later), took))
        assert of.did_two == before
    assert decided[1:] == [two] * 5


@pytest.mark.parametrize(("found", "two"), [({}, True), ({"reach": 0.5}, False), ({"backwards": 4}, False)])
def test_a_second_pass_is_hidden_by_one_backward_as_far_as_updates_reach(
    step_of: Callable[..., bool], found: dict[str, float], two: bool
) -> None:
    of = Passes("auto")
    assert [step_of(of, 0.6, 0.45, 0.6, **found) for _ in range(2)] == [False, two]


@pytest.mark.usefixtures("one_rank")
def test_the_forward_that_is_measured_is_that_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed calls the optimizer before each forward as before each backward."""
    forwards, backwards = list[float](), list[int]()

    def measured(_: float, forward_s: float, reach_s: float, **__: bool) -> UpdateTimes:
        forwards.append(forward_s)
        return UpdateTimes(0.0, forward_s, 0.0, reach_s)

    monkeypatch.setattr(UpdateTimes, "measured", measured)
    monkeypatch.setattr(passes, "mean_backward_s", lambda _, count: backwards.append(count) or 0.0)
    model = llama()
    model.model.norm.register_forward_pre_hook(lambda *_: time.sleep(0.05))
    with engine_for(model, config({}, {"accumulation": 2}, 1)) as engine:
        for batch in batches(6):
            engine.backward(causal_loss(engine, batch))
            engine.step()
    assert len(forwards) == 2 and 0.05 <= min(forwards) and backwards == [2, 2]


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("how", "counts"), [("overflow", [4, 2]), ("zero_grad", [2, 2, 2]), ("zero_grad before a step", [2, 2, 2])]
)
def test_backwards_that_no_step_applies_count_where_their_time_does(
    how: str, counts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mean is over all backwards since the last step that was applied, each of a second here."""
    found, now = list[tuple[float, int]](), [0.0]
    monkeypatch.setattr(passes.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(passes, "mean_backward_s", lambda *of: found.append(of) or 1.0)
    with engine_for(llama(), config({"update_passes": "auto"}, {"accumulation": 2}, 1)) as engine:
        for number, batch in enumerate(batches(8)):
            loss = causal_loss(engine, batch)
            engine.backward(loss * math.inf if how == "overflow" and number == 3 else loss)
            now[0] += 1.0
            if (how, number) in (("zero_grad", 2), ("zero_grad before a step", 3)):
                engine.optimizer.zero_grad()
            engine.step()
    assert found == [(float(count), count) for count in counts]


@pytest.mark.parametrize(
    ("found", "two"),
    [
        ({"due": 0.5, "idle_s": 1.0}, True),
        ({"due": 0.5, "idle_s": 0.4}, True),
        ({"due": 0.5, "idle_s": 0.3}, False),  # too busy for the other half of the second passes
        ({"due": 0.9, "idle_s": 1.0}, False),
        ({"due": 0.0, "idle_s": 1.0}, True),
    ],
)
def test_second_passes_that_no_backward_waits_for_need_an_idle_lane(
    step_of: Callable[..., bool], found: dict[str, float], two: bool
) -> None:
    of = Passes("auto")
    assert [step_of(of, 0.6, 0.45, 0.6, backwards=4, **found) for _ in range(2)] == [False, two]


@pytest.mark.parametrize("wanted", [1, 2])
def test_a_number_that_was_asked_for_stays(step_of: Callable[..., bool], wanted: Any) -> None:
    of = Passes(wanted)
    assert {step_of(of, forward, 1.0, 0.5) for forward in (0.1, 2.0)} == {wanted == 2}


def test_updates_that_are_whole_cannot_have_two() -> None:
    of = Passes("auto")
    may_be_two = [of.may_be_two]
    for whole in (True, False):
        of.begin_step(whole=whole)
        may_be_two.append(of.may_be_two)
    assert may_be_two == [True, False, True] and not Passes(1).may_be_two


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("rule", [{"type": "SGD", "params": {"lr": 1e-3}}, CASES["Adam with L2"][1]["optimizer"]])
def test_rules_that_have_one_pass_choose_one(rule: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the next choice would take what was measured for two."""
    monkeypatch.setattr(UpdateTimes, "two_passes_pay", True)
    ours = config({"update_passes": "auto"}, {"optimizer": rule, "zero_allow_untested_optimizer": True}, 1)
    with engine_for(llama(), ours) as engine:
        updating = engine.optimizer.runtime.parts.updating
        for batch in batches(3):
            engine.backward(causal_loss(engine, batch))
            engine.step()
            assert updating.schedules().coming == "deferred" and not updating.schedules().two
