"""A checkpoint and a model that differ in their parameters: one sentence with names, and nothing has changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from harness import batches, ds_config, engine_for, llama, states_of, train, unequal
from torch import nn

from ds_slide.errors import SlideError

pytestmark = pytest.mark.usefixtures("one_rank")


def plain() -> nn.Module:
    return llama(num_hidden_layers=2)


def with_adapter() -> nn.Module:
    return add_adapter(plain())


def add_adapter(model: nn.Module, **options: bool) -> nn.Module:
    for layer in model.model.layers:
        layer.adapter = nn.Linear(8, 8).requires_grad_(options.get("trains", True))
    model.scale = nn.Parameter(torch.zeros(1), requires_grad=options.get("trains", True))
    return model


def frozen_but_adapter() -> nn.Module:
    model = with_adapter()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("adapter" in name or name == "scale")
    return model


@pytest.mark.parametrize("load_optimizer_states", [True, False])
@pytest.mark.parametrize(
    "saved, loading, sentence",
    [
        (plain, with_adapter, r"does not have scale, model\.layers\.0\.adapter\.weight, .* and 1 more; load it"),
        (with_adapter, plain, r"has scale, .* and 1 more, and the model has not; load it with the model"),
        (plain, frozen_but_adapter, r"does not have scale, .* and trains model\.embed_tokens\.weight.*, frozen in"),
        (with_adapter, frozen_but_adapter, r"trains model\.embed_tokens\.weight, .* more, frozen in the model; load"),
        (frozen_but_adapter, with_adapter, r"has model\.embed_tokens\.weight, .* more frozen, trained in the model"),
    ],
)
def test_other_parameters_are_named(
    saved: Callable[[], nn.Module],
    loading: Callable[[], nn.Module],
    sentence: str,
    load_optimizer_states: bool,
    tmp_path: Path,
) -> None:
    with engine_for(saved(), ds_config({"window": 2})) as engine:
        engine.save_checkpoint(tmp_path)
    with engine_for(loading(), ds_config({"window": 2})) as engine:
        before = states_of(engine.module)
        with pytest.raises(SlideError, match=sentence) as caught:
            engine.load_checkpoint(tmp_path, load_optimizer_states=load_optimizer_states)
        assert "tensor" not in str(caught.value) and "\n" not in str(caught.value)
        assert unequal(states_of(engine.module), before) == []


def frozen_but_norms() -> nn.Module:
    model = plain()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" in name)
    return model


def test_frozen_parameters_that_were_not_saved(tmp_path: Path) -> None:
    """As transformers' Trainer saves models with adapters, and resumes them. A strict load wants every weight."""
    data = batches(6)
    with engine_for(frozen_but_norms(), ds_config({"window": 2})) as engine:
        train(engine, data[:3])
        engine.save_checkpoint(tmp_path, exclude_frozen_parameters=True)
        expected = train(engine, data[3:])
        states = states_of(engine.module)
    with engine_for(frozen_but_norms(), ds_config({"window": 2})) as engine:
        before = states_of(engine.module)
        with pytest.raises(
            SlideError, match=r"was saved without frozen parameters, and the model has .* 1\d more; pass"
        ):
            engine.load_checkpoint(tmp_path)
        assert unequal(states_of(engine.module), before) == []
        engine.load_checkpoint(tmp_path, load_module_strict=False)
        assert train(engine, data[3:]).losses == expected.losses
        assert unequal(states_of(engine.module), states) == []


@pytest.mark.parametrize("trains", [True, False])
def test_parameters_added_after_initialize_are_named_at_the_save(trains: bool, tmp_path: Path) -> None:
    with engine_for(plain(), ds_config({"window": 2})) as engine:
        train(engine, batches(1))
        add_adapter(engine.module, trains=trains)
        with pytest.raises(
            SlideError, match=r"would not have scale, .* and 1 more, added to the model after"
        ) as caught:
            engine.save_checkpoint(tmp_path)
        assert "tensor" not in str(caught.value) and not list(tmp_path.iterdir())
