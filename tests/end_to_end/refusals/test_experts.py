"""Experts on ranks of their own are refused at `initialize`: by DeepSpeed's layer, or by their parameters' mark."""

from __future__ import annotations

import deepspeed
import pytest
from deepspeed.moe.layer import MoE
from harness import ds_config
from torch import nn

from ds_slide.errors import SlideConfigError

pytestmark = pytest.mark.usefixtures("one_rank")
WAY_OUT = "DS-Slide has no expert parallelism; use the experts of a transformers model"


def with_experts() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), MoE(4, nn.Linear(4, 4), num_experts=4, ep_size=2))


def with_marked_parameters() -> nn.Module:
    """As a script marks its own experts, for `split_params_into_different_moe_groups_for_optimizer`."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for parameter in model[1].parameters():
        parameter.allreduce, parameter.group_name = False, "ep_size_2"  # type: ignore[attr-defined]
    return model


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (with_experts, f"module 1 is a DeepSpeed MoE, but {WAY_OUT}"),
        (
            with_marked_parameters,
            f"parameter 1.weight is of an expert-parallel group (allreduce is False), but {WAY_OUT}",
        ),
    ],
)
def test_expert_parallelism_is_refused_by_name(make: object, message: str) -> None:
    assert callable(make)
    model = make()
    with pytest.raises(SlideConfigError) as caught:
        deepspeed.initialize(model=model, config=ds_config({}), model_parameters=model.parameters())
    assert str(caught.value).startswith(message)
    assert not any(hasattr(parameter, "ds_id") for parameter in model.parameters())
