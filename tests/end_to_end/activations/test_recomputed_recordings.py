"""Blocks that stream, or whose activations find no memory, replay their forward, recomputation and backward. They have
the bits of blocks that are recomputed by operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from activation_runs import MODELS, SCHEDULES, checkpointed, config_of, layers_of, llama, run
from captured_loops import LOOPS
from captured_runs import STEPS, STREAMED, Train, both, captures_of, counted_replays
from harness import Result, batches, differences, engine_for, train

from ds_slide.errors import SlideError
from ds_slide.runtime.captured import shapes as shapes_module
from ds_slide.runtime.captured.captures import Phase
from ds_slide.runtime.captured.graphs import Graph
from ds_slide.runtime.captured.shapes import STEADY

pytest.importorskip("transformers")
pytestmark = [pytest.mark.usefixtures("one_rank")]


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[Graph]:
    """All replays, of forwards and backwards."""
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


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_loops_as_people_write_them(loop: Train, replays: list[Graph]) -> None:
    expected, result = both(loop, slide=STREAMED)
    assert differences(result, expected) == []
    assert replays


def between_forward_and_backward(do: Callable[[Any], Any], undo: Callable[[Any], Any], first: int = STEPS) -> Train:
    """Something that a script does then, from the step `first` on."""

    def training(engine: Any) -> Result:
        result = Result()
        for number, batch in enumerate(batches(STEPS + 3)):
            loss = engine(**batch).loss
            if number >= first:
                do(engine)
            engine.backward(loss)
            if number >= first:
                undo(engine)
            engine.step()
            result.losses.append(loss.item())
        return result

    return training


def scale(engine: Any) -> None:
    for layer in layers_of(engine.module):
        layer.written = layer.self_attn.scaling
        layer.self_attn.scaling = 0.1


def scale_back(engine: Any) -> None:
    for layer in layers_of(engine.module):
        layer.self_attn.scaling = vars(layer).pop("written")


def train_weight(trains: bool) -> Callable[[Any], Any]:
    return lambda engine: layers_of(engine.module)[2].mlp.up_proj.weight.requires_grad_(trains)


def evaluate(engine: Any) -> None:
    engine.eval()
    with torch.no_grad():
        engine(**batches(1, seed=9)[0])
        engine.module.generate(batches(1)[0]["input_ids"][:, :4], max_new_tokens=3, pad_token_id=0)


def graphs_of_two_states(engine: Any) -> Result:
    """The backward of the newer graph records, where the block has its state of before again."""
    result = Result()
    for first, second in zip(batches(STEPS + 2), batches(STEPS + 2, seed=5), strict=True):
        scale(engine)
        older = engine(**first).loss
        scale_back(engine)
        newer = engine(**second).loss
        engine.backward(newer)
        engine.backward(older)
        engine.step()
        result.losses += [older.item(), newer.item()]
    return result


def in_turn(engine: Any) -> Result:
    """Two graphs, of one shape and of two, which have their backwards in either order."""
    result = train(engine, batches(STEPS))
    result.losses += train(engine, batches(STEPS, length=16)).losses
    for length in (32, 16):
        for first, second in zip(batches(2, seed=5), batches(2, seed=6, length=length), strict=True):
            losses = [engine(**first).loss, engine(**second).loss]
            for each in losses:
                engine.backward(each)
            engine.step()
            losses += [engine(**first).loss, engine(**second).loss]
            for each in losses[:1:-1]:
                engine.backward(each)
            engine.step()
            result.losses += [each.item() for each in losses]
    return result


def from_the_middle(engine: Any) -> Result:
    """A loss of hidden states alone, and one of hidden states and logits."""
    result = train(engine, batches(STEPS))
    for share in (0.0, 1.0, 0.0):
        output = engine(**batches(1, seed=5)[0], output_hidden_states=True)
        loss = output.hidden_states[3].float().square().mean()
        loss = loss + share * output.loss if share else loss
        engine.backward(loss)
        engine.step()
        result.losses.append(loss.item())
    return result


def raising(where: str) -> Train:
    """A script's hook raises in the middle of some forwards or backwards."""

    def fail(*_: Any) -> None:
        raise ValueError("of the script")

    def training(engine: Any) -> Result:
        result = train(engine, batches(STEPS))
        layer = layers_of(engine.module)[3]
        for batch in batches(3, seed=5):
            hooked: Any = (
                layer.register_forward_pre_hook if where == "forward" else layer.mlp.up_proj.weight.register_hook
            )
            handle = hooked(fail)
            with pytest.raises(ValueError, match="of the script"):
                engine.backward(engine(**batch).loss)
            handle.remove()
            engine.zero_grad()
            result.losses += train(engine, [batch]).losses
        return result

    return training


def in_autocast(engine: Any) -> Result:
    """Around some forwards, and around some backwards."""
    result = train(engine, batches(STEPS))
    for batch in batches(2, seed=4):
        for forward in (True, False):
            with torch.autocast("cpu", torch.bfloat16, enabled=forward):
                loss = engine(**batch).loss
            with torch.autocast("cpu", torch.bfloat16, enabled=not forward):
                engine.backward(loss)
            engine.step()
            result.losses.append(loss.item())
    return result


def many_lengths(engine: Any) -> Result:
    """More than have recordings at a time."""
    result = train(engine, batches(STEPS))
    for length in (16, 24, 40, 48, 56, 20):
        result.losses += train(engine, batches(STEADY + 3, seed=length, length=length)).losses
        assert len(captures_of(engine).shapes.recorded) == (2 if captures_of(engine).phase is Phase.RECORDING else 0)
    return result


OTHER_LOOPS: dict[str, Train] = {
    "state changed before backward": between_forward_and_backward(scale, scale_back),
    "state changed before the backward that records": between_forward_and_backward(scale, scale_back, 0),
    "weight frozen before backward": between_forward_and_backward(train_weight(False), train_weight(True)),
    "evaluation before backward": between_forward_and_backward(evaluate, lambda engine: engine.train()),
    "graphs of two states": graphs_of_two_states,
    "backwards in turn": in_turn,
    "loss of a middle block": from_the_middle,
    "exceptions in forward": raising("forward"),
    "exceptions in backward": raising("backward"),
    "autocast": in_autocast,
    "many lengths": many_lengths,
}  # fmt: skip


@pytest.mark.parametrize("loop", OTHER_LOOPS)
def test_loops_that_change_what_is_recorded(loop: str, replays: list[Graph], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shapes_module, "RECORDED", 2)
    expected, result = both(OTHER_LOOPS[loop], slide=STREAMED)
    assert differences(result, expected) == []
    assert bool(replays) == ("records" not in loop)


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
