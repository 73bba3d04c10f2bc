"""A model that the script built without `deepspeed.zero.Init` reaches its state buffers without a whole copy elsewhere.

Here the device "meta" stands for the accelerator, which is the processor itself; what the GPU holds meanwhile is judged
on one, in tests/gpu/test_bits.py.
"""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch
from harness import batches, ds_config, engine_for, llama, train
from torch import nn

from ds_slide.errors import SlideConfigError
from ds_slide.integration import activation, assemble
from ds_slide.integration.activation import weights_stay
from ds_slide.runtime.core.device import Device

pytestmark = pytest.mark.usefixtures("one_rank")
ELSEWHERE = torch.device("meta")


class Carrier(nn.Module):
    """Carries a plain tensor along where it is moved, as some models do with tables that are no buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.linear.weight.grad = torch.ones(4, 4)
        self.table = torch.ones(3)
        self.register_buffer("shared", torch.ones(2))
        self.linear.register_buffer("shared", self.shared)
        self.register_buffer("scratch", torch.ones(2), persistent=False)

    def _apply(self, fn: Any, *args: Any, **kwargs: Any) -> Any:
        self.table = fn(self.table)
        return super()._apply(fn, *args, **kwargs)


def engine_of(module: nn.Module, *, dont_change_device: bool = False) -> Any:
    """What `weights_stay` uses of an engine."""
    return SimpleNamespace(module=module, device=ELSEWHERE, dont_change_device=dont_change_device)


def test_all_but_the_parameters_is_moved() -> None:
    module = Carrier()
    weight, grad = module.linear.weight, module.linear.weight.grad
    with weights_stay(engine_of(module)):
        assert module.shared.device.type == "cpu"
    assert {buffer.device for buffer in module.buffers()} == {module.table.device} == {ELSEWHERE}
    assert module.linear.shared is module.shared
    assert module.linear.weight is weight
    assert module.linear.weight.grad is grad
    assert {parameter.device.type for parameter in module.parameters()} == {"cpu"}


def test_nothing_is_moved_where_the_script_has_placed_the_model() -> None:
    module = Carrier()
    engine = engine_of(module, dont_change_device=True)
    with weights_stay(engine):
        pass
    assert {buffer.device.type for buffer in module.buffers()} == {"cpu"}
    assert engine.dont_change_device is True


@pytest.mark.parametrize("fails", [False, True])
def test_deepspeed_neither_moves_nor_broadcasts_meanwhile(fails: bool) -> None:
    engine = engine_of(Carrier())
    with pytest.raises(ZeroDivisionError) if fails else nullcontext(), weights_stay(engine):
        assert engine.dont_change_device is True
        assert engine._broadcast_model() is None
        assert 1 / (not fails)
    assert engine.dont_change_device is False
    assert not hasattr(engine, "_broadcast_model")


@pytest.mark.parametrize(("slide", "times"), [({}, 1), (None, 0)])
def test_it_holds_for_engines_with_the_key(
    monkeypatch: pytest.MonkeyPatch, slide: dict[str, Any] | None, times: int
) -> None:
    seen = []

    def watched(engine: Any) -> Any:
        seen.append(engine)
        return weights_stay(engine)

    monkeypatch.setattr(activation, "weights_stay", watched)
    with engine_for(llama(), ds_config(slide)):
        assert len(seen) == times


def test_weights_that_are_a_view_of_a_file_are_no_memory_that_comes_free(tmp_path: Any) -> None:
    model = llama().bfloat16()
    config = ds_config({})
    settings = assemble.SlideConfig.from_deepspeed(config)
    nbytes = sum(2 * parameter.numel() for parameter in model.parameters())
    safetensors.torch.save_file(
        {name: weight.clone() for name, weight in model.state_dict().items()}, tmp_path / "file"
    )

    def comes_free() -> int:
        found = assemble._budgets(model, [], settings, Device(torch.device("cpu")))
        return found.host_free - found.gpu_free  # what is available and what will be

    assert comes_free() == nbytes
    mapped = safetensors.torch.load_file(tmp_path / "file")
    for name, parameter in model.named_parameters():
        parameter.data = mapped[name]
    assert comes_free() == 0


def test_a_model_on_the_meta_device_is_refused_until_it_is_loaded() -> None:
    source = llama().bfloat16()
    with ELSEWHERE:
        model = llama().bfloat16()
    message = r"parameter model.embed_tokens.weight is on the meta device, where it has no values; load the checkpoint"
    with pytest.raises(SlideConfigError, match=message), engine_for(model, ds_config({})):
        pass
    model.load_state_dict(source.state_dict(), assign=True)
    model.model.rotary_emb = source.model.rotary_emb  # its buffers are not saved
    model.requires_grad_(True)
    with engine_for(model, ds_config({})) as found, engine_for(source, ds_config({})) as expected:
        assert train(found, batches(1)).losses == train(expected, batches(1)).losses
