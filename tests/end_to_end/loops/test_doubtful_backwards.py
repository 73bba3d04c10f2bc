"""Backwards that are not meant for the engine's next step: they change no weights, and later steps are plain torch's.

With clipping off updates begin under backward, so the engine has to know before the first one.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from loops import WIDTH, Net, Run, assert_right, inputs, made, outcome, run_loop, running
from torch.utils.checkpoint import checkpoint

from ds_slide.errors import SlideError
from ds_slide.plan.host_room import HostRoom
from ds_slide.runtime.gradients import holding
from ds_slide.runtime.memory.tier_moves import move

pytestmark = pytest.mark.usefixtures("one_rank")


class Generator(Net):
    """Returns what its blocks make."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.hidden(x)


class Shared(Net):
    """Goes twice through its blocks."""

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        for block in (*self.blocks, *self.blocks):
            x = block(x)
        return self.inp(x)


class Checkpointed(Net):
    """Recomputes its blocks in backward."""

    reentrant = False

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


class FrozenOutside(Net):
    """Trains its blocks alone."""

    def __init__(self) -> None:
        super().__init__()
        self.inp.requires_grad_(False)
        self.head.requires_grad_(False)


class CheckpointedInside(Checkpointed):
    """Recomputes them in a backward within backward."""

    reentrant = True


def train(engine: Any, x: torch.Tensor) -> None:
    engine.backward(engine(x))
    engine.step()


def training_only(run: Run) -> None:
    engine = run.start(made(Net))
    for x in inputs():
        train(engine, x)


# ---- gradients of the inputs -----------------------------------------------------------------------------------------


def saliency(run: Run, *, in_eval: bool, first: bool = False, build: type[Net] = Net) -> list[float]:
    """`torch.autograd.grad` of the inputs, between steps of training."""
    engine, found = run.start(made(build)), []
    for x in inputs():
        if not first:
            train(engine, x)
        engine.train(not in_eval) if in_eval else None
        x = x.clone().requires_grad_()
        found.append(float(torch.autograd.grad(engine(x), x)[0].abs().sum()))
        with torch.no_grad():
            found.append(float(engine(x)))
        engine.train()
        if first:
            train(engine, x.detach())
    return found


def saliency_of_a_kept_graph(run: Run, build: type[Net] = Net) -> None:
    """The same graph gives the gradient of the inputs, and then trains."""
    engine = run.start(made(build))
    for x in inputs():
        x = x.clone().requires_grad_()
        loss = engine(x)
        gradient = torch.autograd.grad(loss, x, retain_graph=True)[0]
        assert gradient.any()
        engine.backward(loss)
        engine.step()


def backward_of_named_inputs(run: Run) -> list[float]:
    """`loss.backward(inputs=...)`."""
    engine, found = run.start(made(Net)), []
    for x in inputs():
        other = (2 * x).requires_grad_()
        engine(other).backward(inputs=[other])
        assert other.grad is not None
        found.append(float(other.grad.abs().sum()))
        train(engine, x)
    return found


def fast_gradient_sign(run: Run, build: type[Net] = Net) -> None:
    """`loss.backward()` for the gradient of the inputs, whose gradients of the weights are dropped."""
    engine = run.start(made(build))
    for x in inputs():
        x = x.clone().requires_grad_()
        engine(x).backward()
        assert x.grad is not None
        engine.zero_grad()
        train(engine, (x + 0.1 * x.grad.sign()).detach())


def projected_descent(run: Run) -> None:
    """A perturbation in three steps, then training on the perturbed input."""
    engine = run.start(made(Net))
    for x in inputs():
        delta = torch.zeros_like(x, requires_grad=True)
        for _ in range(3):
            engine(x + delta).backward()
            assert delta.grad is not None
            delta = (delta + 0.05 * delta.grad.sign()).clamp(-0.1, 0.1).detach().requires_grad_()
        engine.zero_grad()
        train(engine, x + delta.detach())


def added_in_evaluation(run: Run) -> None:
    """A backward in `eval()` that nothing drops: its gradients are in the next step."""
    engine = run.start(made(Net))
    for x in inputs():
        engine.eval()
        engine(2 * x).backward()
        engine.train()
        train(engine, x)


def between_micro_batches(run: Run) -> None:
    """`torch.autograd.grad` of the inputs in the middle of an accumulation."""
    engine = run.start(made(Net), accumulation=2)
    for x in inputs():
        other = x.clone().requires_grad_()
        assert torch.autograd.grad(engine(other), other)[0].any()
        train(engine, x)


def at_no_boundary(run: Run) -> None:
    """A script that sets the boundary itself, in an engine without accumulation."""
    engine = run.start(made(Net))
    for first, second in zip(inputs(2), inputs(2, seed=2), strict=True):
        engine.set_gradient_accumulation_boundary(False)
        engine.backward(engine(first))
        engine.set_gradient_accumulation_boundary(True)
        train(engine, second)


def gradient_of_hidden_states(run: Run) -> None:
    """`torch.autograd.grad` that ends in the middle of the blocks."""
    engine, made_by_block = run.start(made(Net)), []
    engine.module.blocks[1].register_forward_hook(lambda _module, _args, output: made_by_block.append(output))
    for x in inputs():
        made_by_block.clear()
        loss = engine(x)
        assert torch.autograd.grad(loss, made_by_block[0])[0].any()
        train(engine, x)


def gradient_of_parameters(run: Run) -> None:
    """`torch.autograd.grad` of weights, as for a report of their gradients."""
    engine = run.start(made(Net))
    for x in inputs():
        assert torch.autograd.grad(engine(x), list(engine.module.head.parameters()))[0].any()
        train(engine, x)


def backward_of_some_parameters(run: Run) -> None:
    """`loss.backward(inputs=...)` of an input and a weight, dropped."""
    engine = run.start(made(Net))
    for x in inputs():
        other = x.clone().requires_grad_()
        engine(other).backward(inputs=[other, engine.module.head.weight])
        engine.zero_grad()
        train(engine, x)


def past_the_engine(run: Run) -> None:
    """`torch.autograd.grad` of a forward that DeepSpeed does not see."""
    engine = run.start(made(Net))
    for x in inputs():
        other = x.clone().requires_grad_()
        assert torch.autograd.grad(engine.module(other), other)[0].any()
        train(engine, x)


def encoder_outside(run: Run) -> None:
    """A model in front of the engine's that the script updates itself."""
    encoder = made(lambda: torch.nn.Linear(WIDTH, WIDTH), 3)
    descent, engine = torch.optim.SGD(encoder.parameters(), lr=0.1), run.start(made(Net))
    for x in inputs():
        train(engine, encoder(x))
        descent.step()
        descent.zero_grad()


def trained_in_evaluation(run: Run) -> None:
    """`from_pretrained` returns models in `eval()`, and not every script calls `train()`."""
    engine = run.start(made(Net))
    engine.eval()
    for x in inputs():
        train(engine, x)


# ---- several engines -------------------------------------------------------------------------------------------------


def gan(run: Run, *, way: Literal["engine", "loss"], judge_first: bool, freezes: bool = False) -> None:
    """The generator's loss runs through the judge, which drops the gradients that it gets before its own step."""
    generator, judge = run.start(made(Generator)), run.start(made(Net, 1))

    def backward(engine: Any, loss: torch.Tensor) -> None:
        engine.backward(loss) if way == "engine" else loss.backward()
        engine.step()

    def step_of_judge(noise: torch.Tensor, x: torch.Tensor) -> None:
        judge.zero_grad()
        made_up = generator(noise).detach()
        backward(judge, judge(x) - judge(made_up) if way == "engine" else judge(x + made_up))

    def step_of_generator(noise: torch.Tensor) -> None:
        generator.zero_grad()
        if freezes:
            judge.module.requires_grad_(False)
        backward(generator, judge(generator(noise)))
        judge.module.requires_grad_(True)

    for noise, x in zip(inputs(3), inputs(3, seed=2), strict=True):
        if judge_first:
            step_of_judge(noise, x)
        step_of_generator(noise)
        if not judge_first:
            step_of_judge(noise, x)
    judge.zero_grad()


def gan_with_rests(run: Run) -> None:
    """Nothing drops what the generator's loss has left in the judge: plain torch adds it to the judge's gradients."""
    generator, judge = run.start(made(Generator)), run.start(made(Net, 1))
    for noise, x in zip(inputs(3), inputs(3, seed=2), strict=True):
        generator.backward(judge(generator(noise)))
        generator.step()
        judge.backward(judge(x))
        judge.step()


def distillation(run: Run, *, way: Literal["engine", "loss"]) -> None:
    """The teacher's engine has an optimizer, and gets gradients, but is never stepped."""
    student, teacher = run.start(made(Generator)), run.start(made(Generator, 1))
    for x in inputs(3):
        loss = (student(x) - teacher(x)).pow(2).mean()
        student.backward(loss) if way == "engine" else loss.backward()
        student.step()
        teacher.zero_grad()


def one_loss_of_two(run: Run) -> None:
    """Both models learn from one `loss.backward()`."""
    one, other = run.start(made(Net)), run.start(made(Net, 1))
    for x in inputs(3):
        (one(x) + 2 * other(x)).backward()
        one.step()
        other.step()


LOOPS = {
    "saliency in eval": functools.partial(saliency, in_eval=True),
    "saliency in eval, before training": functools.partial(saliency, in_eval=True, first=True),
    "saliency in train": functools.partial(saliency, in_eval=False),
    "saliency of checkpointed blocks": functools.partial(saliency, in_eval=True, build=Checkpointed),
    "saliency of a kept graph": saliency_of_a_kept_graph,
    "saliency of a kept graph of shared blocks": functools.partial(saliency_of_a_kept_graph, build=Shared),
    "backward of named inputs": backward_of_named_inputs,
    "fast gradient sign": fast_gradient_sign,
    "fast gradient sign of checkpointed blocks": functools.partial(fast_gradient_sign, build=Checkpointed),
    "fast gradient sign of blocks checkpointed inside": functools.partial(fast_gradient_sign, build=CheckpointedInside),
    "fast gradient sign, frozen outside": functools.partial(fast_gradient_sign, build=FrozenOutside),
    "projected descent": projected_descent,
    "added in evaluation": added_in_evaluation,
    "gradient of hidden states": gradient_of_hidden_states,
    "gradient of parameters": gradient_of_parameters,
    "backward of some parameters": backward_of_some_parameters,
    "past the engine": past_the_engine,
    "encoder outside": encoder_outside,
    "trained in evaluation": trained_in_evaluation,
    "between micro-batches": between_micro_batches,
    "at no boundary": at_no_boundary,
    "gan, engine": functools.partial(gan, way="engine", judge_first=True),
    "gan, engine, generator first": functools.partial(gan, way="engine", judge_first=False),
    "gan, loss": functools.partial(gan, way="loss", judge_first=True),
    "gan, loss, generator first": functools.partial(gan, way="loss", judge_first=False),
    "gan, frozen judge, engine": functools.partial(gan, way="engine", judge_first=True, freezes=True),
    "gan, frozen judge, loss": functools.partial(gan, way="loss", judge_first=False, freezes=True),
    "gan with rests": gan_with_rests,
    "distillation, engine": functools.partial(distillation, way="engine"),
    "distillation, loss": functools.partial(distillation, way="loss"),
    "one loss of two": one_loss_of_two,
}


@pytest.mark.by_turns(2)
@pytest.mark.parametrize("clip", [1.0, 0.0])
@pytest.mark.parametrize("name", LOOPS)
def test_the_numbers_are_plain_torchs(name: str, clip: float) -> None:
    loop = LOOPS[name]
    assert_right(run_loop(loop, "slide", clip=clip), run_loop(loop, "plain", clip=clip))


@pytest.mark.parametrize("name", ["saliency in eval", "fast gradient sign", "gan, engine", "one loss of two"])
def test_they_are_with_the_window_that_suits(name: str) -> None:
    loop = LOOPS[name]
    assert_right(run_loop(loop, "slide", clip=0.0, slide={}), run_loop(loop, "plain", clip=0.0))


@pytest.mark.parametrize("place", ["host", "gpu"])
def test_a_backward_that_trains_counts_wherever_its_gradients_are(place: str) -> None:
    slide = {"gpu_states": "1GiB"} if place == "gpu" else {}
    with running("slide", 0.0, {"window": 2, **slide}) as run:
        engine = run.start(made(FrozenOutside))
        for x in inputs():
            x = x.clone().requires_grad_()
            torch.autograd.grad(engine(x), x)
            assert engine.optimizer.runtime.accumulation.micro_batches == 0
            engine.backward(engine(x.detach()))
            assert engine.optimizer.runtime.accumulation.micro_batches == 1
            engine.step()


def test_a_generator_of_stock_does_not_train_the_judge() -> None:
    """Nor can the judge know of the other engine by one of its own kind."""
    start = run_loop(lambda run: run.start(made(Net, 1)), "slide", clip=0.0).masters[0]
    with running("stock", 0.0, {}) as stock, running("slide", 0.0, {"window": 2}) as slide:
        generator, judge = stock.start(made(Generator)), slide.start(made(Net, 1))
        for noise in inputs(2):
            judge(generator(noise)).backward()
            generator.step()
            judge.zero_grad()
        slide._read_masters()
    for name, master in slide.masters[0].items():
        assert torch.equal(master, start[name])


def test_units_that_are_on_the_gpu_for_now_come_back_with_a_place_for_their_gradient() -> None:
    def moved(run: Run) -> None:
        engine = run.start(made(Net))
        runtime = engine.optimizer.runtime
        blocks = frozenset(unit.order for unit in runtime.blocks[:2])
        for x, on_gpu in zip(inputs(), [frozenset(), blocks, frozenset(), blocks], strict=True):
            moved = move(runtime, on_gpu)
            assert moved is not None and not moved.no_room
            x = x.clone().requires_grad_()
            if on_gpu:
                engine(x).backward()
                engine.zero_grad()
            train(engine, x.detach())
        assert runtime.parts.deferred

    assert_right(run_loop(moved, "slide", clip=0.0), run_loop(training_only, "plain", clip=0.0))


ELSEWHERE: dict[str, dict[str, Any]] = {
    "on the GPU": {"gpu_states": "1GiB"},
    "some on the GPU": {"gpu_states": "200KiB"},
    "two passes": {"update_passes": 2},
    "delays": {"debug": {"lane_delay_ms": 2}},
}


@pytest.mark.parametrize("place", ELSEWHERE)
@pytest.mark.parametrize("name", ["fast gradient sign", "gan, loss, generator first"])
def test_they_are_where_states_are_elsewhere(name: str, place: str) -> None:
    loop = LOOPS[name]
    found = run_loop(loop, "slide", clip=0.0, slide={"window": 2, **ELSEWHERE[place]})
    assert_right(found, run_loop(loop, "plain", clip=0.0))


@pytest.mark.parametrize("sections", [("offload_optimizer",), ("offload_optimizer", "offload_param")])
@pytest.mark.parametrize("name", ["fast gradient sign", "added in evaluation"])
def test_they_are_with_states_on_ssd(name: str, sections: tuple[str, ...], tmp_path: Path) -> None:
    device = {"device": "nvme", "nvme_path": str(tmp_path)}
    loop = LOOPS[name]

    def on_ssd(run: Run) -> Any:
        start = run.start
        zero = {"stage": 3, "offload_optimizer": {"device": "cpu"}, **dict.fromkeys(sections, device)}
        run.start = functools.partial(start, zero_optimization=zero)  # type: ignore[method-assign]
        return loop(run)

    slide = {"window": 2, "host_memory": "100KB"}
    assert_right(run_loop(on_ssd, "slide", clip=0.0, slide=slide), run_loop(loop, "plain", clip=0.0))


# How loops end on stock.
ON_STOCK = {"saliency in eval": "wrong", "fast gradient sign": "wrong", "added in evaluation": "right"}


@pytest.mark.parametrize("name, expected", ON_STOCK.items())
def test_stock_is_as_the_table_says(name: str, expected: str) -> None:
    assert outcome(LOOPS[name], "stock") == expected


# ---- what is held, and where it is refused ---------------------------------------------------------------------------


def test_ordinary_training_holds_nothing() -> None:
    """Nor do evaluations, and gradients of inputs alone."""
    with running("slide", 0.0, {"window": 2}) as run:
        engine = run.start(made(Net))
        for x in inputs():
            train(engine, x)
            engine.eval()
            with torch.no_grad():
                engine(x)
            x = x.clone().requires_grad_()
            torch.autograd.grad(engine(x), x)
            engine.train()
        assert not engine.optimizer.runtime.parts.deferred


def test_holding_says_so_once_and_is_in_the_report(caplog: pytest.LogCaptureFixture) -> None:
    with running("slide", 0.0, {"window": 2}) as run:
        engine = run.start(made(Net))
        train(engine, inputs()[0])
        before = engine.optimizer.runtime.parts.memory_report["host_bytes"]
        for x in inputs():
            engine.eval()
            engine(x).backward()
            engine.zero_grad()
            engine.train()
            train(engine, x)
        held = engine.optimizer.runtime.parts.memory_report["host_bytes"] - before
        assert held == 4 * sum(unit.codec.numel for unit in engine.optimizer.runtime.units)  # fp32
    said = [record.getMessage() for record in caplog.records if "from now on" in record.getMessage()]
    assert len(said) == 1 and said[0].startswith("a backward ran with the model in eval mode (engine")


def test_gradients_that_find_no_room_are_refused_before_any_update(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(run: Run) -> None:
        engine = run.start(made(Net))
        first, *rest = inputs()
        train(engine, first)
        engine.eval()
        with monkeypatch.context() as patched:
            patched.setattr(holding, "host_room", lambda *_: HostRoom(1000, "the test"))
            with pytest.raises(SlideError, match=r"eval mode .*, so .* in [\d,]+ bytes .* 1,000 bytes are free "):
                engine.backward(engine(first))
        engine.train()
        for x in rest:
            train(engine, x)

    assert_right(run_loop(refused, "slide", clip=0.0), run_loop(training_only, "plain", clip=0.0))


EARLY = r"a forward began after backward\(\).* before engine.step\(\).*defer_updates"


@pytest.mark.parametrize("with_gradient", [True, False])
def test_an_evaluation_between_backward_and_step_is_refused_when_it_begins(with_gradient: bool) -> None:
    def refused(run: Run) -> None:
        engine = run.start(made(Net))
        for x in inputs():
            engine.backward(engine(x))
            with torch.set_grad_enabled(with_gradient), pytest.raises(SlideError, match=EARLY):
                engine(x)
            engine.step()

    assert_right(run_loop(refused, "slide", clip=0.0), run_loop(training_only, "plain", clip=0.0))


def test_a_step_without_a_gradient_changes_nothing() -> None:
    """As after `torch.autograd.grad` alone: there is no update, and the norm is zero."""

    def empty_steps(run: Run) -> float:
        engine = run.start(made(Net))
        train(engine, inputs()[0])
        x = inputs()[1].requires_grad_()
        torch.autograd.grad(engine(x), x)
        engine.step()
        return float(engine.get_global_grad_norm())

    expected = run_loop(empty_steps, "plain", clip=0.0)
    for clip in (1.0, 0.0):
        assert_right(run_loop(empty_steps, "slide", clip=clip), expected)
