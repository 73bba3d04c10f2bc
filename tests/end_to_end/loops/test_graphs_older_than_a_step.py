"""A graph that is used after its weights have changed raises, as in plain torch, or computes what that computes."""

from __future__ import annotations

from typing import Any

import deepspeed
import pytest
import torch
from loops import Block, Net, Run, assert_right, inputs, made, run_loop, running
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.usefixtures("one_rank")

MODIFIED = "modified by an inplace operation"


def step(engine: Any, x: torch.Tensor) -> None:
    engine.backward(engine(x))
    engine.step()


class BlocksAlone(Net):
    """Saves no weight outside of its blocks."""

    def __init__(self, around: Any = None, **options: Any) -> None:
        super().__init__(**options)
        self.around = around

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = self.around(block, x) if self.around else block(x)
        return x.float().pow(2).mean()


class OuterAlone(Net):
    """Its blocks are not in the graph."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            hidden = self.hidden(x)
        return self.head(hidden.requires_grad_()).float().pow(2).mean()


class RestoringBlock(Block):
    """Computes with a weight that is doubled for the length of the forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.up.weight.mul_(2)
        x = super().forward(x)
        with torch.no_grad():
            self.up.weight.div_(2)
        return x


# ---- what plain torch refuses ----------------------------------------------------------------------------------------


def forward_before_a_step(run: Run, **options: Any) -> None:
    engine = run.start(made(lambda: Net(**options)))
    first, second, _, _ = inputs()
    old = engine(first)
    step(engine, second)
    old.backward()


def blocks_before_a_step(run: Run) -> None:
    engine = run.start(made(BlocksAlone))
    first, second, _, _ = inputs()
    old = engine(first)
    step(engine, second)
    old.backward()


def outer_modules_before_a_step(run: Run) -> None:
    engine = run.start(made(OuterAlone))
    first, second, _, _ = inputs()
    old = engine(first)
    step(engine, second)
    old.backward()


def its_own_step(run: Run) -> None:
    engine = run.start(made(BlocksAlone))
    loss = engine(inputs()[0])
    engine.backward(loss, retain_graph=True)
    engine.step()
    loss.backward()


def weight_restored_in_the_forward(run: Run) -> None:
    engine = run.start(made(lambda: BlocksAlone(block=RestoringBlock)))
    step(engine, inputs()[0])


REFUSED = [
    forward_before_a_step,
    blocks_before_a_step,
    outer_modules_before_a_step,
    its_own_step,
    weight_restored_in_the_forward,
]


@pytest.mark.by_turns(4)
@pytest.mark.parametrize("slide", [{"window": 2}, {}], ids=["window 2", "default"])
@pytest.mark.parametrize("clip", [1.0, 0.0])
@pytest.mark.parametrize("loop", REFUSED)
def test_what_plain_torch_refuses_is_refused(loop, clip, slide):
    for system in ("plain", "slide"):
        with running(system, clip, slide) as run, pytest.raises(RuntimeError, match=MODIFIED):
            loop(run)


def test_a_checkpoint_that_is_loaded_changes_the_weights(tmp_path):
    with running("slide", 1.0, {"window": 2}) as run:
        engine = run.start(made(BlocksAlone))
        engine.save_checkpoint(str(tmp_path))
        old = engine(inputs()[0])
        engine.load_checkpoint(str(tmp_path))
        with pytest.raises(RuntimeError, match=MODIFIED):
            old.backward()


def test_training_goes_on_after_the_refusal():
    def loop(run: Run) -> None:
        engine = run.start(made(Net))
        first, second, third, fourth = inputs()
        old = engine(first)
        step(engine, second)
        if run.system == "slide":
            with pytest.raises(RuntimeError, match=MODIFIED):
                old.backward()
        for x in (third, fourth):
            step(engine, x)

    assert_right(run_loop(loop, "slide"), run_loop(loop, "plain"))


# ---- what plain torch computes ---------------------------------------------------------------------------------------


def biases_alone(run: Run) -> None:
    """An old graph needs no bias, and the weights have not changed."""
    model = made(BlocksAlone)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith(("up.bias", "down.bias")))  # a norm saves its own
    engine = run.start(model)
    first, second, _, _ = inputs()
    old = engine(first)
    step(engine, second)
    engine.backward(old)
    engine.step()


def checkpointed(run: Run, reentrant: bool) -> None:
    """What the script recomputes uses the weights that are there then."""
    engine = run.start(made(lambda: BlocksAlone(lambda block, x: checkpoint(block, x, use_reentrant=reentrant))))
    first, second, _, _ = inputs()
    old = engine(first)
    step(engine, second)
    engine.backward(old)
    engine.step()


def recomputed_by_the_script(run: Run) -> None:
    checkpointed(run, reentrant=False)


def recomputed_with_the_reentrant_form(run: Run) -> None:
    checkpointed(run, reentrant=True)


class WritingBlock(Block):
    """Brings its weight to a norm of its own before it uses it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.up.weight.mul_(1.0)
        return super().forward(x)


def written_before_it_is_used(run: Run) -> None:
    engine = run.start(made(lambda: BlocksAlone(block=WritingBlock)))
    for x in inputs():
        step(engine, x)


def evaluation_in_between(run: Run) -> None:
    engine = run.start(made(Net))
    for x in inputs():
        loss = engine(x)
        with torch.no_grad():
            engine(-x)
        with torch.inference_mode():
            engine(2 * x)
        engine.backward(loss)
        engine.step()


def two_forwards_one_backward(run: Run) -> None:
    engine = run.start(made(Net))
    for x in inputs():
        engine.backward(engine(x) + engine(-x))
        engine.step()


def accumulation(run: Run) -> None:
    engine = run.start(made(Net), accumulation=2)
    first, second, third, fourth = inputs()
    for one, other in ((first, second), (third, fourth)):
        losses = engine(one), engine(other)
        for loss in losses:
            engine.backward(loss)
            engine.step()


def reading_in_between(run: Run) -> None:
    engine = run.start(made(Net))
    for x in inputs():
        loss = engine(x)
        if run.system == "slide":
            with deepspeed.zero.GatheredParameters(list(engine.module.parameters()), modifier_rank=0):
                pass
        engine.backward(loss)
        engine.step()


COMPUTED = [
    biases_alone,
    recomputed_by_the_script,
    recomputed_with_the_reentrant_form,
    written_before_it_is_used,
    evaluation_in_between,
    two_forwards_one_backward,
    accumulation,
    reading_in_between,
]


@pytest.mark.by_turns(4)
@pytest.mark.parametrize("slide", [{"window": 2}, {}], ids=["window 2", "default"])
@pytest.mark.parametrize("clip", [1.0, 0.0])
@pytest.mark.parametrize("loop", COMPUTED)
def test_what_plain_torch_computes_is_computed(loop, clip, slide):
    assert_right(run_loop(loop, "slide", clip=clip, slide=slide), run_loop(loop, "plain", clip=clip))


def test_a_checkpoint_that_is_saved_changes_no_weight(tmp_path):
    def loop(run: Run) -> None:
        engine = run.start(made(Net))
        for x in inputs():
            loss = engine(x)
            if run.system == "slide":
                engine.save_checkpoint(str(tmp_path))
            engine.backward(loss)
            engine.step()

    assert_right(run_loop(loop, "slide"), run_loop(loop, "plain"))
