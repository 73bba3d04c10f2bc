"""Engines of one model, one after the other: each begins with the weights of the last step, and the memory goes."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from harness import engine_for
from loops import LR, Net, Run, assert_right, inputs, made, run_loop
from torch import nn

from ds_slide.errors import SlideError

pytestmark = pytest.mark.usefixtures("one_rank")

WINDOWS = pytest.mark.parametrize("slide", [{"window": 2}, {}], ids=["window of 2", "default window"])


class Failing(Net):
    """Raises in the middle of backward while `fails` is set."""

    fails = False

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for number, block in enumerate(self.blocks):
            x = block(x)
            if self.fails and number == 2:
                x.register_hook(_fail)
        return x


def _fail(_: torch.Tensor) -> None:
    raise RuntimeError("out of memory")


def config(clip: float, slide: dict[str, Any] | None, **others: Any) -> dict[str, Any]:
    made: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": clip,
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.01}},
        "steps_per_print": 10**9,
        **others,
    }
    if slide is not None:
        made["ds_slide"] = {"enabled": True, **slide}
    return {key: value for key, value in made.items() if value is not None}


def start(model: nn.Module, clip: float, slide: dict[str, Any] | None, **others: Any) -> Any:
    parameters = list(model.parameters())
    return deepspeed.initialize(model=model, config=config(clip, slide, **others), model_parameters=parameters)[0]


def loss(engine: Any) -> float:
    with torch.no_grad():
        return float(engine(inputs(1)[0]))


def train(engine: Any, steps: int = 2) -> None:
    for x in inputs(steps, seed=3):
        engine.backward(engine(x))
        engine.step()


@contextmanager
def started(model: nn.Module, clip: float, slide: dict[str, Any]) -> Iterator[Any]:
    """An engine that is destroyed at the end, as the first of several."""
    engine = start(model, clip, slide)
    try:
        yield engine
    finally:
        engine.destroy()


# ---- after an exception ---------------------------------------------------------------------------------------------


def fail_in_backward(engine: Any) -> None:
    engine.module.fails = True
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.backward(engine(inputs(1)[0]))
    engine.module.fails = False


def fail_in_step(engine: Any) -> None:
    engine.backward(engine(inputs(1)[0]))
    apply, done = engine.optimizer.runtime._apply, []

    def failing(*args: Any) -> None:
        apply(*args)
        done.append(True)
        raise RuntimeError("out of memory")

    engine.optimizer.runtime._apply = failing
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.step()
    engine.optimizer.runtime._apply = apply
    assert done


def leave_out_the_step(engine: Any) -> None:
    engine.backward(engine(inputs(1)[0]))


def fail_in_a_lane(engine: Any) -> None:
    engine.backward(engine(inputs(1)[0]))
    engine.optimizer.runtime.parts.context.lanes.update.close()
    engine.optimizer.runtime.parts.context.failures.record("update", OSError("the disk is gone"))


def keep(_engine: Any) -> None:
    pass


def destroy(engine: Any) -> None:
    engine.destroy()


# What spoils the weights, with which clipping, and the sentence of the next `initialize`.
SPOILED = [
    (fail_in_backward, 0.0, r"its backward\(\) ended with an exception when some blocks had been updated"),
    (fail_in_step, 0.0, r"its engine\.step\(\) ended with an exception"),
    (fail_in_step, 1.0, r"its engine\.step\(\) ended with an exception"),
    (leave_out_the_step, 0.0, r"has updated weights under a backward\(\) that no engine\.step\(\) has followed"),
    (fail_in_a_lane, 0.0, "has failed in the middle of its work"),
]


@pytest.mark.by_turns(2)
@WINDOWS
@pytest.mark.parametrize("end", [keep, destroy])
@pytest.mark.parametrize("spoil, clip, sentence", SPOILED)
def test_a_mixture_of_weights_is_not_taken_over(
    spoil: Callable[[Any], None], clip: float, sentence: str, end: Callable[[Any], None], slide: dict[str, Any]
) -> None:
    """By no engine, with DS-Slide or of stock, with an optimizer or without, while the first one is there or gone."""
    model = made(lambda: Failing(6))
    with started(model, clip, slide) as engine:
        train(engine)
        spoil(engine)
        end(engine)
        for others in ({}, {"optimizer": None}):
            for system in (slide, None):
                with pytest.raises(SlideError, match=sentence):
                    start(model, clip, system, **others)


@WINDOWS
def test_with_clipping_the_weights_of_before_the_error_are_taken_over(slide: dict[str, Any]) -> None:
    """No update begins before the norm is known, so an error in backward leaves the weights of the last step."""
    model = made(lambda: Failing(6))
    with started(model, 1.0, slide) as engine:
        train(engine)
        before = loss(engine)
        fail_in_backward(engine)
        with started(model, 1.0, slide) as second:
            assert loss(second) == before


def test_after_a_checkpoint_is_loaded_the_weights_are_whole_again(tmp_path: Path) -> None:
    model = made(lambda: Failing(6))
    with started(model, 0.0, {"window": 2}) as engine:
        train(engine)
        engine.save_checkpoint(str(tmp_path))
        before = loss(engine)
        fail_in_backward(engine)
        engine.load_checkpoint(str(tmp_path))
        with started(model, 0.0, {"window": 2}) as second:
            assert loss(second) == before
            train(second)


def test_the_refused_engine_leaves_the_first_one_as_it_was() -> None:
    model = made(lambda: Failing(6))
    with started(model, 0.0, {"window": 2}) as engine:
        leave_out_the_step(engine)
        with pytest.raises(SlideError, match=r"no engine\.step\(\) has followed"):
            start(model, 0.0, {"window": 2})
        engine.step()
        train(engine)
        before = loss(engine)
        with started(model, 0.0, {"window": 2}) as second:
            assert loss(second) == before


# ---- what a script puts into ds_tensor -------------------------------------------------------------------------------


def a_copy(partition: torch.Tensor) -> torch.Tensor:
    """What a script does that moves partitions to page-locked memory, or back."""
    return partition.data.clone()


def halved(partition: torch.Tensor) -> torch.Tensor:
    return partition.data / 2


def write_partitions(value: Callable[[torch.Tensor], torch.Tensor], *, train_on: bool) -> Callable[[Run], None]:
    """A loop that sets `ds_tensor.data` of all parameters, maybe trains on, and starts a second engine."""

    def loop(run: Run) -> None:
        model = made(Net)
        engine = run.start(model)
        train(engine)
        for parameter in model.parameters():
            written = getattr(parameter, "ds_tensor", parameter)
            written.data = value(written)
        if train_on:
            train(engine, 3)
        train(run.start(model))

    return loop


@pytest.mark.thinned(3)
@pytest.mark.parametrize("clip", [1.0, 0.0])
@WINDOWS
@pytest.mark.parametrize("train_on", [True, False])
@pytest.mark.parametrize("value", [a_copy, halved])
def test_what_is_written_to_partitions_is_what_all_engines_have(
    value: Callable[[torch.Tensor], torch.Tensor], train_on: bool, slide: dict[str, Any], clip: float
) -> None:
    loop = write_partitions(value, train_on=train_on)
    found, expected = run_loop(loop, "slide", clip=clip, slide=slide), run_loop(loop, "plain", clip=clip)
    found.masters, expected.masters = found.masters[-1:], expected.masters[-1:]
    found.start_values, expected.start_values = found.start_values[:1], expected.start_values[:1]
    assert_right(found, expected)


def test_another_number_of_elements_is_refused() -> None:
    model = made(Net)
    with started(model, 1.0, {"window": 2}):
        with pytest.raises(SlideError, match="is set to 7 elements, but this rank has 1,024 of it"):
            model.inp.weight.ds_tensor.data = torch.zeros(7)


def test_a_tensor_in_the_place_of_a_partition_is_refused_by_name() -> None:
    model = made(Net)
    with started(model, 1.0, {"window": 2}):
        ours = model.blocks[0].up.weight.ds_tensor
        model.blocks[0].up.weight.ds_tensor = torch.zeros(ours.numel())
        with pytest.raises(SlideError, match=r"ds_tensor of parameter blocks\.0\.up\.weight is a tensor"):
            start(model, 1.0, {"window": 2})
        model.blocks[0].up.weight.ds_tensor = ours


# ---- memory ----------------------------------------------------------------------------------------------------------


def state_bytes() -> int:
    """Bytes of the states of this model in host memory, over all engines that anything has left alive."""
    gc.collect()
    storages = {}
    for each in gc.get_objects():
        if isinstance(each, torch.Tensor) and type(each).__name__ in ("Tensor", "Partition", "Parameter"):
            storage = each.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


class Wrapped(nn.Module):
    """What PEFT and accelerate make of a model."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.inner(x)
        return loss


def the_same(model: nn.Module, number: int) -> tuple[nn.Module, dict[str, Any]]:  # noqa: ARG001
    return model, {}


def wrapped_by_turns(model: nn.Module, number: int) -> tuple[nn.Module, dict[str, Any]]:
    return (Wrapped(model) if number % 2 else model), {}


def evaluated_by_turns(model: nn.Module, number: int) -> tuple[nn.Module, dict[str, Any]]:
    """Trainer: `evaluate()` makes an engine without an optimizer, `train()` another one with it."""
    return model, {} if number % 2 else {"optimizer": None}


@pytest.mark.thinned(3)
@pytest.mark.parametrize("is_kept", [True, False], ids=["kept", "dropped"])
@pytest.mark.parametrize("end", [keep, destroy])
@pytest.mark.parametrize("slide", [{"window": 2}, {"window": 2, "gpu_states": "1GiB"}], ids=["host", "gpu"])
@pytest.mark.parametrize("way", [the_same, wrapped_by_turns, evaluated_by_turns])
def test_memory_does_not_grow(
    way: Callable[[nn.Module, int], tuple[nn.Module, dict[str, Any]]],
    slide: dict[str, Any],
    end: Callable[[Any], None],
    is_kept: bool,
) -> None:
    """Whether the script destroys the engines or not, and whether it keeps them or not."""
    model, engines, held = made(lambda: Net(8)), [], []
    numel = sum(parameter.numel() for parameter in model.parameters())
    with ExitStack() as stack:
        for number in range(5):
            module, others = way(model, number)
            engine = start(module, 1.0, slide, **others)
            stack.callback(engine.destroy)
            if "optimizer" not in others:
                train(engine)
            loss(engine)
            engines.append(engine if is_kept else weakref.ref(engine))
            end(engine)
            del engine, module
            if not is_kept:
                stack.pop_all()
            held.append(state_bytes())
    # An engine has 16 bytes a parameter; the processes' own differ by less than one.
    assert max(held[3:]) - max(held[1:3]) < numel


def test_an_engine_that_has_ended_goes_though_its_model_is_kept() -> None:
    model = made(Net)
    engine = start(model, 1.0, {"window": 2})
    train(engine)
    engine.destroy()
    alive = weakref.ref(engine), weakref.ref(engine.optimizer)
    del engine
    gc.collect()
    assert alive[0]() is None and alive[1]() is None


def test_an_engine_that_was_superseded_goes_though_nobody_has_destroyed_it() -> None:
    model = made(Net)
    first = start(model, 1.0, {"window": 2})
    train(first)
    alive = weakref.ref(first), weakref.ref(first.optimizer.runtime)
    with started(model, 1.0, {"window": 2}) as second:
        del first
        gc.collect()
        assert alive[0]() is None and alive[1]() is None
        train(second)


def test_a_stock_engine_that_was_superseded_goes_too() -> None:
    model = made(Net)
    with engine_for(model, config(1.0, None)) as first:
        train(first)
        alive = weakref.ref(first)
        with started(model, 1.0, {"window": 2}) as second:
            before = loss(second)
            train(second)
    del first
    gc.collect()
    assert alive() is None and before > 0
