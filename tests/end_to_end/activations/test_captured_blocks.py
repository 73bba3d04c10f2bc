"""Blocks that replay a recorded forward and backward have the bits of blocks that run as they are written."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from activation_runs import CASES, MODELS, SCHEDULES, config_of, layers_of, run
from captured_runs import RECORDING, RESIDENT, STEPS, both, captures_of, counted_replays
from harness import LAYERS, Result, batches, differences, engine_for, llama, train

from ds_slide.errors import SlideError
from ds_slide.runtime.captured.graphs import Graph
from ds_slide.runtime.captured.shapes import STEADY

pytest.importorskip("transformers")
pytestmark = [pytest.mark.usefixtures("one_rank")]


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[Graph]:
    """All replays, of forwards and backwards."""
    return counted_replays(monkeypatch)


@pytest.mark.thinned(2)
@pytest.mark.parametrize(("name", "schedule"), CASES)
def test_replayed_blocks_have_the_same_bits(name: str, schedule: str, replays: list[Graph]) -> None:
    """With dropout in their attention, clipping and accumulation."""
    count = SCHEDULES[schedule][1]
    data = batches(STEPS * count)
    expected, report = run(MODELS[name](), {**RESIDENT, "captured_blocks": False}, data, schedule)
    assert not replays
    assert report["replayed"] == 0
    result, report = run(MODELS[name](), {**RESIDENT, "captured_blocks": True}, data, schedule)
    assert differences(result, expected) == []
    blocks = len(layers_of(MODELS[name]()))
    assert report["replayed"] == report["keep"] == blocks
    assert len(replays) == 2 * blocks * count * (STEPS - RECORDING + 1)


def test_each_shape_that_comes_often_has_recordings() -> None:
    """Batches of another shape leave them alone."""
    lengths = [32] * STEPS + [16, 32, 16, 24, 16, 16, 32, 16, 24]
    data = [each for number, length in enumerate(lengths) for each in batches(1, seed=number, length=length)]
    replayed: list[tuple[int, int]] = []

    def training(engine: Any) -> Result:
        result = Result()
        for batch in data:
            result.losses += train(engine, [batch]).losses
            captures = captures_of(engine)
            replayed.append((len(captures.recorded), len(captures.shapes.recorded)))
        return result

    expected, result = both(training)
    assert differences(result, expected) == []
    replayed = replayed[len(data) :]
    assert replayed[: RECORDING - 1] == [(0, 0)] * (RECORDING - 1)
    assert replayed[RECORDING - 1 : STEPS] == [(LAYERS, 1)] * (STEPS - RECORDING + 1)
    counts = [recorded for recorded, _ in replayed[STEPS:]]
    assert counts == [0, LAYERS, 0, 0, 0, LAYERS, LAYERS, LAYERS, 0]
    assert [shapes for _, shapes in replayed[STEPS:]] == [1] * 5 + [2] * 4


@pytest.mark.parametrize("of", ["forwards", "backwards"])
def test_a_replay_with_other_numbers_ends_all_recordings(
    of: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One of the blocks' recordings gives wrong numbers in its first replay: as if another block had its memory."""
    record, replay, made = Graph.record, Graph.replay, []

    def recorded(graph: Graph, function: Any) -> Any:
        results = record(graph, function)
        made.append((graph, results))
        return results

    def wrong(graph: Graph) -> None:
        runs_again = not graph._has_run
        replay(graph)
        # All blocks are recorded in the forward, and then in backward.
        wrong_one = 2 if of == "forwards" else LAYERS + 2
        if runs_again and made[wrong_one][0] is graph:
            with torch.no_grad():
                next(each for each in made[wrong_one][1] if each is not None).mul_(-1.0)

    monkeypatch.setattr(Graph, "record", recorded)
    monkeypatch.setattr(Graph, "replay", wrong)

    def training(engine: Any) -> Result:
        return train(engine, batches(STEPS + 3))

    expected, result = both(training, lambda: llama(attention_dropout=0.0))
    assert made
    assert differences(result, expected) == []
    assert "has given other numbers than its operators" in caplog.text


def test_memory_that_is_short_frees_the_recordings() -> None:
    with engine_for(llama(), config_of({**RESIDENT, "captured_blocks": True})) as engine:
        train(engine, batches(STEPS))
        captures = captures_of(engine)
        loss = engine(**batches(1)[0]).loss
        captures.give_up()
        assert len(captures.recorded) == LAYERS  # a graph waits for its backward
        engine.backward(loss)
        engine.step()
        del loss
        captures.give_up()
        assert not captures.recorded
        train(engine, batches(1))


def test_a_second_derivative_is_refused_by_name() -> None:
    with engine_for(llama(), config_of({**RESIDENT, "captured_blocks": True})) as engine:
        train(engine, batches(STEPS))
        output = engine(**batches(1)[0])
        (embedding,) = [each for each in engine.module.parameters() if each.shape[0] == 256][:1]
        with pytest.raises(SlideError, match="create_graph=True goes through model"):
            torch.autograd.grad(output.loss, embedding, create_graph=True, allow_unused=True)


def test_two_kinds_of_masks(replays: list[Graph]) -> None:
    """The layers of Gemma 3 get a mask and position embeddings of their kind, of one shape each."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    def build() -> Any:
        torch.manual_seed(0)
        return Gemma3ForCausalLM(
            Gemma3TextConfig(
                vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=LAYERS, num_attention_heads=4,
                num_key_value_heads=2, head_dim=16, sliding_window=8, sliding_window_pattern=2, use_cache=False,
            )
        )  # fmt: skip

    def training(engine: Any) -> Result:
        data = batches(STEPS)
        for batch in data:
            mask = torch.ones_like(batch["input_ids"])
            mask[0, :5] = 0
            batch["attention_mask"] = mask
        return train(engine, data)

    expected, result = both(training, build)
    assert differences(result, expected) == []
    assert len(replays) == 2 * LAYERS * (STEPS - RECORDING + 1)


def test_a_loop_with_second_derivatives_is_left_alone(replays: list[Graph]) -> None:
    def training(engine: Any) -> Result:
        result = Result()
        for batch in batches(STEPS):
            given = engine.module.get_input_embeddings()(batch["input_ids"]).detach().requires_grad_()
            loss = engine(inputs_embeds=given, labels=batch["labels"]).loss
            (gradient,) = torch.autograd.grad(loss, given, create_graph=True)
            engine.backward(loss + gradient.square().sum())
            engine.step()
            result.losses.append(loss.item())
        return result

    expected, result = both(training, lambda: llama(attn_implementation="eager"))
    assert differences(result, expected) == []
    assert not replays


def test_recordings_that_are_not_used_are_freed(replays: list[Graph]) -> None:
    with engine_for(llama(), config_of({**RESIDENT, "captured_blocks": True})) as engine:
        train(engine, batches(STEPS))
        assert len(captures_of(engine).recorded) == LAYERS
        for layer in layers_of(engine.module):
            layer.self_attn.scaling = 0.1
        replays.clear()
        train(engine, batches(STEADY + 1, seed=19))
        assert not replays
        assert not captures_of(engine).recorded


def test_a_graph_older_than_a_step_raises() -> None:
    with engine_for(llama(), config_of({**RESIDENT, "captured_blocks": True})) as engine:
        train(engine, batches(STEPS))
        old = engine(**batches(1, seed=20)[0]).loss
        new = engine(**batches(1, seed=21)[0]).loss
        engine.backward(new)
        engine.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            engine.backward(old)


def test_the_cpu_accelerator_records_nothing_unasked(replays: list[Graph]) -> None:
    _, report = run(llama(), RESIDENT, batches(STEPS))
    assert report["replayed"] == 0
    assert not replays
