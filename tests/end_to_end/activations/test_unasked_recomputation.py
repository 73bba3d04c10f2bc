"""Scripts without gradient checkpointing: blocks are recomputed while memory is short, with the same bits."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from activation_runs import (
    BLOCK_BYTES,
    CASES,
    FUNCTION,
    MODELS,
    OWN_BYTES,
    SCHEDULES,
    STEPS,
    config_of,
    layers_of,
    llama,
    run,
)
from harness import batches, differences, engine_for, train
from interrupting import Failure
from torch import nn

from ds_slide.runtime.activations.checkpointing import FLAG
from ds_slide.runtime.core.calls import in_backward
from ds_slide.runtime.memory.spare_memory import LOOKS

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.usefixtures("one_rank"), pytest.mark.thinned(2)]


@pytest.mark.parametrize(("name", "schedule"), CASES)
def test_what_is_recomputed_changes_no_bit(name: str, schedule: str) -> None:
    """All blocks at first, and later some of them or none, with dropout in their attention."""
    data, blocks = batches(STEPS * SCHEDULES[schedule][1]), len(layers_of(MODELS[name]()))
    expected, report = run(MODELS[name](), {"activations": "as_written", "gpu_memory": "1GiB"}, data, schedule)
    assert report.get("checkpointed", 0) == 0
    for limit in (OWN_BYTES + 3 * BLOCK_BYTES, "1GiB"):
        result, report = run(MODELS[name](), {"gpu_memory": limit}, data, schedule)
        assert differences(result, expected) == []
        assert report["keep"] + report["mix"] + report["recompute"] == report["checkpointed"] == blocks
        assert 0 < report["keep"] <= blocks
    assert report["keep"] == blocks


def test_nothing_is_recomputed_once_all_of_it_fits() -> None:
    model, recomputed = llama(), []
    model.register_forward_pre_hook(lambda *_: recomputed.append(0))
    with engine_for(model, config_of({"gpu_memory": "1GiB"})) as engine:
        mlp = type(layers_of(model)[0].mlp)
        forward = mlp.forward

        def counting(self: nn.Module, hidden: torch.Tensor) -> Any:
            recomputed[-1] += in_backward()
            return forward(self, hidden)

        mlp.forward = counting
        try:
            train(engine, batches(STEPS))
        finally:
            mlp.forward = forward
    assert recomputed == [6] * LOOKS[0] + [0] * (STEPS - LOOKS[0])


def test_without_memory_of_its_own_an_accelerator_recomputes_nothing() -> None:
    assert not any(run(llama(), {}, batches(2))[1].values())


class Remembering(nn.Module):
    """Reads a text in two halves. The second one sees the first through its cache, and so does the gradient."""

    def __init__(self, inner: nn.Module, *, positional: bool) -> None:
        super().__init__()
        self.inner, self.positional = inner, positional

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        first, second = input_ids.chunk(2, dim=1)
        seen = self.inner(first, use_cache=True).past_key_values
        assert seen.get_seq_length() == first.size(1)
        labels = labels.chunk(2, dim=1)[1]
        if self.positional:
            return self.inner(second, None, None, seen, labels=labels)
        return self.inner(second, past_key_values=seen, labels=labels)


@pytest.mark.parametrize("positional", [False, True])
def test_forwards_with_a_cache_run_as_written(positional: bool) -> None:
    results = []
    for activations in ("as_written", "auto"):
        model = Remembering(llama(), positional=positional)
        slide = {"gpu_memory": "1GiB", "activations": activations, "defer_updates": True}
        with engine_for(model, config_of(slide)) as engine:
            results.append(train(engine, batches(LOOKS[0] + 1)))
            assert engine.optimizer.slide_stats()["activations"]["checkpointed"] == 0
    assert differences(*results) == []


class Prefixed(nn.Module):
    """Has learned keys and values before each text, as prefix tuning does, in a cache that it fills by itself."""

    def __init__(self, inner: nn.Module, *, positional: bool) -> None:
        super().__init__()
        self.inner, self.positional = inner, positional
        config, generator = inner.config, torch.Generator().manual_seed(3)
        heads, width = config.num_key_value_heads, config.hidden_size // config.num_attention_heads
        shape = config.num_hidden_layers, 2, 1, heads, 4, width
        self.prefix = nn.Parameter(torch.randn(shape, generator=generator))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        cache = transformers.DynamicCache(config=self.inner.config)
        for layer, (keys, values) in enumerate(self.prefix.expand(-1, -1, len(input_ids), -1, -1, -1)):
            cache.update(keys, values, layer)
        if self.positional:
            return self.inner(input_ids, None, None, cache, labels=labels)
        (name,) = {"cache", "past_key_values"} & inspect.signature(type(self.inner).forward).parameters.keys()
        return self.inner(input_ids, labels=labels, **{name: cache})


@pytest.mark.parametrize("positional", [False, True])
def test_a_cache_that_the_script_fills_is_read(positional: bool) -> None:
    """Whatever the release of transformers calls it: a checkpointed layer gets none, and nothing fails."""
    results = []
    for activations in ("as_written", "auto"):
        model = Prefixed(llama(), positional=positional)
        slide = {"gpu_memory": "1GiB", "activations": activations, "defer_updates": True}
        with engine_for(model, config_of(slide)) as engine:
            results.append(train(engine, batches(LOOKS[0] + 1)))
            assert engine.optimizer.slide_stats()["activations"]["checkpointed"] == 0
    assert differences(*results) == []


def test_a_forward_with_a_cache_concerns_no_other() -> None:
    with engine_for(llama(), config_of({"gpu_memory": "1GiB"})) as engine:
        report = lambda: engine.optimizer.slide_stats()["activations"]["checkpointed"]  # noqa: E731
        train(engine, batches(2))
        assert report() == 6
        (batch,) = batches(1, seed=1)
        engine(**batch, use_cache=True)
        assert report() == 0
        train(engine, batches(1))
        assert report() == 6


def test_frozen_embeddings_cost_no_gradient() -> None:
    results = []
    for activations in ("as_written", "auto"):
        model = llama()
        model.model.embed_tokens.requires_grad_(False)
        slide = {"activations": activations, "gpu_memory": "1GiB", "defer_updates": True}
        results.append(run(model, slide, batches(LOOKS[0] + 1))[0])
    assert differences(*results) == []


def _hooked(model: nn.Module) -> None:
    layers_of(model)[0].mlp.register_forward_hook(lambda *_: None)


def _with_statistics(model: nn.Module) -> None:
    layers_of(model)[0].seen = nn.BatchNorm1d(64, affine=False)


def _compiled(model: nn.Module) -> None:
    layers_of(model)[0].compile(backend="eager")


def _with_compiled_forward(model: nn.Module) -> None:
    layer = layers_of(model)[0]
    layer.forward = torch.compile(layer.forward, backend="eager")


def _evaluating(model: nn.Module) -> None:
    layers_of(model)[0].eval()


@pytest.mark.parametrize("changed", [_hooked, _with_statistics, _compiled, _with_compiled_forward, _evaluating])
def test_blocks_that_are_not_the_same_when_they_run_twice_are_left_alone(changed: Callable[[nn.Module], None]) -> None:
    model = llama()
    changed(model)
    with engine_for(model, config_of({"gpu_memory": "1GiB"})) as engine:
        train(engine, batches(2))
        assert engine.optimizer.slide_stats()["activations"]["checkpointed"] == 5


@pytest.mark.slow
def test_a_model_that_is_compiled_as_a_whole_is_left_alone() -> None:
    with engine_for(llama(), config_of({"gpu_memory": "1GiB"})) as engine:
        engine.compile(backend="eager")
        train(engine, batches(2))
        assert engine.optimizer.slide_stats()["activations"]["checkpointed"] == 0


def test_a_model_that_supports_no_checkpointing_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama()
    monkeypatch.setattr(type(model), "supports_gradient_checkpointing", False)
    monkeypatch.setattr(type(model.model), "supports_gradient_checkpointing", False)
    assert run(model, {"gpu_memory": "1GiB"}, batches(2))[1]["checkpointed"] == 0


def test_nothing_is_left_behind_an_exception() -> None:
    model, (batch,) = llama(), batches(1)
    with engine_for(model, config_of({"gpu_memory": "1GiB"})) as engine:

        def fail(*_args: Any) -> None:
            assert vars(layers_of(model)[5])[FLAG]
            raise Failure

        handle = layers_of(model)[3].register_forward_pre_hook(fail)
        with pytest.raises(Failure):
            engine(**batch)
        handle.remove()
        assert not any(vars(layer).keys() & {FLAG, FUNCTION} for layer in layers_of(model))
        with torch.no_grad():
            assert engine(**batch, use_cache=True).past_key_values.get_seq_length() == batch["input_ids"].size(1)
        train(engine, [batch])


def test_it_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="ds_slide"):
        run(llama(), {"gpu_memory": "1GiB"}, batches(STEPS))
    said = [record.getMessage() for record in caplog.records]
    assert sum("6 blocks are recomputed in backward, which the script does not ask for" in line for line in said) == 1
    assert not any("is taken over" in line for line in said)


@pytest.mark.parametrize("steps", [1, STEPS], ids=["all recomputed", "some kept"])
def test_a_graph_that_is_older_than_a_step_is_refused(steps: int) -> None:
    """Outer modules are frozen, so that no weight but the blocks' own has changed."""
    model = llama()
    blocks = {id(parameter) for layer in layers_of(model) for parameter in layer.parameters()}
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) in blocks)
    with engine_for(model, config_of({"gpu_memory": OWN_BYTES + 3 * BLOCK_BYTES})) as engine:
        train(engine, batches(steps))
        first, second = batches(2, seed=5)
        old = engine(**first).loss
        engine.backward(engine(**second).loss)
        engine.step()
        with pytest.raises(RuntimeError, match=r"modified (since the forward of this graph|by an inplace)"):
            old.backward()
        train(engine, batches(1))


def test_a_forward_that_writes_to_its_weights_first_is_recomputed() -> None:
    model = llama()
    for layer in layers_of(model):
        gate, forward = layer.mlp.gate_proj, type(layer.mlp).forward

        def writing(hidden: torch.Tensor, mlp: Any = layer.mlp, gate: Any = gate, forward: Any = forward) -> Any:
            with torch.no_grad():
                gate.weight.mul_(1.0)
            return forward(mlp, hidden)

        layer.mlp.forward = writing
    found, report = run(model, {"gpu_memory": OWN_BYTES}, batches(STEPS), "clipping")
    expected, _ = run(llama(), {"gpu_memory": OWN_BYTES}, batches(STEPS), "clipping")
    assert differences(found, expected) == [] and report["recompute"] > 0
