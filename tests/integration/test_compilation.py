"""DeepSpeed's operators: not compiled for an optimizer that only carries numbers, no silent wait for a dead lock."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.ops.op_builder import CPUAdamBuilder
from harness import batches, ds_config, llama

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every loading of DeepSpeedCPUAdam's operator, which compiles it where that has not happened before."""
    loaded: list[str] = []
    load = CPUAdamBuilder.load

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        loaded.append(self.name)
        return load(self, *args, **kwargs)

    monkeypatch.setattr(CPUAdamBuilder, "load", counted)
    return loaded


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[dict[str, Any]], Any]]:
    """Makes an Accelerator for a DeepSpeed config, as a script does; nothing of it is left at the end."""
    from accelerate import Accelerator, DeepSpeedPlugin
    from accelerate.state import AcceleratorState, GradientState

    for name in ("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_MIXED_PRECISION"):
        monkeypatch.setenv(name, "")  # put back at the end, whatever accelerate makes of it

    def make(config: dict[str, Any]) -> Any:
        return Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))

    yield make
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def without_optimizer(slide: dict[str, Any] | None) -> dict[str, Any]:
    return {key: value for key, value in ds_config(slide).items() if key != "optimizer"}


def test_an_optimizer_that_accelerate_replaces_is_not_compiled(accelerator, loads):
    model = llama(num_hidden_layers=2)
    accelerate = accelerator(without_optimizer({"window": 2}))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.99), weight_decay=0.2)
    engine, wrapped = accelerate.prepare(model, optimizer)
    try:
        assert type(engine.optimizer).__name__ == "SlideZeroOptimizer"
        carrier = engine.optimizer.optimizer
        assert type(carrier) is DeepSpeedCPUAdam
        assert (carrier.param_groups[0]["lr"], carrier.param_groups[0]["weight_decay"]) == (3e-3, 0.2)
        batch = batches(1)[0]
        before = engine(**batch).loss.item()
        for _ in range(3):
            accelerate.backward(engine(**batch).loss)
            wrapped.step()
            wrapped.zero_grad()
        assert engine(**batch).loss.item() < before - 0.1
        assert loads == []
    finally:
        engine.destroy()


def test_without_the_key_it_is_compiled_as_ever(accelerator, loads):
    accelerator(without_optimizer(None))
    DeepSpeedCPUAdam([torch.nn.Parameter(torch.ones(4))])
    assert loads == ["cpu_adam"]


def test_without_accelerate_it_is_compiled_as_ever(loads):
    DeepSpeedCPUAdam([torch.nn.Parameter(torch.ones(4))])
    assert loads == ["cpu_adam"]


def test_whoever_steps_it_all_the_same_has_the_kernels(accelerator, loads):
    """Compiled at the first step, with the hyper-parameters of the constructor; a copy does not compile."""
    expected, found = (torch.nn.Parameter(torch.linspace(-1, 1, 300)) for _ in range(2))
    gradient = torch.linspace(2, -3, 300)
    stock = DeepSpeedCPUAdam([expected], lr=1e-2, weight_decay=0.3)
    loads.clear()
    accelerator(without_optimizer({}))
    optimizer = DeepSpeedCPUAdam([found], lr=1e-2, weight_decay=0.3)
    copy.copy(optimizer.ds_opt_adam)
    assert loads == []
    for each, parameter in ((stock, expected), (optimizer, found)):
        for _ in range(2):
            parameter.grad = gradient.clone()
            each.step()
    assert loads == ["cpu_adam"]
    assert torch.equal(found, expected) and not torch.equal(found, torch.linspace(-1, 1, 300))
