"""Blocks that replay recordings have the bits of plain torch, or of blocks that run as they are written, where batches,
models and engines vary."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from activation_runs import Twice, config_of
from captured_runs import RECORDING, RESIDENT, STEPS, both, captures_of, counted_replays
from graph_pool import graph_pool
from harness import (
    LAYERS,
    Batch,
    Result,
    batches,
    differences,
    engine_for,
    llama,
    plain_training,
    states_of,
    to_bf16,
    train,
)

from ds_slide.runtime.captured import shapes as shapes_module
from ds_slide.runtime.captured.graphs import Graph
from ds_slide.runtime.captured.shapes import STEADY

pytest.importorskip("transformers")
pytestmark = [pytest.mark.usefixtures("one_rank")]
RECORDED = {**RESIDENT, "captured_blocks": True}


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[Graph]:
    return counted_replays(monkeypatch)


def varying(lengths: list[int]) -> list[Batch]:
    return [each for number, length in enumerate(lengths) for each in batches(1, seed=number, length=length)]


def test_varying_lengths_beside_plain_torch(monkeypatch: pytest.MonkeyPatch, replays: list[Graph]) -> None:
    """Five lengths, and recordings for three at a time. Saved tensors lie in one memory, as on a GPU."""
    monkeypatch.setattr(shapes_module, "RECORDED", 3)
    lengths = random.Random(1).choices([16, 20, 24, 28, 32], [1, 1, 2, 4, 8], k=40)
    data = varying([32, *lengths])
    expected = plain_training(to_bf16(llama()), data, clip=1.0)
    model = llama()
    with graph_pool() as pool, engine_for(model, config_of(RECORDED)) as engine:
        result = train(engine, data[:RECORDING])
        of_the_longest = pool.most
        later = train(engine, data[RECORDING:])
        result = Result(result.losses + later.losses, result.norms + later.norms, states_of(model))
        assert len(captures_of(engine).shapes.recorded) == 3
    assert differences(result, expected) == []
    assert len(replays) > 2 * LAYERS * 15
    assert pool.most == of_the_longest > 0


def test_accumulation_over_two_lengths(replays: list[Graph]) -> None:
    expected, result = both(lambda engine: train(engine, varying([32, 16] * STEPS)), schedule="accumulation")
    assert differences(result, expected) == []
    assert len(replays) == 2 * LAYERS * 2 * (STEPS - RECORDING + 1)


def test_two_forwards_of_two_lengths_before_a_backward(replays: list[Graph]) -> None:
    """As for DPO, where chosen and rejected answers are not put together. Only the first forward is replayed."""

    def training(engine: Any) -> Result:
        result = train(engine, varying([32, 16] * STEPS))
        replays.clear()
        for chosen, rejected in zip(batches(3, seed=5), batches(3, seed=6, length=16), strict=True):
            loss = engine(**chosen).loss - 0.5 * engine(**rejected).loss
            with torch.no_grad():
                result.losses.append(engine(**rejected).loss.item())
            engine.backward(loss)
            engine.step()
            result.losses.append(loss.item())
        return result

    expected, result = both(training)
    assert differences(result, expected) == []
    assert len(replays) == 3 * 2 * LAYERS


def test_blocks_that_are_called_twice(replays: list[Graph]) -> None:
    """The first call is replayed. The memory of the second one counts."""
    kept = []

    def training(engine: Any) -> Result:
        result = train(engine, batches(STEPS))
        activations = engine.optimizer.runtime.parts.spare.activations
        kept.append((activations.statistics["kept_bytes"], activations.kept_bytes))
        return result

    expected, result = both(training, lambda: Twice(llama()))
    assert differences(result, expected) == []
    assert len(replays) == 2 * LAYERS * (STEPS - RECORDING + 1)
    (whole, as_written), (recorded, beside) = kept
    assert whole == as_written == recorded == 2 * beside


def test_two_engines_in_a_process(replays: list[Graph]) -> None:
    """An actor and a critic, which train in turn."""
    found: list[list[Result]] = []
    for wanted in (False, True):
        models, results = [llama(seed) for seed in (0, 1)], [Result(), Result()]
        config = config_of({**RESIDENT, "captured_blocks": wanted})
        with engine_for(models[0], config) as first, engine_for(models[1], config) as second:
            for batch, other in zip(batches(STEPS), batches(STEPS, seed=2, length=16), strict=True):
                loss, loss_of_second = first(**batch).loss, second(**other).loss
                for engine, each, result in ((first, loss, results[0]), (second, loss_of_second, results[1])):
                    engine.backward(each)
                    engine.step()
                    result.losses.append(each.item())
            for model, result in zip(models, results, strict=True):
                result.states = states_of(model)
        found.append(results)
    for expected, result in zip(*found, strict=True):
        assert differences(result, expected) == []
    assert len(replays) == 2 * 2 * LAYERS * (STEPS - RECORDING + 1)


@pytest.mark.parametrize("recording", [2, LAYERS + 2], ids=["forward", "backward"])
def test_a_recording_that_finds_no_memory(recording: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The block is computed as it is written. The recordings are freed behind the step, and begin anew."""
    record, count = Graph.record, 0

    def limited(self: Graph, function: Any) -> Any:
        nonlocal count
        count += 1
        if count == recording + 1:
            function()
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        return record(self, function)

    monkeypatch.setattr(Graph, "record", limited)
    blocks: list[int] = []

    def training(engine: Any) -> Result:
        result = Result()
        for batch in batches(STEPS + 6):
            result.losses += train(engine, [batch]).losses
            blocks.append(len(captures_of(engine).recorded))
        return result

    expected, result = both(training)
    assert differences(result, expected) == []
    blocks = blocks[STEPS + 6 :]
    again = RECORDING + 2 * STEADY  # it is freed when the next step begins, and the pause has doubled
    assert blocks[RECORDING - 1] in (2, LAYERS - 1)
    assert blocks[RECORDING:again] == [0] * (again - RECORDING)
    assert set(blocks[again:]) == {LAYERS}


def test_another_adapter(replays: list[Graph]) -> None:
    """PEFT switches adapters off, as for a reference without them, and from one to another."""
    peft = pytest.importorskip("peft")

    def build() -> Any:
        torch.manual_seed(0)
        linear = peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
        model = peft.get_peft_model(llama(), linear)
        model.add_adapter("other", linear)
        model.base_model.set_adapter(["default", "other"])
        model.enable_input_require_grads()
        return model

    def training(engine: Any) -> Result:
        model = engine.module
        result = train(engine, batches(STEPS))
        for number, names in enumerate(("default", "other", ["default", "other"])):
            model.base_model.set_adapter(names)
            result.losses += train(engine, batches(2, seed=20 + number)).losses
            with torch.no_grad(), model.disable_adapter():
                result.losses.append(engine(**batches(1, seed=30)[0]).loss.item())
        return result

    expected, result = both(training, build)
    assert differences(result, expected) == []
    assert replays
    assert any("lora" in name for name in expected.states)
