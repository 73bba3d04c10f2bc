"""`copy.deepcopy` of a model that an engine has is a plain model: for an average of weights, or as a reference."""

from __future__ import annotations

import copy
from typing import Any

import deepspeed
import pytest
import torch
from loops import Block, Net, Run, assert_right, inputs, made, run_loop, running
from torch import nn

pytestmark = pytest.mark.usefixtures("one_rank")

SLIDES = pytest.mark.parametrize(
    "slide", [{"window": 2}, {}, {"window": 2, "gpu_states": "1GiB"}], ids=["window of 2", "default window", "gpu"]
)
DECAY = 0.5


def train(engine: Any, steps: int, seed: int = 3) -> None:
    for x in inputs(steps, seed=seed):
        engine.backward(engine(x))
        engine.step()


def averaging(run: Run) -> list[float]:
    """An average of the weights, as diffusion models keep it."""
    engine = run.start(made(Net))
    train(engine, 1)
    average, losses = copy.deepcopy(engine.module), []
    for x in inputs(3, seed=5):
        engine.backward(engine(x))
        engine.step()
        with torch.no_grad():
            for kept, parameter in zip(average.parameters(), engine.module.parameters(), strict=True):
                kept.lerp_(run.values(parameter), 1 - DECAY)
            losses.append(float(average(x)))
    return losses


def reference(run: Run) -> list[float]:
    """A reference model that stays as it is while the other one is trained."""
    model = made(Net)
    engine = run.start(model)
    train(engine, 2)
    kept = copy.deepcopy(model).eval().requires_grad_(False)
    x = inputs(1)[0]
    before = float(kept(x))
    train(engine, 3)
    with torch.no_grad():
        return [before, float(kept(x)), float(engine(x))]


def a_part(run: Run) -> list[float]:
    """One block, and the list of all of them."""
    engine = run.start(made(Net))
    train(engine, 2)
    block, blocks = copy.deepcopy(engine.module.blocks[1]), copy.deepcopy(engine.module.blocks)
    x = inputs(1)[0]
    train(engine, 2)
    return [float(block(x).sum()), float(blocks[2](x).sum())]


def a_copy_that_trains(run: Run) -> list[float]:
    """By itself, and the original behind it."""
    engine = run.start(made(Net))
    train(engine, 2)
    other = copy.deepcopy(engine.module)
    sgd = torch.optim.SGD(other.parameters(), lr=1e-2)
    losses = []
    for x in inputs(3, seed=9):
        loss = other(x)
        loss.backward()
        sgd.step()
        sgd.zero_grad()
        losses.append(float(loss))
    train(engine, 2)
    return losses


def a_copy_of_a_copy_in_a_wrapper(run: Run) -> list[float]:
    engine = run.start(made(Net))
    train(engine, 2)
    average = torch.optim.swa_utils.AveragedModel(copy.deepcopy(engine.module))
    train(engine, 2)
    x = inputs(1)[0]
    return [float(average(x)), float(copy.deepcopy(nn.ModuleList([engine.module]))[0](x))]


def copies_of_parameters(run: Run) -> list[float]:
    """A penalty on the distance from where training began."""
    engine = run.start(made(Net))
    train(engine, 1)
    anchors = copy.deepcopy(dict(engine.module.named_parameters()))
    train(engine, 2)
    with torch.no_grad():
        pairs = [(anchors[name], run.values(parameter)) for name, parameter in engine.module.named_parameters()]
        return [float((now - anchor).norm()) for anchor, now in pairs]


def an_engine_of_a_copy(run: Run) -> None:
    """A second engine beside the first one."""
    engine = run.start(made(Net))
    train(engine, 2)
    train(run.start(copy.deepcopy(engine.module)), 2)
    train(engine, 2)


LOOPS = [
    averaging,
    reference,
    a_part,
    a_copy_that_trains,
    a_copy_of_a_copy_in_a_wrapper,
    copies_of_parameters,
    an_engine_of_a_copy,
]


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("clip", [1.0, 0.0])
@SLIDES
@pytest.mark.parametrize("loop", LOOPS)
def test_the_numbers_are_plain_torchs(loop, slide, clip):
    found, expected = run_loop(loop, "slide", clip=clip, slide=slide), run_loop(loop, "plain", clip=clip)
    assert_right(found, expected)


class Tied(Net):
    """Two names for one parameter, a buffer, and a hook and a frozen parameter of the script's."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].up.weight = self.blocks[0].up.weight
        self.head.bias.requires_grad_(False)
        self.register_buffer("seen", torch.ones(3))
        self.inp.register_forward_hook(_double)


def _double(_module: nn.Module, _args: Any, output: torch.Tensor) -> torch.Tensor:
    return output * 2


def test_the_copy_is_as_deepcopy_of_plain_torch_has_it() -> None:
    with running("slide", 1.0, {"window": 2}) as run:
        plain = made(Tied)
        engine = run.start(made(Tied))
        copied = copy.deepcopy(engine.module)
        with torch.no_grad():
            expected = float(engine(inputs(1)[0]))
        assert type(copied) is Tied and float(copied(inputs(1)[0])) == pytest.approx(expected, rel=1e-6)
        for (name, ours), (plains_name, parameter) in zip(
            copied.named_parameters(), plain.named_parameters(), strict=True
        ):
            assert name == plains_name and type(ours) is nn.Parameter and torch.equal(ours, parameter)
            assert ours.requires_grad == parameter.requires_grad and not vars(ours)
        assert copied.blocks[0].up.weight is copied.blocks[1].up.weight
        for module, before in zip(copied.modules(), plain.modules(), strict=True):
            assert vars(module).keys() == vars(before).keys()
            assert list(module._forward_pre_hooks.values()) == list(before._forward_pre_hooks.values())
            assert list(module._forward_hooks.values()) == list(before._forward_hooks.values())
        assert torch.equal(copied.seen, torch.ones(3)) and copied.seen is not engine.module.seen


@pytest.mark.parametrize("when", ["in a gather", "after destroy"])
def test_other_moments(when: str) -> None:
    """The copy has what a script has written to gathered weights; and the weights outlive the engine."""
    with running("slide", 1.0, {"window": 2}) as run:
        model = made(Net)
        engine = run.start(model)
        train(engine, 1)
        if when == "in a gather":
            with deepspeed.zero.GatheredParameters(list(model.parameters())):
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.mul_(2)
                expected = [parameter.detach().clone() for parameter in model.parameters()]
                copied = copy.deepcopy(model)
        else:
            expected = [run.values(parameter) for parameter in model.parameters()]
            engine.destroy()
            copied = copy.deepcopy(model)
    for ours, value in zip(copied.parameters(), expected, strict=True):
        assert torch.equal(ours, value)


def test_a_block_alone_has_its_own_way_to_be_copied() -> None:
    class Own(Block):
        def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
            return nn.Identity()

    with running("slide", 1.0, {"window": 2}) as run:
        engine = run.start(made(lambda: Net(block=Own)))
        assert [type(block) for block in copy.deepcopy(engine.module.blocks)] == [nn.Identity] * 4
