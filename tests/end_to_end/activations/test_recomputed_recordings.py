"""Blocks that stream, or whose activations find no memory, replay their forward, recomputation and backward. They have
the bits of blocks that are recomputed by operators."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import activation_runs
import pytest
import torch
from activation_runs import (
    MODELS,
    SCHEDULES,
    Output,
    Twice,
    checkpointed,
    config_of,
    layers_of,
    partly_frozen,
    run,
    with_hooks_inside,
)
from captured_runs import STEPS, STREAMED, both, captures_of, counted_replays, weights_as_in_graphs
from harness import Result, batches, differences, engine_for, llama, train

from ds_slide.errors import SlideError
from ds_slide.runtime.captured.captures import Phase
from ds_slide.runtime.captured.checks import Weights
from ds_slide.runtime.captured.graphs import Graph
from ds_slide.runtime.captured.recomputed import RecomputedBlock
from ds_slide.runtime.captured.shapes import STEADY
from ds_slide.runtime.core.calls import in_backward
from ds_slide.runtime.memory.shortage import Shortage
from ds_slide.runtime.memory.tier_moves import RunningStates

pytest.importorskip("transformers")
pytestmark = [pytest.mark.usefixtures("one_rank")]


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[Graph]:
    """All replays, of forwards and backwards. They read weights as CUDA graphs do."""
    weights_as_in_graphs(monkeypatch)
    return counted_replays(monkeypatch)


def plain(name: str) -> Any:
    """A model of `MODELS` that draws no random numbers."""
    model = MODELS[name]()
    for each in model.modules():
        for what in ("attention_dropout",):
            if hasattr(each, what):
                setattr(each, what, 0.0)
        if isinstance(each, torch.nn.Dropout):
            each.p = 0.0
    return model


@pytest.mark.parametrize(
    ("first", "width"),
    [(1, 160), (1, None), (0, None)],
    ids=["layers of another kind", "equal layers", "equal layers, of which one that communicates is measured"],
)
def test_blocks_that_communicate_are_not_recorded_beside_others(
    first: int, width: int | None, replays: list[Graph], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint ends before the collective at a block's end. On a rank that records, it would run once more."""
    from transformers.models.llama.modeling_llama import LlamaMLP

    all_reduce, counts = torch.distributed.all_reduce, [0]

    def counted(*given: Any, **options: Any) -> Any:
        counts[-1] += 1
        return all_reduce(*given, **options)

    class Talking(LlamaMLP):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            result = super().forward(hidden)
            torch.distributed.all_reduce(result.detach().clone())
            return result

    def build() -> Any:
        model: Any = llama()
        sizes = copy.copy(model.config)
        sizes.intermediate_size = width or sizes.intermediate_size
        for layer in layers_of(model)[first::2]:
            layer.mlp = Talking(sizes)
        return model

    def training(engine: Any) -> Result:
        monkeypatch.setattr(torch.distributed, "all_reduce", counted)
        result = train(engine, batches(STEPS + 2))
        counts.append(0)
        assert bool(replays) == bool(captures_of(engine).recorded)
        return result

    expected, result = both(training, build, slide=STREAMED)
    assert differences(result, expected) == []
    assert replays
    assert counts[0] == counts[1] > 0


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("window", [2, 3, "auto"])
@pytest.mark.parametrize(("name", "schedule"), [("llama", each) for each in SCHEDULES] + [("adapters", "clipping")])
def test_streamed_blocks_have_the_same_bits(name: str, schedule: str, window: Any, replays: list[Graph]) -> None:
    count = SCHEDULES[schedule][1]
    data = batches((STEPS + 2) * count)
    slide = {**STREAMED, "window": window}
    expected, report = run(plain(name), {**slide, "captured_blocks": False}, data, schedule)
    assert not replays
    result, report = run(plain(name), {**slide, "captured_blocks": True}, data, schedule)
    assert differences(result, expected) == []
    assert report["replayed"] == report["recompute"] == len(layers_of(plain(name)))
    assert len(replays) > 3 * report["replayed"]


@pytest.mark.parametrize("reentrant", [True, False, None], ids=["reentrant", "non-reentrant", "unasked"])
def test_a_block_that_reads_the_weight_of_another_module(reentrant: bool | None, replays: list[Graph]) -> None:
    """The weight has its gradient also in the step that finds this out."""

    def build() -> Any:
        model = llama() if reentrant is None else checkpointed(llama(), reentrant)
        for layer in layers_of(model)[:2]:
            layer.mlp.act_fn = Gated(model.model.norm.weight)
        return model

    expected, result = both(lambda engine: train(engine, batches(STEPS + 2)), build, slide=STREAMED)
    assert differences(result, expected) == []
    assert replays


class Gated(torch.nn.Module):
    def __init__(self, weight: Any) -> None:
        super().__init__()
        self.of_another = (weight,)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.silu(hidden) * self.of_another[0][0]


def test_attention_with_dropout_is_not_recorded(replays: list[Graph]) -> None:
    expected, result = both(lambda engine: train(engine, batches(STEPS + 2)), MODELS["llama"], slide=STREAMED)
    assert differences(result, expected) == []
    assert not replays


@pytest.mark.parametrize("reentrant", [True, False, None], ids=["reentrant", "non-reentrant", "unasked"])
def test_second_derivatives_are_refused_by_name(reentrant: bool | None) -> None:
    model = llama() if reentrant is None else checkpointed(llama(), reentrant)
    with engine_for(model, config_of({**STREAMED, "captured_blocks": True})) as engine:
        train(engine, batches(STEPS))
        loss = engine(**batches(1)[0]).loss
        embedding = engine.module.get_input_embeddings().weight
        with pytest.raises(SlideError, match="create_graph=True goes through model"):
            torch.autograd.grad(loss, embedding, create_graph=True, allow_unused=True)
        train(engine, batches(1))


def longer(engine: Any) -> Result:
    return train(engine, batches((STEPS + 3) * engine.gradient_accumulation_steps()))


def frozen() -> Any:
    """Nothing that the first block gets needs a gradient, and one block has no trained weights."""
    model = llama()
    for each in (model.get_input_embeddings(), layers_of(model)[2]):
        each.requires_grad_(False)
    return model


@pytest.mark.by_turns(2)
@pytest.mark.parametrize("schedule", ["immediate", "accumulation"])
@pytest.mark.parametrize(
    ("build", "slide"),
    [
        (lambda: Twice(llama()), {}),
        (lambda: Twice(activation_runs.llama()), {"window": 4}),
        (lambda: with_hooks_inside(llama()), {}),
        (frozen, {}),
        (llama, {"debug": {"lane_delay_ms": 5.0, "seed": 1}}),
    ],
    ids=["twice", "twice in four slots", "hooks inside", "frozen", "delays"],
)
def test_models_and_windows(build: Any, slide: Any, schedule: str, replays: list[Graph]) -> None:
    """A block that is used twice finds its weights in another slot, now and then."""
    expected, result = both(longer, build, schedule, slide={**STREAMED, **slide})
    assert differences(result, expected) == []
    assert replays


def test_weights_on_ssd(replays: list[Graph], tmp_path: Path) -> None:
    expected, result = both(longer, slide=STREAMED, folder=tmp_path)
    assert differences(result, expected) == []
    assert replays


@pytest.mark.parametrize("where", ["forward", "backward", "between"])
def test_weights_that_move(where: str, replays: list[Graph]) -> None:
    """A slot is given up, or states go to the GPU and back. The blocks are recorded anew where their weights lie."""

    def training(engine: Any) -> Result:
        runtime, layers, freed = engine.optimizer.runtime, layers_of(engine.module), []
        states = RunningStates(runtime)
        result = train(engine, batches(1))
        assert states.move(frozenset(), len(layers)) is not None
        result.losses += train(engine, batches(STEPS)).losses

        def give_up(*_: Any) -> None:
            runtime.parts.context.lanes.h2d.drain()
            freed.append(states.give_up_slot())

        hooked: Any = layers[3].register_forward_hook
        handle = (hooked if where == "forward" else layers[3].mlp.up_proj.weight.register_hook)(give_up)
        if where == "between":
            assert states.move(frozenset({1, 2, 3, 4}), 3) is not None
            handle.remove()
            result.losses += train(engine, batches(STEPS, seed=4)).losses
            assert states.move(frozenset(), 4) is not None
        result.losses += train(engine, batches(1, seed=5)).losses
        handle.remove()
        assert any(freed) == (where != "between")
        result.losses += train(engine, batches(4 * STEADY + 2, seed=6)).losses
        replays.clear()
        result.losses += train(engine, batches(1, seed=7)).losses
        if captures_of(engine).phase is Phase.RECORDING:
            assert len(replays) == 3 * len(layers)
        return result

    expected, result = both(training, activation_runs.llama, slide={**STREAMED, "window": "auto"})
    assert differences(result, expected) == []
    assert replays


class Counting(torch.nn.Module):
    """Counts its calls once the script wants it, and computes with their number."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))
        self.calls = 0
        self.counts = ""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.counts == "buffer":
            self.seen += 1
        elif self.counts:
            self.calls += 1
        return torch.nn.functional.silu(hidden) * (1 + self.calls + self.seen.to(hidden.dtype))


@pytest.mark.parametrize("counts", ["buffer", "attribute"])
def test_a_block_that_begins_to_change_its_state(counts: str, replays: list[Graph]) -> None:
    def build() -> Any:
        model = llama()
        for layer in layers_of(model)[2:4]:
            layer.mlp.act_fn = Counting()
        return model

    def training(engine: Any) -> Result:
        result, counting = train(engine, batches(STEPS)), layers_of(engine.module)[2].mlp.act_fn
        for number, batch in enumerate(batches(5, seed=4)):
            counting.counts = counts if number in (1, 3) else ""
            result.losses += [*train(engine, [batch]).losses, counting.calls, float(counting.seen)]
        return result

    expected, result = both(training, build, slide=STREAMED)
    assert differences(result, expected) == []
    assert sum(result.losses[-2:]) == 2
    assert replays


class WithScores(torch.nn.Module):
    """Its blocks return a tensor without a gradient, too."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.scores: list[float] = []
        kind = type(layers_of(inner)[0])

        class Layer(kind):  # type: ignore[misc, valid-type]
            returns: Any = tuple

            def forward(self, hidden: torch.Tensor, **given: Any) -> Any:
                hidden = torch.nn.functional.dropout(super().forward(hidden, **given), self.dropped)
                return self.returns((hidden, hidden.detach().float().mean()))

        for layer in layers_of(inner):
            layer.__class__ = Layer
            layer.dropped = 0.0

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        model = self.inner.model
        hidden = model.embed_tokens(input_ids)
        around = model.rotary_emb(hidden, torch.arange(hidden.size(1))[None])
        for layer in model.layers:
            hidden, score = layer(hidden, position_embeddings=around)
            self.scores.append(float(score.numpy()))
        logits = self.inner.lm_head(model.norm(hidden))
        return Output(self.inner.loss_function(logits, labels, logits.size(-1)))


class Pair:
    """No plain container."""

    def __init__(self, both: Any) -> None:
        self.hidden, self.score = both

    def __iter__(self) -> Any:
        return iter((self.hidden, self.score))


@pytest.mark.by_turns(2)
@pytest.mark.parametrize("returns", [tuple, Pair])
@pytest.mark.parametrize("dropped", [0.0, 0.1])
def test_results_that_cannot_be_recorded(returns: type, dropped: float) -> None:
    def build() -> Any:
        model = WithScores(llama())
        for layer in layers_of(model):
            layer.returns, layer.dropped = returns, dropped
        return model

    def training(engine: Any) -> Result:
        result = train(engine, batches(STEPS + 2))
        result.losses += engine.module.scores
        return result

    expected, result = both(training, build, slide=STREAMED)
    assert differences(result, expected) == []


def test_blocks_are_replayed_where_memory_is_so_tight_that_operators_may_run_again(
    replays: list[Graph], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Operators run under a mode of the dispatcher then, which would leave the recordings unused."""
    under_the_mode = []

    def tight(self: Shortage, shape: Any, room: float) -> None:  # noqa: ARG001
        self._trains = True
        if self._activations.captures.recorded:
            self._proof.is_open = True
            self.retrying.enter()
            under_the_mode.append(len(replays))

    monkeypatch.setattr(Shortage, "begin_training", tight)
    data, slide = batches(2 * (STEPS + 2)), {**STREAMED, "gpu_memory": "1GiB"}
    expected, _ = run(plain("llama"), {**slide, "captured_blocks": False}, data, "accumulation")
    result, report = run(plain("llama"), {**slide, "captured_blocks": True}, data, "accumulation")
    assert differences(result, expected) == []
    assert report["replayed"] == len(layers_of(plain("llama")))
    # A forward, a recomputation and a backward of each block.
    assert under_the_mode[-1] - under_the_mode[-2] == 3 * report["replayed"]


@pytest.mark.usefixtures("replays")
def test_blocks_behind_frozen_ones_are_replayed() -> None:
    """All but the first one, whose input needs no gradient."""

    data = batches(STEPS + 2)
    expected, _ = run(partly_frozen(plain("llama")), {**STREAMED, "captured_blocks": False}, data)
    result, report = run(partly_frozen(plain("llama")), {**STREAMED, "captured_blocks": True}, data)
    assert differences(result, expected) == []
    assert report["replayed"] == len(layers_of(plain("llama"))) - 3


def test_blocks_are_recorded_once_operators_do_not_run_again_any_more(
    replays: list[Graph], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mode is in force in the first steps that may record. Nothing is recorded under it."""
    under_the_mode = []

    def tight(self: Shortage, shape: Any, room: float) -> None:  # noqa: ARG001
        self._trains = True
        captures = self._activations.captures
        self._proof.is_open = len(under_the_mode) < 2 and captures.recomputes and not captures.recorded
        if self._proof.is_open:
            self._activations.allow_giving_up()
            self.retrying.enter()
            under_the_mode.append(captures)

    monkeypatch.setattr(Shortage, "begin_training", tight)
    slide = {**STREAMED, "gpu_memory": "1GiB", "captured_blocks": True}
    _, report = run(plain("llama"), slide, batches(STEPS + 4), "clipping")
    assert report["replayed"] == len(layers_of(plain("llama"))) and len(under_the_mode) == 2 and replays


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_recordings_may_be_given_up_for_operators_but_not_in_a_replay(
    where: str, replays: list[Graph], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Operators compute blocks whose weights lie elsewhere, and may need the memory of the recordings."""
    in_replays, left = [], []
    replay, operators = Graph.replay, RecomputedBlock._operators

    def replaying(self: Graph) -> None:
        in_replays.append(self._memory.running)
        replay(self)

    def operating(self: RecomputedBlock, *given: Any) -> Any:
        if not left and in_backward() == (where == "backward"):
            assert captures._memory is not None
            captures.give_up()
            left.append(captures._memory)
        return operators(self, *given)

    monkeypatch.setattr(Graph, "replay", replaying)

    def training(engine: Any) -> Result:
        nonlocal captures
        captures = captures_of(engine)
        train(engine, batches(STEPS))
        if replays:
            monkeypatch.setattr(Weights, "are_there", lambda _: False)
            monkeypatch.setattr(RecomputedBlock, "_operators", operating)
        return train(engine, batches(2))

    captures: Any = None
    expected, result = both(training, llama, slide=STREAMED)
    assert differences(result, expected) == []
    assert left == [None] and set(in_replays) == {1}
