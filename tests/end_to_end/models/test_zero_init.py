"""A model that is loaded under `zero.Init` as axolotl loads it.

It fills in the batch sizes of the JSON, loads the model, and leaves the rest to Trainer's TrainingArguments; and it
converts norms to fp32, which changes nothing of weights that are partitioned.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from harness import batches, differences, ds_config, engine_for, llama, loaded, train

from ds_slide.errors import SlideConfigError

pytestmark = pytest.mark.usefixtures("one_rank")


def test_a_model_is_loaded_before_the_clipping_is_filled_in() -> None:
    seen = []
    for at_first in (1.0, "auto"):
        config = ds_config({}, gradient_clipping=at_first)
        model = loaded(llama().config, config)
        assert all(hasattr(parameter, "ds_id") for parameter in model.parameters())
        with engine_for(model, config | {"gradient_clipping": 1.0}) as engine:
            seen.append(train(engine, batches(2)))
    assert differences(*seen) == []


@pytest.mark.parametrize("slide", [None, {"gpu_states": 0}, {}], ids=["stock", "host", "gpu"])
def test_what_a_partitioned_model_is_converted_to_does_not_count(slide: dict[str, Any] | None) -> None:
    seen = []
    for converted in (False, True):
        config = ds_config(slide)
        model = loaded(llama().config, config)
        if converted:
            for name, module in model.named_modules():
                if "norm" in name:
                    module.to(torch.float32)
        with engine_for(model, config) as engine:
            seen.append(train(engine, batches(2)))
            assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert differences(*seen) == []


def test_an_engine_takes_over_what_an_earlier_one_kept_shorter() -> None:
    """Parameters in fp32 whose weights are kept in bf16 beside their low halves: these are not what they seem."""
    autocast = {"bf16": {"enabled": False}, "torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
    config = ds_config({}, **autocast)
    model, seen = loaded(llama().config, config), []
    for _ in range(2):
        with engine_for(model, config) as engine:
            seen.append(train(engine, batches(2)).losses)
            assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert seen[1][0] < seen[0][-1]


def test_what_nobody_has_filled_in_is_refused_by_the_engine() -> None:
    config = ds_config({}, gradient_clipping="auto")
    model = loaded(llama().config, config)
    with (
        pytest.raises(SlideConfigError, match=r'^gradient_clipping is "auto"; expected a number'),
        engine_for(model, config),
    ):
        pass


def test_the_first_use_of_the_key_may_be_inside_of_an_init() -> None:
    """What is imported then does not import torch._dynamo, which fails where `zero.Init` has replaced `__new__`."""
    script = "import deepspeed, ds_slide.integration.contract, sys; print('torch._dynamo' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines()[-1] == "False"
