"""Every `zero_grad` drops what earlier backwards have left, but for the micro-batches of an accumulation under way."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from loops import Net, Run, assert_right, inputs, made, outcome, run_loop, running
from torch import nn

from ds_slide.errors import SlideError

pytestmark = pytest.mark.usefixtures("one_rank")

Zero = Callable[[Any], None]
STOCK = nn.Module.zero_grad


class Wrapper(nn.Module):
    """A module around the model, as PEFT's."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.base_model = model


def of_engine(engine: Any) -> None:
    engine.zero_grad()


def of_module(engine: Any) -> None:
    engine.module.zero_grad()


def of_module_to_zeros(engine: Any) -> None:
    engine.module.zero_grad(set_to_none=False)


def of_wrapper(engine: Any) -> None:
    Wrapper(engine.module).zero_grad()


def of_optimizer(engine: Any) -> None:
    engine.optimizer.zero_grad()


def of_client(engine: Any) -> None:
    """The optimizer that `deepspeed.initialize` has got or made."""
    getattr(engine.optimizer, "optimizer", engine.optimizer).zero_grad()


def of_blocks(engine: Any) -> None:
    """Whole units, one by one, and not the last."""
    for block in engine.module.blocks[:3]:
        block.zero_grad()


def of_parts(engine: Any) -> None:
    """Parts of units in blocks and outside them."""
    engine.module.blocks[0].up.zero_grad()
    engine.module.blocks[3].norm.zero_grad(set_to_none=False)
    engine.module.inp.zero_grad()


ALL = [of_engine, of_module, of_module_to_zeros, of_wrapper, of_optimizer, of_client]
SOME = [of_blocks, of_parts]


def after_evaluation(zero: Zero, run: Run) -> list[float]:
    """A backward in `eval()` for the gradient of the inputs, then a step of training."""
    engine, norms = run.start(made(Net)), []
    for x, other in zip(inputs(3), inputs(3, seed=2), strict=True):
        engine.eval()
        engine(other.requires_grad_()).backward()
        zero(engine)
        engine.train()
        engine.backward(engine(x))
        engine.step()
        norms.append(float(engine.get_global_grad_norm()))
    return norms


def between_losses(zero: Zero, run: Run) -> None:
    """A loss that is given up, then another one."""
    engine = run.start(made(Net))
    for x, other in zip(inputs(3), inputs(3, seed=2), strict=True):
        engine.backward(engine(other))
        zero(engine)
        engine.backward(engine(x))
        engine.step()


def before_each_micro_batch(run: Run) -> None:
    """DeepSpeed's scripts do this, and their gradients add up."""
    engine = run.start(made(Net), accumulation=2)
    for x in inputs(6):
        engine.zero_grad()
        engine.backward(engine(x))
        engine.step()


def before_an_accumulation(zero: Zero, run: Run) -> None:
    """A backward in `eval()`, dropped, then both micro-batches of a step."""
    engine = run.start(made(Net), accumulation=2)
    for x in inputs(3, batch=8):
        engine.eval()
        engine.backward(engine(2 * x))
        zero(engine)
        engine.train()
        for part in x.chunk(2):
            engine.backward(engine(part))
            engine.step()


@pytest.mark.by_turns(2)
@pytest.mark.parametrize("clip", [1.0, 0.0])
@pytest.mark.parametrize("zero", [*ALL, *SOME])
def test_a_backward_in_an_evaluation_is_dropped(zero: Zero, clip: float) -> None:
    loop = functools.partial(after_evaluation, zero)
    assert_right(run_loop(loop, "slide", clip=clip), run_loop(loop, "plain", clip=clip))


@pytest.mark.parametrize("zero", [of_engine, of_blocks, of_parts])
def test_it_is_with_the_window_that_suits(zero: Zero) -> None:
    loop = functools.partial(after_evaluation, zero)
    assert_right(run_loop(loop, "slide", clip=0.0, slide={}), run_loop(loop, "plain", clip=0.0))


@pytest.mark.parametrize("zero", [*ALL, *SOME])
def test_a_loss_before_another_one_is_dropped(zero: Zero) -> None:
    loop = functools.partial(between_losses, zero)
    assert_right(run_loop(loop, "slide"), run_loop(loop, "plain"))


@pytest.mark.parametrize("slide", [{"gpu_states": "1GiB"}, {"speculate": True}, {"update_passes": 2}])
@pytest.mark.parametrize("zero", [of_engine, of_blocks, of_parts])
def test_it_is_where_gradients_wait_elsewhere(zero: Zero, slide: dict[str, Any]) -> None:
    loop = functools.partial(between_losses, zero)
    assert_right(run_loop(loop, "slide", slide={"window": 2, **slide}), run_loop(loop, "plain"))


@pytest.mark.parametrize("clip", [1.0, 0.0])
def test_micro_batches_of_an_accumulation_stay(clip: float) -> None:
    found = run_loop(before_each_micro_batch, "slide", clip=clip)
    assert_right(found, run_loop(before_each_micro_batch, "plain", clip=clip))


@pytest.mark.by_turns(2)
@pytest.mark.parametrize("clip", [1.0, 0.0])
@pytest.mark.parametrize("zero", ALL)
def test_what_is_no_micro_batch_goes_before_an_accumulation(zero: Zero, clip: float) -> None:
    loop = functools.partial(before_an_accumulation, zero)
    assert_right(run_loop(loop, "slide", clip=clip), run_loop(loop, "plain", clip=clip))


def test_a_sum_that_comes_late_is_not_of_the_next_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The update lane adds up two gradients of a block when these are dropped and the next one is on its way."""
    sent, is_next = 0, threading.Event()

    def delay(engine: Any) -> None:
        runtime = engine.optimizer.runtime
        gradients, block = runtime.parts.gradients, runtime.blocks[0]
        send, accumulate = gradients._send_to_host, gradients._accumulate

        def counted(unit: Any, *arguments: Any) -> None:
            nonlocal sent
            if unit is block:  # the other blocks need no ring buffers while the update lane stands still
                for other in runtime.blocks[1:]:
                    other.gradient.arrived.wait()
            send(unit, *arguments)
            sent += unit is block
            if sent == 3:
                is_next.set()

        def late(arrival: Any, *arguments: Any) -> int:
            assert arrival.unit is not block or is_next.wait(60)
            return accumulate(arrival, *arguments)

        monkeypatch.setattr(gradients, "_send_to_host", counted)
        monkeypatch.setattr(gradients, "_accumulate", late)

    def loop(run: Run) -> float:
        engine = run.start(made(Net))
        if run.system == "slide":
            delay(engine)
        for x in inputs(2):
            engine(50 * x).backward()
        engine.zero_grad()
        engine.backward(engine(inputs()[0]))
        engine.step()
        return float(engine.get_global_grad_norm())

    # An update that is begun before the step is taken back by the update lane, which stands still here.
    slide = {"window": 2, "speculate": False}
    assert_right(run_loop(loop, "slide", slide=slide), run_loop(loop, "plain"))
    assert sent == 3


@pytest.mark.parametrize("zero", [of_engine, of_optimizer])
def test_stock_drops_by_its_optimizer_alone(zero: Zero) -> None:
    expected = "right" if zero is of_optimizer else "wrong"
    assert outcome(functools.partial(between_losses, zero), "stock") == expected


@pytest.mark.parametrize("zero", [*ALL, *SOME])
def test_updates_that_have_begun_are_not_dropped_in_silence(zero: Zero) -> None:
    """With clipping off and a backward that trains. The step can still be taken."""

    def refused(run: Run) -> None:
        engine = run.start(made(Net))
        engine.backward(engine(inputs()[0]))
        with pytest.raises(SlideError, match=r"gradients cannot be discarded: .*defer_updates"):
            zero(engine)
        engine.step()

    def taken(run: Run) -> None:
        engine = run.start(made(Net))
        engine.backward(engine(inputs()[0]))
        engine.step()

    assert_right(run_loop(refused, "slide", clip=0.0), run_loop(taken, "plain", clip=0.0))


def test_modules_have_their_own_function_before_and_after() -> None:
    with running("slide", 1.0, {}) as run:
        engines = [run.start(made(Net)), run.start(made(Net))]
        assert nn.Module.zero_grad is not STOCK
        engines[0].destroy()
        assert nn.Module.zero_grad is not STOCK
    assert nn.Module.zero_grad is STOCK
    assert "zero_grad" not in vars(engines[1].optimizer.optimizer)


def test_they_have_after_an_engine_that_was_forgotten() -> None:
    with running("slide", 1.0, {}) as run:
        run.start(made(Net))
        run._engines.clear()
        run._stack.pop_all()
    gc.collect()
    assert nn.Module.zero_grad is STOCK


def test_parts_of_a_model_can_be_copied_and_pickled() -> None:
    with running("slide", 1.0, {}) as run:
        engine = run.start(made(Net))
        block = nn.Linear(2, 2)
        for made_anew in (copy.deepcopy(block), pickle.loads(pickle.dumps(block))):
            made_anew(torch.ones(2)).sum().backward()
            made_anew.zero_grad()
            assert made_anew.weight.grad is None
        assert "zero_grad" not in vars(engine.module)
