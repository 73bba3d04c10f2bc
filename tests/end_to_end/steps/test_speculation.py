"""Deferred updates that begin under backward, before the norm is known: the same bits as without, whether they count or
are taken back, and whoever comes in between."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
)
from harness import (
    Batch,
    Result,
    batches,
    causal_loss,
    differences,
    ds_config,
    engine_for,
    let_run_ahead,
    llama,
    on_ssd,
    same_bits,
    states_of,
    train,
    trained,
    unequal,
)
from ssd_fault_runs import Launcher, launched
from torch import nn

from ds_slide.runtime.core.futures import Future
from ds_slide.store.way_back import SLICE

STEPS = 6
DELAYS = {"lane_delay_ms": 3.0, "seed": 2}
# Norms of these models are between 2.0 and 3.3.
ALWAYS, NEVER, SOMETIMES = 1e3, 1e-3, 2.2
SPARE, LOGS = {"out_of_place": True}, {"out_of_place": False}
SGD = {"type": "SGD", "params": {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.1}}
LION = {"type": "Lion", "params": {"lr": 1e-3, "weight_decay": 0.1}}
ADAM_L2 = {"type": "Adam", "params": {"lr": 1e-3, "weight_decay": 0.1, "adam_w_mode": False}}
STATES = {"SGD": ("momentum_buffer",), "Lion": ("exp_avg",)}

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "below the limit": ({}, {"clip": ALWAYS}),
    "above the limit": ({}, {"clip": NEVER}),
    "across the limit": ({}, {"clip": SOMETIMES}),
    "window 2": ({"window": 2}, {"clip": SOMETIMES}),
    "all blocks in slots": ({"window": 6}, {"clip": SOMETIMES}),
    "accumulation": ({}, {"clip": SOMETIMES, "accumulation": 2}),
    "moments in bf16": ({"state_dtype": "bf16"}, {"clip": SOMETIMES}),
    "moments in 8 bits": ({"state_dtype": "8bit"}, {"clip": SOMETIMES}),
    "some states on the GPU": ({"gpu_states": 1_800_000}, {"clip": SOMETIMES}),
    "Lion": ({}, {"clip": SOMETIMES, "optimizer": LION}),
    "SGD": ({}, {"clip": SOMETIMES, "optimizer": SGD, "zero_allow_untested_optimizer": True}),
    "Adam with L2": ({}, {"clip": SOMETIMES, "optimizer": ADAM_L2}),
}
# Each across the limit, so with updates that count and with some that are taken back.
QUICK_CASES = ("accumulation", "moments in 8 bits", "SGD")


@pytest.fixture(autouse=True)
def several_runs_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ds_slide.plan.allocations.UNDO_RUN", 2 * SLICE)


def config(
    slide: dict[str, Any], other: dict[str, Any], speculate: Any, passes: Any = "auto", **debug: Any
) -> dict[str, Any]:
    fixed = {"window": 3, "cpu_threads": 1, "gpu_states": 0, "speculate": speculate, "update_passes": passes}
    return ds_config({**fixed, "debug": debug, **slide}, **{"clip": ALWAYS, **other})


def trained_with_pauses(engine: Any, data: list[Batch]) -> Result:
    """`train`, in which all updates that can be done before the step are."""
    result = Result()
    for batch in data:
        loss = causal_loss(engine, batch)
        engine.backward(loss)
        let_run_ahead(engine)
        boundary = engine.is_gradient_accumulation_boundary()
        engine.step()
        result.losses.append(loss.item())
        if boundary:
            result.norms.append(float(engine.get_global_grad_norm() or 0.0))
    return result


def run(
    given: dict[str, Any], data: list[Batch], make: Callable[[], nn.Module] = llama
) -> tuple[Result, dict[str, Any]]:
    """-> what training left, and the statistics."""
    rule = given.get("optimizer", {}).get("type")
    with engine_for(make(), given) as engine:
        if given["ds_slide"]["debug"].get("lane_delay_ms"):
            found = train(engine, data)
        else:
            found = trained_with_pauses(engine, data)
        found.states = states_of(engine.module, STATES.get(rule, ("exp_avg", "exp_avg_sq")))
        return found, engine.optimizer.slide_stats()["speculation"]


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("slide", "other"),
    [
        pytest.param(*case, id=name, marks=() if name in QUICK_CASES else pytest.mark.slow)
        for name, case in CASES.items()
    ],
)
def test_speculation_changes_no_bit(slide: dict[str, Any], other: dict[str, Any]) -> None:
    data = batches(STEPS * other.get("accumulation", 1))
    held, none = run(config(slide, other, speculate=False), data)
    assert not any(none.values())
    half = {"take_back": 0.5, "passes": 2}
    for way_back, debug in ((SPARE, {}), (LOGS, DELAYS), (SPARE, {"take_back": 1.0}), (LOGS, half), (SPARE, half)):
        found, speculation = run(config(slide, other, speculate=True, **way_back, **debug), data)
        assert differences(found, held) == []
        bitten = sum(norm > other["clip"] for norm in found.norms)
        if debug != DELAYS:  # nothing else keeps the updates from being begun
            assert speculation["steps"] == STEPS
            in_vain = debug.get("take_back", 0.0)
            assert speculation["taken_back"] == (STEPS if in_vain == 1.0 else bitten) or in_vain == 0.5


def frozen() -> nn.Module:
    """Its first two blocks and some of the others' weights do not train."""
    model = llama()
    for layer in model.model.layers[:2]:
        layer.requires_grad_(requires_grad=False)
    for layer in model.model.layers[2:4]:
        layer.mlp.gate_proj.requires_grad_(requires_grad=False)
    return model


def of_two_dtypes() -> nn.Module:
    """Blocks with a part in another data type."""
    model = llama().bfloat16()
    for layer in model.model.layers:
        layer.input_layernorm.float()
    return model


class _Nothing(nn.Module):
    def forward(self, hidden_states: torch.Tensor, **_others: Any) -> torch.Tensor:
        return hidden_states


class Skipping(nn.Module):
    """A Llama that leaves out a block in every other forward, which is then fetched in backward for nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.llama = llama()
        self.forwards = itertools.count()

    def forward(self, **batch: torch.Tensor) -> Any:
        layers = self.llama.model.layers
        left_out, first = next(self.forwards) % 2, layers[0]
        if left_out:
            layers[0] = _Nothing()
        try:
            return self.llama(**batch)
        finally:
            layers[0] = first


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("make", [frozen, of_two_dtypes, Skipping])
def test_of_models_that_train_in_part_or_have_parts(make: Callable[[], nn.Module]) -> None:
    data = batches(STEPS)
    held, _ = run(config({}, {"clip": SOMETIMES}, speculate=False), data, make)
    for way_back in (SPARE, LOGS):
        found, speculation = run(config({}, {"clip": SOMETIMES}, speculate=True, **way_back, **DELAYS), data, make)
        assert differences(found, held) == []
        assert speculation["steps"]


@pytest.mark.usefixtures("one_rank")
def test_a_limit_that_changes_and_gradients_that_overflow() -> None:
    def of(speculate: bool) -> Result:
        with engine_for(llama(), config({}, {}, speculate)) as engine:
            found = Result()
            for number, batch in enumerate(batches(STEPS)):
                loss = causal_loss(engine, batch)
                engine.backward(loss * (float("inf") if number == 2 else 1.0))
                engine.optimizer.clip_grad = (ALWAYS, NEVER)[number % 2]  # after the updates have begun
                engine.step()
                found.losses.append(loss.item())
            found.states = states_of(engine.module)
            return found

    assert differences(of(speculate=True), of(speculate=False)) == []


@pytest.mark.usefixtures("one_rank")
def test_gradients_with_a_loss_scale_are_expected_to_have_it() -> None:
    """fp16 is for GPUs, but the scale is the same in any data type."""

    def of(speculate: bool) -> tuple[Result, dict[str, Any]]:
        with engine_for(llama(), config({}, {}, speculate)) as engine:
            engine.optimizer.loss_scaler.cur_scale = 1024.0
            found = trained_with_pauses(engine, batches(STEPS))
            found.states = states_of(engine.module)
            return found, engine.optimizer.slide_stats()["speculation"]

    (found, speculation), (held, _) = of(speculate=True), of(speculate=False)
    assert differences(found, held) == []
    assert max(found.norms) < 4.0
    assert (speculation["steps"], speculation["taken_back"]) == (STEPS, 0)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("way_back", [SPARE, LOGS], ids=["spare", "logs"])
def test_a_loss_scale_that_overflows_while_blocks_are_ahead(
    way_back: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With fp16's own scaler, which lowers the scale and skips the step."""
    monkeypatch.setattr(get_accelerator(), "is_fp16_supported", lambda: True)  # slow on a CPU, but it works
    scaling = {"enabled": True, "initial_scale_power": 17, "hysteresis": 1, "loss_scale_window": 2}
    ahead: list[bool] = []

    def of(speculate: bool) -> tuple[Result, list[float]]:
        given = config({}, {"bf16": None, "fp16": scaling}, speculate, **way_back)
        with engine_for(llama(), given) as engine:
            placement, found, scales = engine.optimizer.runtime.parts.plan.placement, Result(), []
            assert bool(placement.spare_states) == (speculate and way_back["out_of_place"])
            for batch in batches(2 * STEPS):
                loss = causal_loss(engine, batch)
                engine.backward(loss)
                let_run_ahead(engine)
                runtime, skipped = engine.optimizer.runtime, engine.skipped_steps
                begun = any(map(runtime.parts.updating.speculating.of, runtime.units))
                engine.step()
                ahead.append(begun and engine.skipped_steps > skipped)
                scales.append(engine.optimizer.loss_scaler.cur_scale)
                found.losses.append(loss.item())
            found.states = states_of(engine.module)
            return found, scales

    (found, scales), (held, expected) = of(speculate=True), of(speculate=False)
    assert differences(found, held) == []
    assert scales == expected
    assert any(ahead[: 2 * STEPS])


# What comes between backward and step, and must meet the bits of before.


def read(_engine: Any, model: nn.Module, _batch: Batch) -> list[torch.Tensor]:
    found = []
    for layer in model.model.layers:
        parameter = next(layer.parameters())
        found += [safe_get_full_optimizer_state(parameter, name) for name in ("exp_avg", "exp_avg_sq")]
        found += [safe_get_full_fp32_param(parameter), safe_get_full_grad(parameter)]
        with deepspeed.zero.GatheredParameters([parameter]):
            found.append(parameter.detach().clone())
    return found


def write(_engine: Any, model: nn.Module, _batch: Batch) -> list[torch.Tensor]:
    first, last = (next(model.model.layers[number].parameters()) for number in (0, -1))
    safe_set_full_grad(first, torch.full_like(safe_get_full_grad(first), 1e-3))
    safe_set_full_fp32_param(last, torch.zeros_like(safe_get_full_fp32_param(last)))
    return []


def evaluate(engine: Any, _model: nn.Module, batch: Batch) -> list[torch.Tensor]:
    with torch.no_grad():
        return [causal_loss(engine, batch)]


def begin_anew(engine: Any, _model: nn.Module, batch: Batch) -> list[torch.Tensor]:
    engine.optimizer.zero_grad()
    engine.backward(causal_loss(engine, batch))
    return []


def go_backward_again(engine: Any, _model: nn.Module, batch: Batch) -> list[torch.Tensor]:
    engine.backward(causal_loss(engine, batch))
    return []


def go_through_the_graph_again(engine: Any, _model: nn.Module, _batch: Batch) -> list[torch.Tensor]:
    engine.backward(engine.last_loss)
    return []


def fail(engine: Any, model: nn.Module, batch: Batch) -> list[torch.Tensor]:
    """A backward that has sent off some gradients ends with an exception."""

    def stop(_gradient: torch.Tensor) -> None:
        raise RuntimeError("on purpose")

    engine.optimizer.zero_grad()
    handle = model.model.layers[1].register_full_backward_hook(lambda *_: stop(_[1]))
    with pytest.raises(RuntimeError, match="on purpose"):
        engine.backward(causal_loss(engine, batch))
    handle.remove()
    engine.backward(causal_loss(engine, batch))
    return []


@pytest.mark.by_turns(2)
@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("way_back", [SPARE, LOGS], ids=["spare", "logs"])
@pytest.mark.parametrize(
    "between", [read, write, evaluate, begin_anew, go_backward_again, go_through_the_graph_again, fail]
)
def test_whoever_comes_before_the_step_meets_the_old_bits(
    between: Callable[..., list[torch.Tensor]], way_back: dict[str, Any]
) -> None:
    def of(speculate: bool) -> tuple[list[torch.Tensor], Result]:
        model, seen, result = llama(), [], Result()
        model.model.embed_tokens.requires_grad_(requires_grad=False)  # backward is not announced to the first block
        with engine_for(model, config({}, {}, speculate, **way_back)) as engine:
            for batch, other in itertools.pairwise(batches(STEPS)):
                engine.last_loss = causal_loss(engine, batch)
                engine.backward(engine.last_loss, retain_graph=True)
                if speculate:  # as far as this can be before the norm is known
                    let_run_ahead(engine)
                seen += [tensor.clone() for tensor in between(engine, model, other)]
                engine.step()
            result.states = states_of(model)
        return seen, result

    (found, left), (expected, held) = of(speculate=True), of(speculate=False)
    assert all(itertools.starmap(same_bits, zip(found, expected, strict=True)))
    assert differences(left, held) == []


@pytest.mark.usefixtures("one_rank")
def test_a_slot_that_was_filled_meanwhile_is_filled_again() -> None:
    def of(speculate: bool) -> list[float]:
        with engine_for(Skipping(), config({}, {}, speculate)) as engine:
            runtime, data = engine.optimizer.runtime, batches(3)
            train(engine, data[:1])
            engine.backward(causal_loss(engine, data[1]))  # without the first block, which is fetched all the same
            let_run_ahead(engine)
            runtime.parts.window.prefetch(None, "forward")  # as late as a lane that is slow
            runtime.parts.context.lanes.h2d.drain()
            return [loss.item() for loss in evaluate(engine, engine.module, data[2])]

    assert of(speculate=True) == of(speculate=False)


@pytest.mark.usefixtures("one_rank")
def test_a_way_back_that_is_interrupted_is_gone_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C where a notebook goes on: some updates have been taken back, others have not."""
    with engine_for(llama(), config({}, {}, speculate=True)) as engine:
        runtime, data = engine.optimizer.runtime, batches(3)
        train(engine, data[:2])
        old = states_of(engine.module)
        engine.backward(causal_loss(engine, data[2]))
        let_run_ahead(engine)
        taken_back, calls = runtime.parts.updating.speculating._taken_back, itertools.count()

        def interrupted(speculation: Any) -> Future:
            if next(calls) == 3:
                raise KeyboardInterrupt
            return taken_back(speculation)

        monkeypatch.setattr(runtime.parts.updating.speculating, "_taken_back", interrupted)
        with pytest.raises(KeyboardInterrupt):
            evaluate(engine, engine.module, data[2])
        assert unequal(states_of(engine.module), old) == []


@pytest.mark.usefixtures("one_rank")
def test_a_backward_that_nobody_announced() -> None:
    """What the coming step will be is not known there."""
    data = batches(STEPS)
    with engine_for(llama(), config({}, {}, speculate=True)) as engine:
        engine.module(**data[0]).loss.backward()
        engine.optimizer.zero_grad()
        found = train(engine, data)
        found.states = states_of(engine.module)
    assert differences(found, trained(llama(), config({}, {}, speculate=False), data)) == []


@pytest.mark.usefixtures("one_rank")
def test_an_engine_that_ends_before_the_step_leaves_the_old_weights() -> None:
    model = llama()
    with engine_for(model, config({}, {}, speculate=True)) as engine:
        train(engine, batches(2))
        for unit in engine.optimizer.runtime.units:
            engine.optimizer.runtime.access.settle(unit)
        old = [parameter.ds_tensor.clone() for parameter in model.model.layers.parameters()]
        engine.backward(causal_loss(engine, batches(1)[0]))
        let_run_ahead(engine)
    now = [parameter.ds_tensor for parameter in model.model.layers.parameters()]
    assert all(itertools.starmap(same_bits, zip(now, old, strict=True)))


@pytest.mark.usefixtures("one_rank")
def test_a_checkpoint_before_the_step_resumes_with_the_old_bits(tmp_path: Path) -> None:
    data = batches(STEPS)

    def of(speculate: bool) -> Result:
        folder = str(tmp_path / str(speculate))
        given = config({}, {"clip": SOMETIMES}, speculate)
        with engine_for(llama(), given) as engine:
            train(engine, data[:3])
            engine.backward(causal_loss(engine, data[3]))
            if speculate:
                let_run_ahead(engine)
            engine.save_checkpoint(folder)
        with engine_for(llama(seed=7), given) as engine:
            engine.load_checkpoint(folder)
            result = train(engine, data[3:])
            result.states = states_of(engine.module)
        return result

    expected = trained(llama(), config({}, {"clip": SOMETIMES}, speculate=False), data)
    for speculate in (True, False):
        found = of(speculate)
        found.losses = expected.losses[:3] + found.losses
        assert differences(found, expected) == []


@pytest.fixture(scope="module")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launcher]:
    yield from launched(tmp_path_factory.mktemp("runs"), "ahead_worker.py")


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    ("way_back", "instant", "count"),
    [
        (SPARE, "ds_slide.runtime.updates.speculation:Speculation.run", 4),
        (SPARE, "ds_slide.store.way_back:SpareBuffers.exchange", 3),
        (LOGS, "ds_slide.runtime.updates.speculation:Speculation.end", 3),
        (LOGS, "ds_slide.runtime.updates.speculation:Speculation.take_back", 2),
    ],
)
def test_a_run_that_is_killed_while_blocks_are_ahead_resumes(
    launcher: Launcher, tmp_path: Path, way_back: dict[str, Any], instant: str, count: int
) -> None:
    saves, slide = str(tmp_path / "saves"), {"speculate": True, "debug": {"lane_delay_ms": 1.0, **way_back}}
    whole = launcher.run(["start", {"speculate": False}], ["train", 5], ["digest", "end"])
    killed = launcher.begin(
        ["start", slide], ["train", 2], ["save", saves, "tag"], ["at", instant, count, "kill", 9], ["train", 3]
    )
    assert killed.end() == -9
    assert killed.result["interrupted"] == instant
    resumed = launcher.run(["start", slide], ["load", saves], ["train", 3], ["digest", "end"])
    assert resumed["digests"] == whole["digests"]


@pytest.mark.usefixtures("one_rank")
def test_a_partition_that_a_script_keeps_follows_its_block() -> None:
    """ZeRO-3's `ds_tensor`, in whatever memory the block is after a step out of place."""
    model = llama()
    with engine_for(model, config({}, {}, speculate=True, **SPARE)) as engine:
        kept = [parameter.ds_tensor for parameter in model.model.layers.parameters()]
        places = [engine.optimizer.protocol.places[parameter] for parameter in model.model.layers.parameters()]
        before = [tensor.data_ptr() for tensor in kept]
        for step in range(2):
            trained_with_pauses(engine, batches(1, seed=step))
            for (unit, entry), tensor, address in zip(places, kept, before, strict=True):
                engine.optimizer.runtime.access.settle(unit)
                assert same_bits(tensor, unit.state.read("weight", entry.place))
                assert (tensor.data_ptr() == address) == bool(step)


@pytest.mark.usefixtures("one_rank")
def test_blocks_with_states_on_ssd_wait_for_the_norm(tmp_path: Path) -> None:
    def of(speculate: bool) -> tuple[Result, int]:
        given = config({"host_memory": 2_000_000}, {"clip": SOMETIMES}, speculate)
        with engine_for(llama(), on_ssd(given, tmp_path, "offload_optimizer")) as engine:
            found = trained_with_pauses(engine, batches(STEPS))
            found.states = states_of(engine.module)
            placement = engine.optimizer.runtime.parts.plan.placement
            assert placement.on_ssd and not placement.on_ssd & placement.ways_back
            assert len(placement.ways_back) == engine.optimizer.slide_stats()["speculation"]["blocks"]
            return found, len(placement.ways_back)

    (found, logs), (held, none) = of(speculate=True), of(speculate=False)
    assert differences(found, held) == []
    assert logs and not none


@pytest.mark.usefixtures("one_rank")
def test_auto_begins_after_calm_steps_and_ends_with_a_norm_above_the_limit() -> None:
    with engine_for(llama(), config({}, {}, "auto")) as engine:
        runtime, seen = engine.optimizer.runtime, []
        for number, batch in enumerate(batches(12)):
            runtime.parts.updating.passes.exceed_forward = True
            engine.optimizer.clip_grad = NEVER if number == 5 else ALWAYS
            engine.backward(causal_loss(engine, batch))
            seen.append(any(map(runtime.parts.updating.speculating.of, runtime.units)))
            engine.step()
    assert seen == [False] * 4 + [True] * 2 + [False] * 4 + [True] * 2
