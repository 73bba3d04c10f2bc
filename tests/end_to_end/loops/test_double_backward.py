"""Second derivatives, by `create_graph=True`, and the transforms of torch that go through the model.

The graph of a backward goes through the blocks from the first to the last, when a window of two slots holds others.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from loops import Net, Run, assert_right, inputs, made, run_loop, running
from torch import nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from ds_slide.errors import SlideError

pytestmark = pytest.mark.usefixtures("one_rank")

SLIDES = pytest.mark.parametrize(
    "slide", [{"window": 2}, {}, {"gpu_states": "1GiB"}], ids=["window 2", "default", "on GPU"]
)


def gradient_penalty(run: Run) -> float:
    """Of the inputs' gradient, as critics have it."""
    engine = run.start(made(Net))
    for x in inputs(3):
        x.requires_grad_()
        loss = engine(x)
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        engine.backward(loss + 100 * gradient.pow(2).sum())
        engine.step()
    return float(engine.get_global_grad_norm())


class Forces(Net):
    """Energies, and forces as their derivative, made in the forward."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        positions = x.clone().requires_grad_()
        energy = self.head(self.hidden(positions).tanh()).tanh().sum()
        return energy, torch.autograd.grad(energy, positions, create_graph=True)[0]


def forces(run: Run) -> float:
    engine = run.start(made(Forces))
    for x in inputs(3):
        energy, force = engine(x)
        (energy.pow(2) + 10 * force.pow(2).mean()).backward()
        engine.step()
    return float(engine.get_global_grad_norm())


def forces_alone(run: Run) -> float:
    """Weights of the last block get no gradient from its own backward."""
    engine = run.start(made(Forces))
    for x in inputs(3):
        engine.backward(10 * engine(x)[1].pow(2).mean())
        engine.step()
    return float(engine.get_global_grad_norm())


class Checkpointed(Net):
    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


def penalty_through_checkpoints(run: Run) -> float:
    engine = run.start(made(Checkpointed))
    for x in inputs(3):
        x.requires_grad_()
        loss = engine(x)
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        engine.backward(loss + 100 * gradient.pow(2).sum())
        engine.step()
    return float(engine.get_global_grad_norm())


def penalty_of_the_penalty(run: Run) -> float:
    """A third derivative."""
    engine = run.start(made(Net))
    for x in inputs(3):
        x.requires_grad_()
        (first,) = torch.autograd.grad(engine(x), x, create_graph=True)
        (second,) = torch.autograd.grad(first.pow(2).sum(), x, create_graph=True)
        engine.backward(100 * (first.pow(2).sum() + second.pow(2).sum()))
        engine.step()
    return float(engine.get_global_grad_norm())


LOOPS = [gradient_penalty, forces, forces_alone, penalty_through_checkpoints, penalty_of_the_penalty]


@pytest.mark.by_turns(3)
@SLIDES
@pytest.mark.parametrize("clip", [1.0, 0.0])
@pytest.mark.parametrize("loop", LOOPS)
def test_the_numbers_are_plain_torchs(loop, clip, slide):
    assert_right(run_loop(loop, "slide", clip=clip, slide=slide), run_loop(loop, "plain", clip=clip))


def test_a_graph_of_a_backward_that_is_older_than_a_step_is_refused():
    def loop(run: Run) -> None:
        engine = run.start(made(Net))
        first, second, _, _ = inputs()
        x = first.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(engine(x), x, create_graph=True)
        engine.backward(engine(second))
        engine.step()
        gradient.pow(2).sum().backward()

    for system in ("plain", "slide"):
        with running(system, 1.0, {"window": 2}) as run, pytest.raises(RuntimeError, match="inplace operation"):
            loop(run)


@SLIDES
@pytest.mark.parametrize(
    "transformed",
    [
        lambda model, x: torch.func.jvp(model, (x,), (torch.ones_like(x),))[1],
        lambda model, x: torch.func.grad(model)(x),
        lambda model, x: torch.func.vmap(torch.func.grad(model))(x),
        lambda model, x: torch.func.jacrev(model)(x),
    ],
    ids=["jvp", "grad", "vmap of grad", "jacrev"],
)
def test_transforms_that_cannot_be_are_refused(transformed, slide):
    with running("slide", 1.0, slide) as run:
        engine = run.start(made(Net))
        x = inputs()[0]
        for model in (engine.module, nn.Sequential(*engine.module.blocks)):
            with pytest.raises(SlideError, match=re.escape("use torch.autograd.grad, with create_graph=True")):
                transformed(lambda x, model=model: model(x).sum(), x)
        engine.backward(engine(x))
        engine.step()


def in_forward_mode(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(model(forward_ad.make_dual(x, torch.ones_like(x)))).tangent.detach()


def row_by_row(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.func.vmap(model)(x).detach()


def functional_call(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.func.functional_call(model, {"head.bias": torch.ones(8)}, (x,)).detach()


@SLIDES
@pytest.mark.parametrize("transformed", [in_forward_mode, row_by_row, functional_call])
def test_other_transforms_are_plain_torchs(transformed, slide):
    def loop(run: Run) -> Any:
        engine = run.start(made(Net))
        for x in inputs(2):
            engine.backward(engine(x))
            engine.step()
        return transformed(engine.module, inputs()[3])

    assert_right(run_loop(loop, "slide", slide=slide), run_loop(loop, "plain"))
