"""The optimizers of `step.py`: what the JSON has, what the options are, and the products that Muon's bound counts."""

from __future__ import annotations

import argparse
import copy

import optimizers
import pytest
import settings
import torch
from settings import Setting
from torch import nn
from trainers import Sizes, TorchTrainer, deepspeed_config


def test_options_give_the_setting_back() -> None:
    setting = Setting("slide", optimizer="muon", optimizer_params={"ns_method": "standard"})
    parser = argparse.ArgumentParser()
    settings.add_arguments(parser)
    assert settings.from_arguments(parser.parse_args(setting.arguments())) == setting


def test_half_of_the_states_is_for_adamw() -> None:
    parser = argparse.ArgumentParser()
    settings.add_arguments(parser)
    asked = Setting("slide", optimizer="muon", slide={"host_memory": "half"}).arguments()
    with pytest.raises(ValueError, match="counts the states of AdamW"):
        settings.from_arguments(parser.parse_args(asked))


def test_the_json_is_what_a_user_writes() -> None:
    made = {name: deepspeed_config(Setting("stock", optimizer=name), Sizes(10, 5)) for name in settings.OPTIMIZERS}
    assert made["adamw"]["optimizer"]["type"] == "AdamW"
    assert made["muon"]["optimizer"]["type"] == "Muon"
    assert made["muon"]["optimizer"]["params"]["muon_lr"] == 1e-3
    assert made["muon"]["zero_optimization"]["reduce_scatter"] is False
    for name in ("adafactor", "paged-adamw-8bit"):
        assert "optimizer" not in made[name]
        assert made[name]["zero_allow_untested_optimizer"] is True


@pytest.mark.parametrize("name", ["adamw", "muon", "adafactor"])
def test_each_trains_alone(name: str) -> None:
    """In plain torch: every parameter moves, and Muon has the matrices that DeepSpeed marks."""
    model = nn.ModuleDict({"embed": nn.Embedding(8, 4), "proj": nn.Linear(4, 6)})
    assert optimizers.matrices_of(model) == [model["proj"].weight]
    before = copy.deepcopy(model.state_dict())
    trainer = TorchTrainer(model, Setting("gpu-only", optimizer=name, lr=1e-2))
    with torch.compiler.set_stance("force_eager"):
        trainer.backward(model["proj"](model["embed"](torch.arange(8))).square().sum())
        trainer.step()
    assert all(not torch.equal(before[key], value) for key, value in model.state_dict().items())
