"""A model that the script built without `deepspeed.zero.Init` reaches its planes without a whole copy elsewhere.

What the GPU holds meanwhile is judged on one, in tests/gpu/test_bits.py.
"""

from __future__ import annotations

from typing import Any

import deepspeed
import pytest
import torch
from harness import ds_config, engine_for, llama
from torch import nn

pytestmark = pytest.mark.usefixtures("one_rank")


class Watched(nn.Module):
    """A model that notes whether somebody moved or converted it as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.model = llama().bfloat16()
        self.moved = 0

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        self.moved += 1
        return super()._apply(*args, **kwargs)

    def forward(self, **inputs: torch.Tensor) -> Any:
        return self.model(**inputs)


@pytest.mark.parametrize(("slide", "moves"), [({}, 0), (None, 1)])
def test_the_model_is_not_moved_as_a_whole(slide: dict[str, Any] | None, moves: int) -> None:
    model = Watched()
    with engine_for(model, ds_config(slide)):
        assert model.moved == moves


def test_buffers_are_where_the_model_computes() -> None:
    model = llama()
    model.register_buffer("table", torch.arange(3.0))
    model.model.register_buffer("same_table", model.table)
    place = torch.device(deepspeed.accelerator.get_accelerator().current_device_name())
    with engine_for(model, ds_config({})) as engine:
        assert model.table is model.model.same_table
        tensors = [*engine.module.parameters(), *engine.module.buffers()]
        assert {tensor.device.type for tensor in tensors} == {place.type}
        assert engine.dont_change_device is False


def test_a_placement_of_the_script_stays() -> None:
    from ds_slide.integration.host_weights import weights_stay

    model = llama()
    model.register_buffer("table", torch.arange(3.0))
    with engine_for(model, ds_config({})) as engine:
        engine.dont_change_device, engine.device = True, torch.device("meta")
        with weights_stay(engine):
            pass
        assert model.table.device.type == "cpu"
        assert engine.dont_change_device is True


def test_nothing_is_left_on_the_engine_when_deepspeed_fails() -> None:
    from ds_slide.integration.host_weights import weights_stay

    with engine_for(llama(), ds_config({})) as engine:
        stock = engine._broadcast_model
        with pytest.raises(ZeroDivisionError), weights_stay(engine):
            assert engine._broadcast_model != stock
            raise ZeroDivisionError
        assert engine._broadcast_model == stock
        assert engine.dont_change_device is False
