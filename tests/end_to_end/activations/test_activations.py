"""Activation checkpointing that the script has asked for through transformers: taken over, with the same bits."""

from __future__ import annotations

import copy
import gc
import time
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from activation_runs import (
    BLOCK_BYTES,
    CASES,
    FORMS,
    FUNCTION,
    MODELS,
    OWN_BYTES,
    SCHEDULES,
    STEPS,
    SmallGpu,
    Twice,
    checkpointed,
    config_of,
    expected,
    layers_of,
    llama,
    partly_frozen,
    run,
    with_hooks_inside,
)
from allocated import storages
from harness import Batch, Result, batches, differences, engine_for, states_of, to_bf16, train
from interrupting import Failure, Interrupt
from moving import promote
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import checkpoint as torch_checkpoint

from ds_slide.plan.spare import Shape
from ds_slide.plan.step_model import Step
from ds_slide.runtime.core.calls import in_backward
from ds_slide.runtime.memory import spare_memory
from ds_slide.runtime.memory.spare_memory import LOOKS
from ds_slide.runtime.memory.tier_moves import RunningStates
from ds_slide.runtime.weights.bindings import Bindings

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.usefixtures("one_rank"), pytest.mark.thinned(2)]


@pytest.mark.thinned(3)
@FORMS
@pytest.mark.parametrize(("name", "schedule"), CASES)
def test_what_is_kept_changes_no_bit(name: str, schedule: str, reentrant: bool) -> None:
    """Some blocks and all of them, with dropout in their attention."""
    data, blocks = batches(STEPS * SCHEDULES[schedule][1]), len(layers_of(MODELS[name]()))
    for limit in (OWN_BYTES + 3 * BLOCK_BYTES, "1GiB"):
        result, report = run(checkpointed(MODELS[name](), reentrant), {"gpu_memory": limit}, data, schedule)
        assert differences(result, expected(name, reentrant, schedule)) == []
        assert report["keep"] + report["mix"] + report["recompute"] == report["checkpointed"] == blocks
        assert 0 < report["keep"] <= blocks
    assert report["keep"] == blocks


@pytest.mark.thinned(4)
@pytest.mark.skipif(
    not hasattr(transformers.PreTrainedModel, "activation_checkpointing_enable"), reason="options of transformers 5.24"
)
@FORMS
@pytest.mark.parametrize("options", [{"offload": True}, {"every_n_layers": 2}, {"offload": True, "every_n_layers": 3}])
def test_options_of_newer_transformers_are_taken_over(options: dict[str, Any], reentrant: bool) -> None:
    """`offload` copies inputs of blocks to host memory on the stream that computes (and needs a GPU for that, of which
    there is none here); with `every_n_layers` the script recomputes only some."""
    model = MODELS["llama"]()
    model.activation_checkpointing_enable({"use_reentrant": reentrant}, **options)
    for limit in (OWN_BYTES + 3 * BLOCK_BYTES, "1GiB"):
        result, report = run(copy.deepcopy(model), {"gpu_memory": limit}, batches(STEPS))
        assert differences(result, expected("llama", reentrant, "clipping")) == []
        assert report["keep"] + report["mix"] + report["recompute"] == report["checkpointed"] == 6
    assert report["keep"] == 6


@pytest.mark.usefixtures("quick_interpreter")
def test_beside_kernels() -> None:
    results = []
    for activations in ("as_written", "auto"):
        model = checkpointed(to_bf16(llama(num_hidden_layers=2, hidden_size=32, intermediate_size=48)), False)
        slide = {"kernels": ["mlp"], "activations": activations, "gpu_memory": "1GiB"}
        results.append(run(model, slide, batches(LOOKS[0] + 1, length=4)))
    assert differences(results[0][0], results[1][0]) == []
    assert [report.get("keep", 0) for _, report in results] == [0, 2]


def test_what_is_counted_is_what_is_saved() -> None:
    """In a recomputation of either form, to the byte: what a block saves without checkpointing, but for weights and
    for what other blocks hold."""
    of: dict[bool, int] = {}
    for reentrant in (True, False):
        _, report = run(checkpointed(to_bf16(llama()), reentrant), {"gpu_memory": "1GiB"}, batches(STEPS))
        assert report["keep"] == 6
        of[reentrant] = report["kept_bytes"]

    model, saved = to_bf16(llama()), {}
    layers = layers_of(model)
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    beside: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    def given(_layer: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        beside.extend([*args, *kwargs["position_embeddings"], output])

    for layer in layers:
        layer.register_forward_hook(given, with_kwargs=True)
    embedded = model.model.embed_tokens(batches(1)[0]["input_ids"])
    positions = torch.arange(embedded.size(1))[None]
    with saved_tensors_hooks(note, lambda tensor: tensor):
        hidden, around = embedded, model.model.rotary_emb(embedded, positions)
        for layer in layers:
            hidden = layer(hidden, position_ids=positions, position_embeddings=around)
    others = weights | {tensor.untyped_storage().data_ptr() for tensor in beside}
    own = sum(nbytes for address, nbytes in saved.items() if address not in others)
    assert of == {True: own, False: own}


@FORMS
def test_what_a_block_saves_is_what_is_computed_again(monkeypatch: pytest.MonkeyPatch, reentrant: bool) -> None:
    """Neither what its forward waits for weights, nor what comes behind the last saved tensor, to which torch's
    re-entrant recomputation would go on."""
    bind_slot, wait = Bindings.bind_slot, 0.2

    def late(self: Bindings, unit: Any, direction: str) -> Any:
        time.sleep(wait if direction == "forward" else 0.0)
        return bind_slot(self, unit, direction)

    monkeypatch.setattr(Bindings, "bind_slot", late)
    model = with_hooks_inside(checkpointed(llama(num_hidden_layers=2), reentrant))
    with engine_for(model, config_of({"gpu_memory": OWN_BYTES})) as engine:
        train(engine, batches(LOOKS[0]))
        activations = engine.optimizer.runtime.parts.spare.activations
        (measured,) = activations.costs._measured.values()
        (keepable, *_) = activations.costs.keepable(measured.saved.shape)
        seconds = activations.times.seconds_of(keepable.order)
        assert 0 < seconds < wait
        assert keepable.seconds == measured.again * seconds
    assert 0.8 < measured.again < 1.0


def mixtral(reentrant: bool) -> nn.Module:
    """Its loss has a part of its own for the router logits, which a hook takes out of each block."""
    config = transformers.MixtralConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=4,
        output_router_logits=True,
        router_aux_loss_coef=10.0,
    )
    torch.manual_seed(0)
    return checkpointed(to_bf16(transformers.MixtralForCausalLM(config)), reentrant)


@FORMS
def test_a_loss_of_what_comes_out_of_blocks_is_the_script_s(reentrant: bool) -> None:
    """Behind the re-entrant form router logits have no gradient, and behind the other one they have."""
    data, found = batches(STEPS), {}
    for activations in ("as_written", "auto"):
        model = mixtral(reentrant)
        found[activations], report = run(model, {"activations": activations, "gpu_memory": "1GiB"}, data)
    assert differences(found["as_written"], found["auto"]) == []
    assert report["checkpointed"] == 2
    others, _ = run(mixtral(not reentrant), {"activations": "as_written"}, data)
    assert differences(found["as_written"], others) != []


def test_a_hook_of_the_script_may_compute_in_the_forward_alone() -> None:
    """The re-entrant form allows it, and the other one compares what both runs have saved."""
    found = []
    for activations in ("as_written", "auto"):
        model, seen = checkpointed(to_bf16(llama(num_hidden_layers=2)), True), list[torch.Tensor]()

        def note(_module: nn.Module, _args: Any, output: torch.Tensor, seen: list[torch.Tensor] = seen) -> None:
            if not in_backward():
                seen.append(output.float().square().mean())

        layers_of(model)[0].mlp.register_forward_hook(note)
        found.append(run(model, {"activations": activations, "gpu_memory": OWN_BYTES}, batches(2))[0])
        assert len(seen) == 2
    assert differences(*found) == []


@FORMS
def test_a_longer_batch_keeps_fewer_and_a_shorter_one_more(reentrant: bool) -> None:
    """Attention keeps no probabilities, so that a batch twice as long takes twice as much."""
    data = [batch for length in (32, 32, 32, 32, 64, 16, 32, 64) for batch in batches(1, length=length)]
    kept, slide = [], {"gpu_memory": 1_060_000, "activations": "whole_blocks"}
    with engine_for(checkpointed(llama(), reentrant), config_of(slide)) as engine:
        for batch in data:
            train(engine, [batch])
            kept.append(engine.optimizer.slide_stats().get("activations", {}).get("keep"))
    assert kept == [None, 0, 0, 3, 1, 6, 3, 1]


def test_graphs_that_wait_for_backward_count() -> None:
    """Two forwards before one backward, as in contrastive training: the limit holds for both together."""
    limit = OWN_BYTES + 4 * BLOCK_BYTES
    with engine_for(checkpointed(llama(), False), config_of({"gpu_memory": limit})) as engine:
        parts = engine.optimizer.runtime.parts
        spare = parts.spare
        for first, second in zip(batches(STEPS), batches(STEPS, seed=2), strict=True):
            losses = [engine(**first).loss]
            alive, kept = spare.activations.alive(), spare.activations.kept_bytes
            assert alive == kept
            losses.append(engine(**second).loss)
            assert parts.plan.gpu_bytes + spare.activations.alive() <= limit
            engine.backward(sum(losses))
            engine.step()
            assert spare.activations.alive() == 0
        assert kept > 0


def test_graphs_of_batches_that_differ_count() -> None:
    """Many of them, of long and short batches, before one backward: no more is kept than the limit has room for."""
    limit = OWN_BYTES + 4 * BLOCK_BYTES
    with engine_for(checkpointed(llama(), False), config_of({"gpu_memory": limit})) as engine:
        train(engine, batches(LOOKS[0], length=32))
        parts = engine.optimizer.runtime.parts
        losses, kept = [], 0
        for length in (16, 32, 8, 32, 8, 8):
            losses.append(engine(**batches(1, length=length)[0]).loss)
            kept += parts.spare.activations.kept_bytes
            assert kept and parts.plan.gpu_bytes + kept <= limit
        engine.backward(sum(losses))
        engine.step()


@FORMS
def test_blocks_that_are_called_twice_count_twice(reentrant: bool) -> None:
    limit, found = OWN_BYTES + 4 * BLOCK_BYTES, []
    for activations in ("as_written", "auto"):
        model, data = Twice(checkpointed(llama(), reentrant)), batches(STEPS)
        slide = {"gpu_memory": limit, "activations": activations, "defer_updates": True}
        with engine_for(model, config_of(slide)) as engine:
            spare = engine.optimizer.runtime.parts.spare
            losses = train(engine, data[:-1]).losses
            loss = engine(**data[-1]).loss
            found.append(Result(losses=[*losses, float(loss)]))
            assert engine.optimizer.runtime.parts.plan.gpu_bytes + spare.activations.alive() <= limit
            assert spare.activations.alive() == spare.activations.kept_bytes
            assert activations == "as_written" or spare.activations.statistics["keep"] == 3
            engine.backward(loss)
    assert differences(*found) == []


def test_two_engines_share_the_limit() -> None:
    """What one keeps for its backward is no room for the other one."""
    limit = 2 * OWN_BYTES + 4 * BLOCK_BYTES
    config = config_of({"gpu_memory": limit})
    with (
        engine_for(checkpointed(llama(), False), config) as one,
        engine_for(checkpointed(llama(), False), config) as two,
    ):
        parts = [engine.optimizer.runtime.parts for engine in (one, two)]
        for batch in batches(STEPS):
            losses = [engine(**batch).loss for engine in (one, two)]
            alive = [each.spare.activations.alive() for each in parts]
            assert sum(each.plan.gpu_bytes for each in parts) + sum(alive) <= limit
            for engine, loss in zip((one, two), losses, strict=True):
                engine.backward(loss)
                engine.step()
        assert sum(alive)


def test_what_is_kept_comes_free_with_its_graph() -> None:
    """A loss that nobody calls backward of, again and again."""
    with engine_for(checkpointed(llama(), False), config_of({"gpu_memory": "1GiB"})) as engine:
        train(engine, batches(STEPS))
        spare = engine.optimizer.runtime.parts.spare
        data = batches(3)
        gc.collect()
        before = sum(storages().values())
        for batch in data:
            loss = engine(**batch).loss
            assert spare.activations.alive() == spare.activations.kept_bytes > 0
            del loss
            gc.collect()
            assert spare.activations.alive() == 0 and sum(storages().values()) == before
        assert promote(engine.optimizer.runtime, 1) is not None
        train(engine, batches(1))


def test_a_recomputation_that_fails_measures_nothing() -> None:
    """What it has saved by then would be taken for all that a block saves."""
    model, data = checkpointed(llama(), False), batches(STEPS)
    with engine_for(model, config_of({"gpu_memory": "1GiB"})) as engine:

        def fail(*_args: Any) -> None:
            if in_backward():
                raise Failure

        handle = layers_of(model)[0].mlp.register_forward_pre_hook(fail)
        with pytest.raises(Failure):
            train(engine, data[:1])
        handle.remove()
        train(engine, data)
        failed = engine.optimizer.slide_stats()["activations"]
    assert failed == run(checkpointed(llama(), False), {"gpu_memory": "1GiB"}, data)[1]


def test_frozen_blocks_in_front_are_not_those_that_are_measured() -> None:
    """As people fine-tune the last blocks. No backward comes to the first ones, which save nothing."""

    data, limit = batches(STEPS), {"gpu_memory": "1GiB"}
    expected, _ = run(partly_frozen(llama()), {**limit, "activations": "as_written"}, data)
    result, report = run(partly_frozen(llama()), limit, data)
    assert differences(result, expected) == []
    assert report["keep"] == len(layers_of(llama())) - 2


@FORMS
def test_frozen_inputs_get_the_gradients_that_the_script_gives_them(reentrant: bool) -> None:
    """Re-entrant checkpointing gives none to a block without an input that has some."""
    results = []
    for activations in ("as_written", "auto"):
        model = llama()
        model.model.embed_tokens.requires_grad_(False)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        model.disable_input_require_grads()
        slide = {"activations": activations, "gpu_memory": "1GiB", "defer_updates": True}
        results.append(run(model, slide, batches(LOOKS[0] + 1))[0])
    assert differences(*results) == []


def _selective(*_args: Any) -> Any:
    return torch_checkpoint.noop_context_fn()


@pytest.mark.parametrize("options", [{"context_fn": _selective}, {"preserve_rng_state": False}], ids=["context", "rng"])
def test_other_checkpointing_is_left_alone(options: dict[str, Any]) -> None:
    _, report = run(checkpointed(llama(), False, **options), {"gpu_memory": "1GiB"}, batches(LOOKS[0] + 1))
    assert report["checkpointed"] == 0


def test_a_function_of_the_script_is_left_alone() -> None:
    calls = []

    def own(function: Any, *inputs: Any) -> Any:
        calls.append(function)
        return torch_checkpoint.checkpoint(function, *inputs, use_reentrant=False)

    model = checkpointed(llama(), False)
    for layer in layers_of(model):
        vars(layer)[FUNCTION] = own
    _, report = run(model, {"gpu_memory": "1GiB"}, batches(LOOKS[0] + 1))
    assert report["checkpointed"] == 0 and len(calls) == 6 * (LOOKS[0] + 1)


def test_it_can_be_switched_between_steps() -> None:
    """Off and on again by the script, in evaluation, and as Trainer does before it trains."""
    model, data = checkpointed(llama(), False), batches(STEPS + 2)
    with engine_for(model, config_of({"gpu_memory": "1GiB"})) as engine:
        report = lambda: engine.optimizer.slide_stats()["activations"]  # noqa: E731
        train(engine, data[:STEPS])
        assert report()["keep"] == 6
        model.eval()
        with torch.no_grad():
            engine(**data[0])
        engine(**data[0])  # with gradients: evaluation checkpoints nothing
        model.train()
        model.gradient_checkpointing_disable()
        train(engine, data[:1])
        assert report()["keep"] == 6 and not any(vars(layer)["gradient_checkpointing"] for layer in layers_of(model))
        checkpointed(model, True)
        train(engine, data[:1])
        assert report()["keep"] == 6


@pytest.mark.parametrize("error", [Failure, Interrupt])
def test_nothing_is_left_behind_an_exception(error: type[BaseException]) -> None:
    model, data = checkpointed(llama(), False), batches(STEPS)
    written = vars(layers_of(model)[0])[FUNCTION]
    with engine_for(model, config_of({"gpu_memory": "1GiB"})) as engine:
        train(engine, data)

        def fail(*_args: Any) -> None:
            raise error

        handle = layers_of(model)[3].mlp.register_forward_pre_hook(fail)
        with pytest.raises(error):
            engine(**data[0])
        handle.remove()
        model.eval()
        with torch.no_grad():
            engine(**data[0])
        assert all(vars(layer)[FUNCTION] is written for layer in layers_of(model))
        model.train()
        train(engine, data[:1])
        assert engine.optimizer.slide_stats()["activations"]["keep"] == 6


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_states_and_activations_share_the_limit(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which lane stands still is a matter of chance here, so that is given; the rest is as it comes."""
    monkeypatch.setattr(spare_memory, "_measured", lambda *_: Step("deferred", 2.0, {"compute": 1.0, "update": 0.5}))
    limit, data = 2_500_000, batches(STEPS * SCHEDULES[schedule][1])
    model = checkpointed(MODELS["llama"](), False)
    torch.manual_seed(3)
    with engine_for(model, config_of({"gpu_memory": limit, "gpu_states": "auto"}, schedule)) as engine:
        parts = engine.optimizer.runtime.parts

        def loss(engine: Any, batch: Batch) -> torch.Tensor:
            result = engine(**batch).loss
            assert parts.plan.gpu_bytes + parts.spare.activations.kept_bytes <= limit
            return result

        result = train(engine, data, loss)
        result.states = states_of(model)
        report = engine.optimizer.slide_stats()
    assert 0 < report["memory"]["promoted_units"] < report["memory"]["units"] and report["activations"]["keep"]
    assert differences(result, expected("llama", False, schedule)) == []


def test_slots_of_an_automatic_window_give_way_to_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """And one that the user has set stays, also when blocks that had gone past it come back."""
    monkeypatch.setattr(spare_memory, "_measured", lambda *_: Step("deferred", 2.0, {"compute": 1.0, "update": 0.5}))
    found = []
    for grows in (True, False):
        model = checkpointed(MODELS["llama"](), False)
        config = config_of({"window": 6, "gpu_memory": 2_220_000, "gpu_states": "auto"})
        torch.manual_seed(3)
        with engine_for(model, config) as engine:
            runtime = engine.optimizer.runtime
            parts, needs = runtime.parts, runtime.parts.plan.needs
            parts.plan = replace(parts.plan, needs=replace(needs, window=2 if grows else 6, window_grows=grows))
            parts.spare.room.states = RunningStates(runtime)
            result = train(engine, batches(STEPS))
            found.append((len(parts.plan.placement.promoted), parts.memory_report["slots"]))
            assert parts.plan.gpu_bytes + parts.spare.activations.kept_bytes <= 2_220_000
            assert parts.spare.room.states.move(frozenset())
            assert parts.memory_report["slots"] == (3 if grows else 6)
            result.states = states_of(model)
        assert differences(result, expected("llama", False, "clipping")) == []
    assert found == [(3, 3), (2, 5)]  # the outer module, and so many blocks


def test_slots_come_where_copies_take_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which lane is the busiest is given."""
    copying = Step("deferred", 2.0, {"compute": 1.0, "update": 0.1, "h2d": 1.9})
    monkeypatch.setattr(spare_memory, "_measured", lambda *_: copying)
    model = checkpointed(MODELS["llama"](), False)
    torch.manual_seed(3)
    limit = 2_000_000
    config = config_of({"window": "auto", "gpu_memory": limit, "gpu_states": "auto"}, "accumulation")
    with engine_for(model, config) as engine:
        parts, found = engine.optimizer.runtime.parts, []

        def loss(engine: Any, batch: Batch) -> torch.Tensor:
            found.append(len(parts.window.slots))
            return engine(**batch).loss

        result = train(engine, batches(2 * STEPS), loss)
        assert parts.plan.gpu_bytes + parts.spare.activations.kept_bytes <= limit
        assert engine.optimizer.slide_stats()["memory"]["slots"] == found[-1]
        result.states = states_of(model)
    assert found[0] == 3 < found[-1]
    assert differences(result, expected("llama", False, "accumulation")) == []


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_only_attention_that_keeps_its_probabilities_grows_with_the_length_squared(attention: str) -> None:
    """A batch four times as long needs four times as much where attention keeps none."""
    model = checkpointed(llama(attn_implementation=attention, max_position_embeddings=512), reentrant=False)
    with engine_for(model, config_of({"gpu_memory": "1GiB"})) as engine:
        train(engine, batches(STEPS, length=96))
        activations = engine.optimizer.runtime.parts.spare.activations
        short, long = Shape(2 * 96, 96), Shape(2 * 384, 384)
        squares = activations.costs.square_bytes(short)
        of_short, of_long = (sum(each.nbytes for each in activations.costs.keepable(shape)) for shape in (short, long))
    heads, probabilities = 4, 2 * 96 * 96
    if attention == "sdpa":
        assert squares == 0 and of_long == 4 * of_short
    else:
        assert squares >= 2 * heads * probabilities and 8 * of_short < of_long < 16 * of_short


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("seed", range(3))
def test_batches_of_any_length_fit(seed: int, attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All memory is in use, by states and by activations, and the longest batch that fits as written still does."""
    monkeypatch.setattr(spare_memory, "_measured", lambda *_: Step("deferred", 2.0, {"compute": 1.0, "update": 0.5}))
    model, random = checkpointed(llama(attn_implementation=attention), False), Random(seed)
    with engine_for(model, config_of({"gpu_states": "auto"})) as engine:
        parts = engine.optimizer.runtime.parts
        gpu = SmallGpu(parts, parts.plan.gpu_bytes + 3_000 * 2 * 64 + 600_000)
        gpu.take_place(monkeypatch)

        def loss(engine: Any, batch: Batch) -> torch.Tensor:
            result = engine(**batch).loss
            gpu.compute(batch)
            return result

        used: list[tuple[int, int]] = []
        for step in range(25):
            longest = 16 if step < LOOKS[1] else 64
            train(engine, batches(1, length=random.choice([8, 12, longest])), loss)
            used.append((len(parts.plan.placement.promoted), parts.spare.activations.statistics["keep"]))
        if attention == "eager":  # which may need memory by the length squared
            assert max(promoted for promoted, _ in used) > used[-1][0]  # they have gone back
        assert max(kept for _, kept in used) == 6
        gpu.compute(batches(1, length=64)[0])


def test_it_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="ds_slide"):
        run(checkpointed(llama(), False), {"gpu_memory": "1GiB"}, batches(STEPS))
    said = [record.getMessage() for record in caplog.records]
    assert sum("is taken over" in line for line in said) == 1
    assert sum("activations of 6 of 6 checkpointed blocks" in line for line in said) == 1
