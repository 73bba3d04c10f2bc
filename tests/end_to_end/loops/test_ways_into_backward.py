"""Each way into backward scales the loss once by the number of micro-batches."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from loops import Net, Run, assert_right, inputs, made, outcome, run_loop, running
from transformers.utils import ModelOutput

pytestmark = pytest.mark.usefixtures("one_rank")

MICRO_BATCHES = 2


class LossAndHidden(Net):
    """Returns the loss and what it was computed from, as the models of Hugging Face do."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        hidden = self.head(self.hidden(x))
        return hidden.float().pow(2).mean(), hidden


def engine_backward(run: Run) -> float:
    engine = run.start(made(LossAndHidden), accumulation=MICRO_BATCHES)
    for x in inputs(2 * MICRO_BATCHES):
        engine.backward(engine(x)[0])
        engine.step()
    return float(engine.get_global_grad_norm())


def trained(run: Run, build: type[Net], backward: Callable[[Any, Any], Any], **config: Any) -> float:
    """Two steps of `MICRO_BATCHES` micro-batches each. `backward` gets the engine and what the model returns."""
    engine = run.start(made(build), accumulation=MICRO_BATCHES, **config)
    for x in inputs(2 * MICRO_BATCHES):
        backward(engine, engine(x))
        engine.step()
    return float(engine.get_global_grad_norm())


def loss_backward(run: Run) -> float:
    return trained(run, LossAndHidden, lambda _, output: output[0].backward())


def loss_that_the_engine_scales(run: Run) -> float:
    def backward(engine: Any, output: Any) -> None:
        (engine.scale(output[0]) if run.system != "plain" else output[0]).backward()

    return trained(run, LossAndHidden, backward)


def loss_of_the_script(run: Run) -> float:
    return trained(run, LossAndHidden, lambda _, output: output[1].float().pow(2).mean().backward())


def sum_of_two_outputs(run: Run) -> float:
    return trained(run, LossAndHidden, lambda _, output: (output[0] + output[1].abs().mean()).backward())


def two_losses_of_one_forward(run: Run) -> float:
    def backward(_: Any, output: Any) -> None:
        output[0].backward(retain_graph=True)
        output[1].abs().mean().backward()

    return trained(run, LossAndHidden, backward)


def one_way_after_the_other(run: Run) -> float:
    ways = itertools.cycle((lambda engine, output: engine.backward(output[0]), lambda _, output: output[0].backward()))
    return trained(run, LossAndHidden, lambda engine, output: next(ways)(engine, output))


def boundaries_of_the_script(run: Run) -> float:
    engine = run.start(made(LossAndHidden), accumulation=MICRO_BATCHES)
    for number, x in enumerate(inputs(2 * MICRO_BATCHES)):
        engine.set_gradient_accumulation_boundary(number % MICRO_BATCHES == MICRO_BATCHES - 1)
        engine(x)[0].backward()
        engine.step()
    return float(engine.get_global_grad_norm())


def steps_of_the_script(run: Run) -> float:
    """With `managed_gradient_accumulation: false` nothing divides: each step is of one micro-batch here."""
    engine = run.start(made(LossAndHidden), managed_gradient_accumulation=False)
    for x in inputs(4):
        engine(x)[0].backward()
        engine.step()
    return float(engine.get_global_grad_norm())


def module_called_directly(run: Run) -> float:
    engine = run.start(made(LossAndHidden), accumulation=MICRO_BATCHES)
    for x in inputs(2 * MICRO_BATCHES):
        engine.module(x)[0].backward()
        engine.step()
    return float(engine.get_global_grad_norm())


def output_in_place(run: Run) -> float:
    return trained(run, LossAndHidden, lambda _, output: output[0].mul_(2.0).backward())


@dataclass(frozen=True)
class Frozen:
    loss: torch.Tensor
    logits: torch.Tensor


@dataclass
class HuggingFace(ModelOutput):
    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None


class Named(NamedTuple):
    loss: torch.Tensor
    logits: torch.Tensor


class InFrozen(LossAndHidden):
    def forward(self, x):
        return Frozen(*super().forward(x))


class InModelOutput(LossAndHidden):
    def forward(self, x):
        return HuggingFace(*super().forward(x))


class InNamedTuple(LossAndHidden):
    def forward(self, x):
        return Named(*super().forward(x))


class InNamespace(LossAndHidden):
    def forward(self, x):
        loss, logits = super().forward(x)
        return SimpleNamespace(loss=loss, logits=logits)


class InNestedDict(LossAndHidden):
    """The loss is there twice, and so is its hook."""

    def forward(self, x):
        loss, logits = super().forward(x)
        return {"losses": [loss, loss], "made": {"logits": (logits, None)}}


def dataclass_output(run: Run) -> float:
    return trained(run, InFrozen, lambda _, output: output.loss.backward())


def model_output(run: Run) -> float:
    def backward(_: Any, output: HuggingFace) -> None:
        assert type(output) is HuggingFace and output["logits"] is output.logits
        output.loss.backward()

    return trained(run, InModelOutput, backward)


def named_tuple_output(run: Run) -> float:
    def backward(_: Any, output: Named) -> None:
        assert type(output) is Named
        output.loss.backward()

    return trained(run, InNamedTuple, backward)


def namespace_output(run: Run) -> float:
    return trained(run, InNamespace, lambda _, output: (output.loss + output.logits.abs().mean()).backward())


def nested_output(run: Run) -> float:
    return trained(run, InNestedDict, lambda _, output: output["losses"][0].backward())


# Loop, and how it ends on stock.
LOOPS = [
    (engine_backward, "right"),
    (loss_backward, "right"),
    (loss_that_the_engine_scales, "right"),
    (loss_of_the_script, "right"),
    (sum_of_two_outputs, "right"),
    (two_losses_of_one_forward, "error"),
    (one_way_after_the_other, "right"),
    (boundaries_of_the_script, "right"),
    (steps_of_the_script, "right"),
    (module_called_directly, "error"),
    (output_in_place, "right"),
    (dataclass_output, "error"),
    (model_output, "right"),
    (named_tuple_output, "right"),
    (namespace_output, "error"),
    (nested_output, "right"),
]


@pytest.mark.by_turns(2)
@pytest.mark.parametrize("clip", [1.0, 0.0])
@pytest.mark.parametrize("loop", [loop for loop, _ in LOOPS])
def test_the_numbers_are_plain_torchs(loop, clip):
    assert_right(run_loop(loop, "slide", clip=clip), run_loop(loop, "plain", clip=clip))


@pytest.mark.thinned(3)
@pytest.mark.parametrize("loop, expected", LOOPS)
def test_stock_is_as_the_table_says(loop, expected):
    assert outcome(loop, "stock") == expected


def test_without_gradients_outputs_are_the_models_own():
    with running("slide", 1.0, {"window": 2}) as run:
        engine = run.start(made(InModelOutput))
        seen = []
        engine.module.register_forward_hook(lambda _module, _args, output: seen.append(output.logits))
        with torch.no_grad():
            assert engine(inputs(1)[0]).logits is seen[0]
