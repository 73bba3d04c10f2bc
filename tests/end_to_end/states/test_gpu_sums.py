"""Gradients of units whose states are not on the GPU are added up there: the same bits, and one copy down a step."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from adapters import adapted
from allocated import counted
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import safe_get_full_grad, safe_set_full_grad
from harness import (
    Result,
    batches,
    causal_loss,
    differences,
    ds_config,
    engine_for,
    llama,
    on_ssd,
    same_bits,
    states_of,
    train,
    unequal,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from interrupting import Client, Interrupt, Model
from moving import RandomSums, movable, promote, sum_on_gpu, summable
from torch import nn

from ds_slide.runtime.core.lanes import UpdateWorker
from ds_slide.runtime.gradients import route
from ds_slide.runtime.memory.tier_moves import RunningStates

pytestmark = pytest.mark.usefixtures("one_rank")

DELAYS = {"lane_delay_ms": 2.0, "seed": 4}
FP32_SUMS = {"data_types": {"grad_accum_dtype": "fp32"}}


Case = tuple[dict[str, Any], dict[str, Any], Callable[[], nn.Module]]
CASES: dict[str, Case] = {
    # slide, settings of DeepSpeed, model
    "two": ({}, {"accumulation": 2}, llama),
    "four, delays": ({"window": 2, "debug": DELAYS}, {"accumulation": 4}, llama),
    "no clipping": ({"defer_updates": True}, {"accumulation": 2, "clip": 0.0}, llama),
    "in fp32": ({"debug": DELAYS}, {"accumulation": 3, **FP32_SUMS}, llama),
    "fp32": ({}, {"accumulation": 2, "bf16": None}, llama),
    "fp16": ({}, {"accumulation": 2, "bf16": None, "fp16": {"enabled": True, "loss_scale": 128.0}}, llama),
    "two passes": ({"update_passes": 2, "debug": DELAYS}, {"accumulation": 2}, llama),
    "speculative": ({"speculate": True, "debug": DELAYS}, {"accumulation": 2, "clip": 1e6}, llama),
    "adapters in fp32": (
        {},
        {"accumulation": 2},
        functools.partial(adapted, trained=("input_layernorm", "lm_head")),
    ),
    "all on SSD": ({"host_memory": 0, "debug": DELAYS}, {"accumulation": 3}, llama),
    "all on SSD, in fp32": ({"host_memory": 0}, {"accumulation": 2, **FP32_SUMS}, llama),
    "streamed head": ({"stream_head": True}, {"accumulation": 2}, llama),
}


def config(slide: dict[str, Any] | None = None, **others: Any) -> dict[str, Any]:
    return ds_config({"cpu_threads": 1, "gpu_states": 0, **(slide or {})}, **others)


# Each beside another case of its kind.
SLOW_CASES = ("no clipping", "fp32", "two passes", "adapters in fp32", "all on SSD, in fp32")


@pytest.mark.parametrize(
    ("slide", "others", "make"),
    [
        pytest.param(*case, id=name, marks=pytest.mark.slow if name in SLOW_CASES else ())
        for name, case in CASES.items()
    ],
)
def test_sums_change_no_bit(
    slide: dict[str, Any],
    others: dict[str, Any],
    make: Callable[[], nn.Module],
    disk: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(get_accelerator(), "is_fp16_supported", lambda: True)  # slow on a CPU, but it works
    accumulation = others["accumulation"]
    data, sums = batches(4 * accumulation), RandomSums(len(slide))

    def run(loss_of: Any) -> Result:
        ours = config(slide, **others)
        with engine_for(model := make(), on_ssd(ours, disk) if "host_memory" in slide else ours) as engine:
            result = train(engine, data, loss_of)
            result.states = states_of(model)
        return result

    assert differences(run(sums), run(causal_loss)) == []
    assert len(sums.made) == 4 and any(sums.made)


def test_a_sum_goes_down_once_a_step() -> None:
    """Of a unit with a sum the lanes move the gradient once, and the CPU adds nothing."""
    data = batches(16)
    with engine_for(llama(), config(accumulation=4)) as engine:
        runtime = engine.optimizer.runtime
        units = sum(unit.codec.nbytes for unit in runtime.units)

        def moved() -> tuple[int, float]:
            lanes = engine.optimizer.slide_stats()["lanes"]
            return lanes["d2h"]["bytes"], lanes["update"]["holding_s"]

        train(engine, data[:8])
        before, held = moved()
        sum_on_gpu(runtime, *summable(runtime))
        train(engine, data[8:])
        assert (before, moved()) == (4 * units, (units, 0.0)) and held > 0


@pytest.mark.parametrize("tier", ["host", "ssd"])
def test_every_byte_is_in_the_plan(tier: str, disk: Path) -> None:
    ours = config({} if tier == "host" else {"host_memory": 0}, accumulation=2)
    with counted() as count, engine_for(llama(), on_ssd(ours, disk) if tier == "ssd" else ours) as engine:
        runtime = engine.optimizer.runtime
        start = runtime.parts.memory_report
        for orders in ((0, 1), tuple(summable(runtime)), (2,), ()):
            train(engine, batches(2))
            assert sum_on_gpu(runtime, *orders) is not None
            assert count.difference(engine) == []
            memory, sums = runtime.parts.memory_report, [runtime.units[order].codec.nbytes for order in orders]
            assert memory["gpu_bytes"] == start["gpu_bytes"] + sum(sums)
            assert memory["summed_units"] == len(orders)
        promote(runtime, *movable(runtime))
        sum_on_gpu(runtime, *summable(runtime))
        assert runtime.parts.memory_report["summed_units"] == len(summable(runtime))
        assert count.difference(engine) == []
        promote(runtime)
        sum_on_gpu(runtime)
        assert runtime.parts.memory_report == start


@pytest.mark.parametrize("place", ["forward", "backward"])
def test_sums_that_make_room_change_no_bit(place: str) -> None:
    """In the second micro-batch of an accumulation, one after the other, as a shortage asks for them."""
    data, freed = batches(8), list[int]()

    def run(*, gives_up: bool) -> Result:
        with engine_for(model := llama(), config({"debug": DELAYS}, accumulation=4)) as engine:
            runtime = engine.optimizer.runtime
            sum_on_gpu(runtime, *summable(runtime))
            states = RunningStates(runtime)

            def give_up(*_: Any) -> None:
                if gives_up and runtime.accumulation.micro_batches == 1:
                    freed.append(states.give_up_sum())

            for layer in model.model.layers:
                if place == "forward":
                    layer.register_forward_hook(give_up)
                else:
                    layer.mlp.register_full_backward_hook(give_up)
            result = train(engine, data)
            result.states = states_of(model)
            left = sum(unit.gradient.gpu_sum is not None for unit in runtime.units)
            assert left == runtime.parts.memory_report["summed_units"]
            assert left == len(runtime.units) - gives_up * len([each for each in freed if each])
        return result

    assert differences(run(gives_up=True), run(gives_up=False)) == []
    assert len([each for each in freed if each]) > 2


# ----------------------------------------------------------------------------------------------------------------------
# What a script may do between two micro-batches.


def nothing(_engine: Any, _seen: list[Any]) -> None:
    pass


def read_gradient(engine: Any, seen: list[Any]) -> None:
    for parameter in (engine.module.blocks[1].inner.weight, engine.module.embed.weight):
        if engine.optimizer.runtime.accumulation.micro_batches:
            seen.append(safe_get_full_grad(parameter))


def set_gradient(engine: Any, _seen: list[Any]) -> None:
    if engine.optimizer.runtime.accumulation.micro_batches:
        parameter = engine.module.blocks[2].outer.weight
        safe_set_full_grad(parameter, torch.full(parameter.ds_shape, 0.25))


def read_weights(engine: Any, seen: list[Any]) -> None:
    with deepspeed.zero.GatheredParameters(list(engine.module.blocks[3].parameters())):
        seen.append(engine.module.blocks[3].inner.weight.detach().clone())


def drop_all(engine: Any, _seen: list[Any]) -> None:
    engine.optimizer.zero_grad()  # engine.zero_grad() leaves the micro-batches of an accumulation
    assert not any(unit.gradient.is_in_gpu_sum for unit in engine.optimizer.runtime.units)


def drop_a_block(engine: Any, _seen: list[Any]) -> None:
    engine.module.blocks[1].zero_grad()


def zero_a_weight(engine: Any, _seen: list[Any]) -> None:
    engine.module.blocks[2].inner.weight.grad = None


def evaluate(engine: Any, seen: list[Any]) -> None:
    with torch.no_grad():
        seen.append(engine(**batches(1)[0]))


def fail(engine: Any, _seen: list[Any]) -> None:
    """In the middle of a backward: after that the sum is lost, and the script drops it."""
    client = Client(engine)
    client.fail(batches(1)[0], "backward of block 1", Interrupt)
    engine.zero_grad()


EVENTS = [nothing, read_gradient, set_gradient, read_weights, drop_all, drop_a_block, zero_a_weight, evaluate, fail]
ACCUMULATION, ROUNDS = 3, 3


def events_between(
    events: Sequence[Callable[[Any, list[Any]], None]], *, sums: bool, update_passes: int = 1
) -> list[Any]:
    """What a script with these events sees, and the states that it leaves. The last two micro-batches of a step use
    only a half of the tokens."""
    seen: list[Any] = []
    data = [
        {key: each[:, : 8 + 8 * (number % 3)] for key, each in batch.items()} for number, batch in enumerate(batches(9))
    ]
    slide = {"blocks": ["blocks"], "debug": DELAYS, "update_passes": update_passes}
    with engine_for(model := Model(), config(slide, accumulation=ACCUMULATION)) as engine:
        runtime = engine.optimizer.runtime
        if sums:
            assert sum_on_gpu(runtime, *summable(runtime)) is not None
        for batch, event in zip(data, events, strict=True):
            engine.backward(loss := engine(**batch))
            event(engine, seen)
            engine.step()
            seen.append(loss.detach())
        seen.append(torch.tensor(float(engine.get_global_grad_norm() or 0.0)))
        states = states_of(model)
        return [*seen, *(tensor for name in sorted(states) for _, tensor in sorted(states[name].items()))]


@pytest.mark.parametrize("event", EVENTS)
def test_an_event_sees_and_leaves_the_same(event: Callable[[Any, list[Any]], None]) -> None:
    events = [nothing, event, nothing, event, nothing, nothing, nothing, nothing, event]
    with_sums, without = events_between(events, sums=True), events_between(events, sums=False)
    assert len(with_sums) == len(without) and all(map(same_bits, with_sums, without))


@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.sampled_from(EVENTS), min_size=9, max_size=9), st.sampled_from([1, 2]))
def test_any_events_see_and_leave_the_same(events: list[Callable[[Any, list[Any]], None]], passes: int) -> None:
    with_sums = events_between(events, sums=True, update_passes=passes)
    without = events_between(events, sums=False)
    assert len(with_sums) == len(without) and all(map(same_bits, with_sums, without))


def test_only_the_last_backward_waits_for_second_passes_of_units_with_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have not begun when it begins: all forwards and backwards before have come to their end without them."""
    data, held_back, submit = batches(9), list[Any](), UpdateWorker.submit

    def hold_back(
        lane: UpdateWorker, order: int, ready: Any, run: Any, what: str = "update", turn: Any = "next"
    ) -> None:
        task = functools.partial(submit, lane, order, ready, run, what, turn)
        held_back.append(task) if turn == "last" else task()

    def go_on() -> None:
        while held_back:
            held_back.pop(0)()

    def run(*, sums: bool, update_passes: int) -> Result:
        with engine_for(model := llama(), config({"update_passes": update_passes}, accumulation=3)) as engine:
            runtime = engine.optimizer.runtime
            with_sums = summable(runtime)[1:] if sums else []
            assert sum_on_gpu(runtime, *with_sums) is not None or not sums
            spans = sum(len(runtime.units[order].spans) for order in with_sums)

            def loss_of(engine: Any, batch: Any) -> torch.Tensor:
                loss = causal_loss(engine, batch)
                if engine.is_gradient_accumulation_boundary():
                    assert len(held_back) == (spans if engine.global_steps else 0)
                    go_on()
                return loss

            result = train(engine, data, loss_of)
            go_on()
            result.states = states_of(model)
        return result

    expected = run(sums=False, update_passes=1)
    monkeypatch.setattr(UpdateWorker, "submit", hold_back)
    assert differences(run(sums=True, update_passes=2), expected) == []


# ----------------------------------------------------------------------------------------------------------------------
# Sums whose last gradient is not announced.


class Sometimes(nn.Module):
    """Blocks of which a call passes the second only, the first only, or both. The gradient of `sign` is -0.0."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Signed() for _ in range(2))

    def forward(self, x: torch.Tensor, uses: str) -> torch.Tensor:
        for block, use in zip(self.blocks, uses, strict=True):
            if use != "-":
                x = block(x, signs=use == "s")
        return x.float().square().mean()


class Signed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.sign = nn.Linear(32, 32), nn.Parameter(torch.ones(32))

    def forward(self, x: torch.Tensor, *, signs: bool) -> torch.Tensor:
        x = torch.tanh(self.linear(x))
        return x if not signs else x + (self.sign * torch.zeros(32, dtype=self.sign.dtype)).neg()


def after_uses(uses: Sequence[str], *, sums: bool, **others: Any) -> list[Any]:
    """The gradients that a script sees before a step after these micro-batches, and the states after a second one."""
    generator, seen = torch.Generator().manual_seed(1), []
    ours = config({"blocks": ["blocks"], "debug": DELAYS}, managed_gradient_accumulation=False, **others)
    with engine_for(model := Sometimes(), ours) as engine:
        runtime = engine.optimizer.runtime
        if sums:
            assert sum_on_gpu(runtime, *summable(runtime)) is not None
        for is_read in (True, False):
            for use in uses:
                engine.backward(engine(torch.randn(1, 32, generator=generator).bfloat16(), use))
            seen += [safe_get_full_grad(parameter) for parameter in model.parameters() if is_read]
            engine.step()
            seen.append(torch.tensor(float(engine.get_global_grad_norm())))
        states = states_of(model)
        return [*seen, *(tensor for name in sorted(states) for _, tensor in sorted(states[name].items()))]


@pytest.mark.by_turns(2)
@pytest.mark.parametrize("held", ["bf16", "fp32"])
@pytest.mark.parametrize("uses", [("xx", "xx", "xx"), ("xx", "-x", "x-"), ("s-", "xx"), ("ss", "xx", "ss"), ("xs",)])
def test_units_and_parameters_that_are_not_used_each_time(uses: Sequence[str], held: str) -> None:
    others = {"gradient_accumulation_steps": 2, "data_types": {"grad_accum_dtype": held}}
    with_sums, without = after_uses(uses, sums=True, **others), after_uses(uses, sums=False, **others)
    assert len(with_sums) == len(without) and all(map(same_bits, with_sums, without))


def test_a_dropped_gradient_that_comes_late_is_not_added_to_a_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """The update lane adds a gradient to one that was read, when both are dropped and a sum on the GPU has begun."""
    is_next = threading.Event()
    wait_on_stream = route.wait_on_stream

    def delay(runtime: Any) -> None:
        gradients, block = runtime.parts.gradients, runtime.blocks[1]
        send, accumulate = gradients._send_to_host, gradients._accumulate

        def late(arrival: Any, *arguments: Any) -> int:
            assert arrival.unit is not block or is_next.wait(60)
            return accumulate(arrival, *arguments)

        def sent(unit: Any, *arguments: Any) -> None:
            send(unit, *arguments)
            if unit is block and runtime.accumulation.micro_batches == 2:  # the sum goes down in the step
                runtime.parts.context.lanes.d2h.drain()
                is_next.set()

        def waited(future: Any, *arguments: Any) -> None:
            if future is block.gradient.arrived:
                is_next.set()
            wait_on_stream(future, *arguments)

        monkeypatch.setattr(gradients, "_accumulate", late)
        monkeypatch.setattr(gradients, "_send_to_host", sent)
        monkeypatch.setattr(route, "wait_on_stream", waited)

    def run(*, sums: bool) -> dict[str, dict[str, torch.Tensor]]:
        ours = config({"blocks": ["blocks"]}, managed_gradient_accumulation=False, gradient_accumulation_steps=2)
        with engine_for(model := Model(), ours) as engine:
            runtime = engine.optimizer.runtime
            if sums:
                sum_on_gpu(runtime, *summable(runtime))
            data = iter(batches(4))
            engine.backward(engine(**next(data)))
            safe_get_full_grad(model.blocks[1].inner.weight)
            if sums:
                delay(runtime)
            engine.backward(engine(**next(data)))
            engine.optimizer.zero_grad()
            for batch in data:
                engine.backward(engine(**batch))
            engine.step()
            assert not sums or is_next.is_set()
            return states_of(model)

    assert unequal(run(sums=True), run(sums=False)) == []
