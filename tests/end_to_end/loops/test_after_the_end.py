"""A model and an engine after `destroy()`: a sentence for what has no meaning, and weights that can be gathered."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.utils import safe_get_full_fp32_param
from loops import LR, Net, inputs, made
from torch import nn

from ds_slide.errors import SlideError

pytestmark = pytest.mark.usefixtures("one_rank")

BF16 = {"bf16": {"enabled": True}}
AUTOCAST = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
SLIDES = pytest.mark.parametrize("slide", [{"window": 2}, {"gpu_states": "1GiB"}], ids=["host", "gpu"])


def start(model: nn.Module, slide: dict[str, Any] | None, *, trains: bool = True, **others: Any) -> Any:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
        "steps_per_print": 10**9,
        **others,
    }
    if trains and "optimizer" not in others:
        config["optimizer"] = {"type": "AdamW", "params": {"lr": LR}}
    if slide is not None:
        config["ds_slide"] = {"enabled": True, **slide}
    return deepspeed.initialize(model=model, config=config, model_parameters=list(model.parameters()))[0]


@contextmanager
def ended(slide: dict[str, Any], *, trains: bool = True, **others: Any) -> Iterator[Any]:
    engine = start(made(Net), slide, trains=trains, **others)
    if trains:
        for x in inputs(2):
            engine.backward(engine(x.to(engine.module.inp.weight.dtype)))
            engine.step()
    engine.destroy()
    yield engine


def the_engine(engine: Any) -> Callable[[torch.Tensor], Any]:
    return engine


def the_module(engine: Any) -> Callable[[torch.Tensor], Any]:
    return engine.module


def a_block(engine: Any) -> Callable[[torch.Tensor], Any]:
    return engine.module.blocks[1]


@SLIDES
@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("called", [the_engine, the_module, a_block])
def test_a_forward_is_refused(called: Callable[[Any], Any], trains: bool, slide: dict[str, Any]) -> None:
    with ended(slide, trains=trains) as engine, torch.no_grad():
        with pytest.raises(SlideError, match=r"whose (weight|bias) is not here, because the engine .* has ended"):
            called(engine)(inputs(1)[0])


@SLIDES
@pytest.mark.parametrize("others", [{}, BF16, AUTOCAST], ids=["fp32", "bf16", "autocast"])
def test_gathered_weights_compute_and_are_written_to(others: dict[str, Any], slide: dict[str, Any]) -> None:
    with ended(slide, **others) as engine, torch.no_grad():
        model = engine.module
        x = inputs(1)[0].to(model.inp.weight.dtype)
        with deepspeed.zero.GatheredParameters(list(model.parameters())):
            before = float(model(x))
        with deepspeed.zero.GatheredParameters(list(model.parameters()), modifier_rank=0):
            for parameter in model.parameters():
                parameter.mul_(0.5)
            halved = float(model(x))
            expected = [parameter.clone() for parameter in model.parameters()]
        assert before != halved
        second = start(model, slide, **others)
        try:
            assert float(second(x)) == pytest.approx(halved, rel=2**-6)
            with deepspeed.zero.GatheredParameters(list(model.parameters())):
                for parameter, value in zip(model.parameters(), expected, strict=True):
                    assert torch.equal(parameter, value)
        finally:
            second.destroy()


@SLIDES
def test_calls_of_the_ended_engine_are_refused(slide: dict[str, Any], tmp_path: Any) -> None:
    engine = start(made(Net), slide)
    loss = engine(inputs(1)[0])
    engine.destroy()
    parameter = engine.module.inp.weight
    for call in (
        lambda: engine.backward(loss),
        lambda: engine.step(),
        lambda: engine.save_checkpoint(str(tmp_path)),
        lambda: engine.optimizer.get_full_hp_param(parameter),
        lambda: safe_get_full_fp32_param(parameter),
    ):
        with pytest.raises(SlideError, match="this engine has ended, by destroy"):
            call()
    engine.destroy()  # harmless


@pytest.mark.parametrize("slide", [{"window": 2}, None], ids=["slide", "stock"])
def test_the_next_engine_takes_the_refusals_away(slide: dict[str, Any] | None) -> None:
    with ended({"window": 2}) as engine:
        hooks = engine.module.inp._forward_pre_hooks
        assert len(hooks) == 1
        second = start(engine.module, slide)
        engine.destroy()  # once more: the model is no longer its own
        second.backward(second(inputs(1)[0]))
        second.step()
        second.destroy()


# ---- groups, states, data types --------------------------------------------------------------------------------------


def test_a_further_group_is_refused_and_told_where_it_belongs() -> None:
    model = made(Net)
    own = torch.optim.AdamW(list(model.parameters())[:2], lr=LR)
    further = {"params": list(model.parameters())[2:]}
    config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 3}, "ds_slide": {"enabled": True}}
    engine, *_ = deepspeed.initialize(model=model, optimizer=own, config=config)
    for optimizer in (engine.optimizer, own, engine.basic_optimizer):
        with pytest.raises(SlideError, match=r"add_param_group\(\) of \d+ parameters is refused.*give it all groups"):
            optimizer.add_param_group(further)
    engine.destroy()
    own.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})  # an ordinary optimizer again


def test_reload_states_does_nothing() -> None:
    engine = start(made(Net), {"window": 2})
    assert engine.reload_states() is None
    engine.destroy()


@pytest.mark.parametrize("trains", [True, False])
def test_a_float64_model_is_told_why_and_what_helps(trains: bool) -> None:
    told = r"is torch\.float64 and requires a gradient, but .* checkpoints are fp32\); .* with model\.float\(\)"
    with pytest.raises(SlideError, match=told):
        start(made(Net).double(), {"window": 2}, trains=trains)
    engine = start(made(Net).double().float(), {"window": 2}, trains=trains)
    engine.destroy()
