"""Blocks that keep some results of their operators and recompute the rest: the same bits, and no product twice."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from activation_runs import (
    ASKED,
    CASES,
    FORMS,
    MODELS,
    SCHEDULES,
    STEPS,
    asked,
    checkpointed,
    config_of,
    expected,
    layers_of,
    llama,
    run,
)
from all_mixed import all_mixed, all_of
from allocated import storages
from harness import Result, batches, differences, engine_for, states_of, to_bf16, train
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from ds_slide.plan.keeping import kept_within
from ds_slide.plan.spare import Shape
from ds_slide.runtime.activations.kept_calls import _Forward
from ds_slide.runtime.memory.spare_memory import LOOKS

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.usefixtures("one_rank"), pytest.mark.thinned(2)]

LIMITED = {"gpu_memory": "1GiB"}


@pytest.fixture
def mix() -> Iterator[Callable[[], None]]:
    """Mixes all blocks from the call on."""
    with ExitStack() as stack:
        yield lambda: stack.enter_context(all_mixed())


@pytest.mark.thinned(4)
@ASKED
@pytest.mark.parametrize(("name", "schedule"), CASES)
def test_what_is_mixed_changes_no_bit(
    name: str, schedule: str, reentrant: bool | None, mix: Callable[[], None]
) -> None:
    """With dropout in attention, which stays recomputed in part."""
    mix()
    data = batches(STEPS * SCHEDULES[schedule][1])
    result, report = run(asked(name, reentrant), LIMITED, data, schedule)
    assert differences(result, expected(name, reentrant, schedule)) == []
    assert report["mix"] == report["checkpointed"] == len(layers_of(MODELS[name]()))
    assert report["kept_bytes"] > 0


def backward_flops(activations: str, reentrant: bool) -> int:
    """Of the last step."""
    model = checkpointed(llama(), reentrant)
    with engine_for(model, config_of({**LIMITED, "activations": activations})) as engine:
        *first, last = batches(STEPS)
        train(engine, first)
        loss = engine(**last).loss
        with FlopCounterMode(display=False) as counted:
            engine.backward(loss)
        report = engine.optimizer.slide_stats()["activations"]
        assert activations == "as_written" or report["keep"] + report["mix"] == 6
        return counted.get_total_flops()


@FORMS
def test_no_product_is_computed_twice(reentrant: bool, mix: Callable[[], None]) -> None:
    written, kept = backward_flops("as_written", reentrant), backward_flops("auto", reentrant)
    mix()
    assert backward_flops("auto", reentrant) == kept < written


@FORMS
def test_beside_autocast(reentrant: bool, mix: Callable[[], None]) -> None:
    found = []
    for activations in ("as_written", "auto"):
        model = checkpointed(llama(hidden_dropout=0.1), reentrant)
        config = config_of({**LIMITED, "activations": activations})
        config |= {"bf16": {"enabled": False}, "torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
        mix()
        with engine_for(model, config) as engine:
            found.append(train(engine, batches(STEPS)))
            assert activations == "as_written" or engine.optimizer.slide_stats()["activations"]["mix"] == 6
    assert differences(*found) == []


@pytest.mark.usefixtures("quick_interpreter")
def test_beside_kernels(mix: Callable[[], None]) -> None:
    mix()
    results = []
    for activations in ("as_written", "auto"):
        model = checkpointed(to_bf16(llama(num_hidden_layers=2, hidden_size=32, intermediate_size=48)), False)
        slide = {"kernels": ["mlp", "norm"], "activations": activations, **LIMITED}
        results.append(run(model, slide, batches(LOOKS[0] + 1, length=4)))
    assert differences(results[0][0], results[1][0]) == []
    assert [report.get("mix", 0) for _, report in results] == [0, 2]


def test_a_second_backward_runs_everything_again(mix: Callable[[], None]) -> None:
    mix()
    found = []
    for activations in ("as_written", "auto"):
        model = checkpointed(llama(), False)
        with engine_for(model, config_of({**LIMITED, "activations": activations, "defer_updates": True})) as engine:
            losses = train(engine, batches(STEPS)).losses
            hidden = torch.randn(2, 8, 64, dtype=torch.bfloat16, requires_grad=True)
            loss = engine(inputs_embeds=hidden, labels=batches(1, length=8)[0]["labels"]).loss
            twice = [torch.autograd.grad(loss, hidden, retain_graph=again)[0] for again in (True, False)]
            assert torch.equal(*twice)
            found.append(Result(losses=[*losses, float(twice[0].float().sum())]))
    assert differences(*found) == []


class Scaled(nn.Module):
    """A projection whose result is then modified in place: seen by torch, or as a kernel of its own does it."""

    def __init__(self, inner: nn.Module, *, seen: bool, parts: int = 1) -> None:
        super().__init__()
        self.inner, self.seen, self.parts = inner, seen, parts

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.inner(hidden)
        if self.seen and self.parts == 1:
            return made.mul_(0.5)
        if self.seen:
            return torch.cat([part.mul_(0.5) for part in torch.unsafe_chunk(made, self.parts, -1)], -1)
        made.data.mul_(0.5)
        return made


@pytest.mark.parametrize("seen", [True, False])
def test_what_is_modified_in_place_does_not_stay(seen: bool, mix: Callable[[], None]) -> None:
    mix()
    results = []
    for activations in ("as_written", "auto"):
        model = checkpointed(llama(), False)
        for layer in layers_of(model):
            layer.self_attn.q_proj = Scaled(layer.self_attn.q_proj, seen=seen)
        results.append(run(model, {**LIMITED, "activations": activations}, batches(STEPS)))
    assert differences(results[0][0], results[1][0]) == []
    assert results[1][1]["mix"] == 6


@pytest.mark.parametrize("parts", [1, 2])
def test_what_is_modified_only_sometimes_is_computed_again(parts: int, mix: Callable[[], None]) -> None:
    """Not yet when it was learnt what may stay."""
    mix()
    found = []
    for activations in ("as_written", "auto"):
        model, later = checkpointed(llama(), False), batches(2, seed=2)
        for layer in layers_of(model):
            layer.self_attn.v_proj = Scaled(layer.self_attn.v_proj, seen=True, parts=parts)
            layer.self_attn.v_proj.forward = layer.self_attn.v_proj.inner.forward
        with engine_for(model, config_of({**LIMITED, "activations": activations})) as engine:
            result = train(engine, batches(STEPS))
            for layer in layers_of(model):
                del layer.self_attn.v_proj.forward
            result.losses += train(engine, later).losses
            result.states = states_of(model)
            found.append(result)
    assert differences(*found) == []


class Tabled(nn.Module):
    """A projection that adds a table, once `is_on`, which it makes by a product when it needs it for the first time."""

    def __init__(self, inner: nn.Module, rows: int) -> None:
        super().__init__()
        self.inner, self.rows, self.is_on = inner, rows, False
        self.table: torch.Tensor | None = None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.inner(hidden)
        if self.is_on and self.table is None:
            with torch.no_grad():
                self.table = self.inner(2 * hidden[:, : self.rows]).mean()
        return made if self.table is None else made + self.table


@pytest.mark.parametrize("rows", [32, 16])
def test_no_product_is_taken_for_another(rows: int, mix: Callable[[], None]) -> None:
    """Where the forward runs one that the recomputation does not, and not yet when it was learnt what may stay."""
    mix()
    found = []
    for activations in ("as_written", "auto"):
        model, later = checkpointed(llama(num_key_value_heads=4), False), batches(2, seed=2)
        tabled = [Tabled(layer.self_attn.q_proj, rows) for layer in layers_of(model)]
        for layer, each in zip(layers_of(model), tabled, strict=True):
            layer.self_attn.q_proj = each
        with engine_for(model, config_of({**LIMITED, "activations": activations})) as engine:
            result = train(engine, batches(STEPS))
            for each in tabled:
                each.is_on = True
            result.losses += train(engine, later).losses
            result.states = states_of(model)
            found.append(result)
    assert differences(*found) == []


def test_a_block_with_a_hook_of_the_scripts_own_is_not_mixed(mix: Callable[[], None]) -> None:
    """It may call products in one of the two runs only."""
    mix()
    model = checkpointed(llama(), False)
    layers_of(model)[2].mlp.register_forward_hook(lambda *_: None)
    with engine_for(model, config_of(LIMITED)) as engine:
        train(engine, batches(STEPS))
        loss = engine(**batches(1)[0]).loss
        activations = engine.optimizer.runtime.parts.spare.activations
        assert 6 * activations.alive() == 5 * activations.kept_bytes > 0
        del loss


def test_what_stays_comes_free_with_its_graph(mix: Callable[[], None]) -> None:
    mix()
    with engine_for(checkpointed(llama(), True), config_of(LIMITED)) as engine:
        train(engine, batches(STEPS))
        activations = engine.optimizer.runtime.parts.spare.activations
        gc.collect()
        before = sum(storages().values())
        loss = engine(**batches(1)[0]).loss
        assert activations.alive() == activations.kept_bytes > 0
        assert sum(storages().values()) - before > activations.kept_bytes
        del loss
        gc.collect()
        assert activations.alive() == 0 and sum(storages().values()) == before


def test_no_block_is_mixed_where_that_takes_longer_than_recomputing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU that waits for the host: it is measured in the second look."""
    run_operator = _Forward.__torch_dispatch__

    def slow(*given: Any) -> Any:
        time.sleep(0.002)
        return run_operator(*given)

    monkeypatch.setattr(_Forward, "__torch_dispatch__", slow)
    monkeypatch.setattr("ds_slide.runtime.activations.measuring.mixtures", all_of)
    with engine_for(checkpointed(llama(), True), config_of(LIMITED)) as engine:
        activations = engine.optimizer.runtime.parts.spare.activations
        train(engine, batches(LOOKS[0]))
        with all_mixed():
            train(engine, batches(LOOKS[1] - LOOKS[0] - 1))
            before = activations.costs.keepable(Shape(1, 1))
            train(engine, batches(1))
        after = activations.costs.keepable(Shape(1, 1))
    room = sum(each.nbytes for each in before) - 1
    assert [each.mixing_s for each in before] == [0.0] * len(layers_of(llama())) and kept_within(room, before).mixed
    assert min(each.mixing_s for each in after) > 0.02 and not kept_within(room, after).mixed


CALL_S = 0.05


def sleeping(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks take so long for 16 tokens of a sequence, mixed or not. All can be mixed."""
    kind = transformers.models.llama.modeling_llama.LlamaMLP
    run_module = kind.forward

    def slow(module: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        time.sleep(CALL_S * hidden.shape[1] / 16)
        made: torch.Tensor = run_module(module, hidden)
        return made

    monkeypatch.setattr(kind, "forward", slow)
    monkeypatch.setattr("ds_slide.runtime.activations.measuring.mixtures", all_of)


def test_a_longer_batch_is_not_what_mixing_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    sleeping(monkeypatch)
    with engine_for(checkpointed(llama(num_hidden_layers=2), True), config_of(LIMITED)) as engine:
        activations = engine.optimizer.runtime.parts.spare.activations
        train(engine, batches(LOOKS[0], length=8))
        with all_mixed():
            train(engine, batches(LOOKS[1] - LOOKS[0], length=32))
    assert [each.mixing_s for each in activations.costs.keepable(Shape(1, 1))] == [0.0, 0.0]
    assert min(map(activations.times.seconds_of, activations.costs.orders)) > 2 * CALL_S


def test_all_micro_batches_count_in_a_step_of_which_some_are_mixed(monkeypatch: pytest.MonkeyPatch) -> None:
    sleeping(monkeypatch)
    config = config_of(LIMITED, "accumulation")
    with engine_for(checkpointed(llama(num_hidden_layers=2), True), config) as engine:
        activations = engine.optimizer.runtime.parts.spare.activations
        train(engine, batches(2 * LOOKS[1] - 1, length=16))
        with all_mixed():
            train(engine, batches(1, length=16))
    seconds = [activations.times.seconds_of(order) for order in sorted(activations.costs.orders)]
    assert min(seconds) > 2 * CALL_S
    assert max(each.mixing_s for each in activations.costs.keepable(Shape(1, 1))) < CALL_S


def test_a_longer_batch_keeps_no_more_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of its length may take sixteen times as much; the next one is known to take four."""
    data = [batch for length in (16, 16, 16, 16, 64, 64) for batch in batches(1, length=length)]
    results, found, limit = [], [], 600_000
    monkeypatch.setattr("ds_slide.runtime.activations.measuring.mixtures", all_of)
    for activations in ("as_written", "auto"):
        model = checkpointed(llama(), True)
        with engine_for(model, config_of({**LIMITED, "gpu_memory": limit, "activations": activations})) as engine:
            parts = engine.optimizer.runtime.parts
            losses: list[Any] = []
            for batch in data:
                losses += train(engine, [batch]).losses
                assert parts.plan.gpu_bytes + parts.spare.activations.kept_bytes <= limit
                found.append(engine.optimizer.slide_stats().get("activations", {}).get("mix"))
            results.append(Result(losses=losses, states=states_of(model)))
    assert differences(*results) == []
    assert found[-3:] == [4, 0, 1]
