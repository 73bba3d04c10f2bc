"""Several backwards before one step: of two losses of one forward, or of several forwards. Their gradients add up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from loops import Net, Run, assert_right, inputs, made, outcome, run_loop

from ds_slide.errors import SlideError

pytestmark = pytest.mark.usefixtures("one_rank")


class TwoLosses(Net):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        made = self.head(self.hidden(x))
        return made.float().pow(2).mean(), made.float().abs().mean()


def trained(run: Run, backwards: Callable[[Any, torch.Tensor], None], accumulation: int = 1) -> float:
    engine = run.start(made(TwoLosses), accumulation=accumulation)
    for x in inputs(4):
        backwards(engine, x)
        engine.step()
    return float(engine.get_global_grad_norm())


def two_losses(engine: Any, x: torch.Tensor) -> None:
    first, second = engine(x)
    first.backward(retain_graph=True)
    second.backward()


def two_forwards(engine: Any, x: torch.Tensor) -> None:
    first, second = engine(x)[0], engine(-x)[1]
    first.backward()
    second.backward()


def the_later_forward_first(engine: Any, x: torch.Tensor) -> None:
    first, second = engine(x)[0], engine(-x)[1]
    second.backward()
    first.backward()


def forward_and_backward_in_turn(engine: Any, x: torch.Tensor) -> None:
    for sign in (1, -1, 2):
        engine(sign * x)[0].backward()


def first_by_the_engine(engine: Any, x: torch.Tensor) -> None:
    first, second = engine(x)
    engine.backward(first, retain_graph=True)
    second.backward()


def second_by_the_engine(engine: Any, x: torch.Tensor) -> None:
    first, second = engine(x)
    first.backward(retain_graph=True)
    engine.backward(second)


def the_same_loss_twice(engine: Any, x: torch.Tensor) -> None:
    loss = engine(x)[0]
    loss.backward(retain_graph=True)
    loss.backward()


BACKWARDS = [
    two_losses,
    two_forwards,
    the_later_forward_first,
    forward_and_backward_in_turn,
    first_by_the_engine,
    second_by_the_engine,
    the_same_loss_twice,
]


@pytest.mark.by_turns(2)
@pytest.mark.parametrize("slide", [{"window": 2}, {}], ids=["window 2", "default"])
@pytest.mark.parametrize("backwards", BACKWARDS)
def test_the_gradients_add_up(backwards, slide):
    def loop(run: Run) -> float:
        return trained(run, backwards)

    assert_right(run_loop(loop, "slide", slide=slide), run_loop(loop, "plain"))


@pytest.mark.parametrize("backwards", BACKWARDS)
def test_the_gradients_add_up_without_clipping(backwards):
    """Gradients are held because the script asks for it, or accumulates."""

    def loop(run: Run) -> float:
        return trained(run, backwards)

    def accumulating(run: Run) -> float:
        return trained(run, backwards, accumulation=2)

    held = {"window": 2, "defer_updates": True}
    assert_right(run_loop(loop, "slide", clip=0.0, slide=held), run_loop(loop, "plain", clip=0.0))
    assert_right(run_loop(accumulating, "slide", clip=0.0), run_loop(accumulating, "plain", clip=0.0))


@pytest.mark.parametrize("backwards", [each for each in BACKWARDS if each is not forward_and_backward_in_turn])
def test_updates_under_backward_refuse_the_second_one(backwards):
    """The sentence comes at the second backward; the step of the first one counts, and the next loop is as ever."""

    def loop(run: Run) -> Any:
        engine = run.start(made(TwoLosses))
        (x, *others) = inputs(4)
        if run.system == "plain":
            engine(-x if backwards is the_later_forward_first else x)[backwards is the_later_forward_first].backward()
        else:
            with pytest.raises(SlideError, match=r"not the only one before its engine\.step\(\).*defer_updates"):
                backwards(engine, x)
        engine.step()
        for each in others:
            engine(each)[0].backward()
            engine.step()

    assert_right(run_loop(loop, "slide", clip=0.0), run_loop(loop, "plain", clip=0.0))


def test_a_forward_after_an_update_has_begun_is_refused():
    def loop(run: Run) -> None:
        trained(run, forward_and_backward_in_turn)

    with pytest.raises(SlideError, match=r"a forward began after backward\(\)"):
        run_loop(loop, "slide", clip=0.0)


@pytest.mark.parametrize("backwards, expected", [(two_losses, "error"), (forward_and_backward_in_turn, "right")])
def test_stock_is_as_the_table_says(backwards, expected):
    def loop(run: Run) -> float:
        return trained(run, backwards)

    assert outcome(loop, "stock") == expected
