"""Optimizers that a script brings: bits of plain torch, checkpoints, groups and schedules, budgets, refusals."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import client_optimizers as clients
import pytest
import torch
from client_optimizers import OURS, PACKAGES, THEIRS, Make, config
from deepspeed.accelerator import get_accelerator
from harness import (
    Batch,
    Result,
    batches,
    differences,
    distance_of_masters,
    engine_for,
    llama,
    on_ssd,
    states_of,
    sum_gradients_by_block,
    to_bf16,
    train,
    unequal,
)
from torch import nn

from ds_slide.errors import DoesNotFit, SlideConfigError, SlideError
from ds_slide.optim.client import client_rule, trial

pytestmark = pytest.mark.usefixtures("one_rank")

STEPS = 20
LAYERS = 3
MAKERS = OURS | THEIRS
WINDOW = {"window": 2, "gpu_states": 0}


QUICK = ("Adafactor of transformers", "a subclass of AdamW")
"""The optimizers that each run of the tests has; the others are of the long run."""


def cases(names: Sequence[str]) -> Any:
    slow = {name: () if name in QUICK else pytest.mark.slow for name in names}
    return pytest.mark.parametrize("name", [pytest.param(name, marks=marks) for name, marks in slow.items()])


def model(seed: int = 0) -> nn.Module:
    return llama(seed, num_hidden_layers=LAYERS)


def need(name: str) -> None:
    """Skip the test of an optimizer whose package is not installed."""
    package = PACKAGES.get(name, "bitsandbytes" if name.startswith("bitsandbytes") else "torch")
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")


def trained(make: Make, data: Sequence[Batch], clip: float, **options: Any) -> Result:
    own = model()
    with engine_for(own, config(WINDOW, clip=clip, **options), optimizer=make(own.parameters())) as engine:
        result = train(engine, data)
        result.states = states_of(own, ())
    return result


def reference(make: Make, data: Sequence[Batch], clip: float) -> Result:
    plain = to_bf16(model())
    sum_gradients_by_block(plain.model.layers)
    return clients.plain_training(plain, make, data, clip)


@cases(list(MAKERS))
def test_twenty_steps_have_the_bits_of_plain_torch(name: str) -> None:
    """With clipping, so that gradients wait for the step and updates run under the next forward."""
    need(name)
    make, data = MAKERS[name], batches(2) * (STEPS // 2)
    found = trained(make, data, 1.0)
    assert differences(found, reference(make, data, 1.0)) == []
    assert found.losses[0] - found.losses[-1] > 0.02  # it learns


@cases(["NAdam", "Adafactor of transformers"])
def test_updates_under_backward_have_the_same_bits(name: str) -> None:
    data = batches(4)
    assert differences(trained(MAKERS[name], data, 0.0), reference(MAKERS[name], data, 0.0)) == []


# ----------------------------------------------------------------------------------------------------------------------
# What the script and DeepSpeed add to a step.


def test_groups_a_schedule_accumulation_and_loss_scaling(monkeypatch: pytest.MonkeyPatch) -> None:
    """fp16 with a static scale; two groups with rates of their own, which a scheduler changes after each step."""
    monkeypatch.setattr(get_accelerator(), "is_fp16_supported", lambda: True)  # slow on a CPU, but it works
    data, steps, scale = batches(8), 4, 128.0

    def split(own: nn.Module) -> list[dict[str, Any]]:
        matrices = [p for p in own.parameters() if p.dim() > 1]
        others = [p for p in own.parameters() if p.dim() < 2]
        return [{"params": matrices, "lr": 2e-3, "weight_decay": 0.1}, {"params": others}]

    def schedule(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))

    make = OURS["NAdam"]
    own = model()
    optimizer = make(split(own))
    others = {"bf16": None, "fp16": {"enabled": True, "loss_scale": scale}, "accumulation": 2}
    options = {"optimizer": optimizer, "lr_scheduler": schedule(optimizer)}
    with engine_for(own, config(WINDOW, **others), **options) as engine:
        found = train(engine, data)
        found.states = states_of(own, ())
        rates = [group["lr"] for group in optimizer.param_groups]
    # Plain torch, with gradients summed as the engine sums them: in fp16, in their own type.
    plain = model().half()
    masters = {name: nn.Parameter(p.detach().float()) for name, p in plain.named_parameters()}
    named = dict(plain.named_parameters())
    owner = dict(zip(named.values(), masters.values(), strict=True))
    other = make([{**group, "params": [owner[p] for p in group["params"]]} for group in split(plain)])
    scheduler = schedule(other)
    losses = []
    for number in range(steps):
        for batch in data[2 * number : 2 * number + 2]:
            loss = plain(**batch).loss
            (loss * (scale / 2)).backward()
            losses.append(loss.item())
        for name, p in named.items():
            masters[name].grad = p.grad.float() / scale
            p.grad = None
        nn.utils.clip_grad_norm_(masters.values(), 1.0)
        other.step()
        scheduler.step()
        for name, p in named.items():
            p.data.copy_(masters[name].detach())
    assert rates == [group["lr"] for group in other.param_groups]
    assert found.losses == pytest.approx(losses, rel=2e-3)
    expected = Result(states={name: {"master": master.detach()} for name, master in masters.items()})
    assert distance_of_masters(found, expected, model()) < 0.05


def test_a_parameter_that_is_off_is_left_alone() -> None:
    """As in plain torch, where it has no gradient: its state and its count stay."""
    data, make, name = batches(6), OURS["a subclass of AdamW"], "model.layers.1.mlp.up_proj.weight"

    def run(own: nn.Module, step: Callable[[Batch], None]) -> None:
        parameter = dict(own.named_parameters())[name]
        for number, batch in enumerate(data):
            parameter.requires_grad_(number not in (2, 3))
            step(batch)

    own = model()
    with engine_for(own, config(WINDOW), optimizer=make(own.parameters())) as engine:
        run(own, lambda batch: train(engine, [batch]) and None)
        found = states_of(own, ())
    reference_model = to_bf16(model())
    sum_gradients_by_block(reference_model.model.layers)
    plain = clients.Plain(reference_model, make, 1.0)

    def step(batch: Batch) -> None:
        reference_model(**batch).loss.backward()
        plain.step()

    run(reference_model, step)
    assert unequal(found, plain.states()) == []


# ----------------------------------------------------------------------------------------------------------------------
# Checkpoints.


def content(engine: Any) -> dict[str, Any]:
    """Everything that the copies of the optimizer keep."""
    for unit in engine.optimizer.runtime.units:
        engine.optimizer.runtime.access.settle(unit)
    return {unit.name: unit.state.optimizer.client.content() for unit in engine.optimizer.runtime.units}


def different(left: Any, right: Any) -> list[str]:
    """The paths at which two contents differ in any bit."""
    if isinstance(left, dict):
        if left.keys() != right.keys():
            return [f": {left.keys() ^ right.keys()}"]
        return [f"/{key}{path}" for key in left for path in different(left[key], right[key])]
    if isinstance(left, list | tuple):
        return [f"/{n}{path}" for n, pair in enumerate(zip(left, right, strict=True)) for path in different(*pair)]
    if isinstance(left, torch.Tensor):
        return [] if left.dtype == right.dtype and torch.equal(left, right) else [""]
    return [] if type(left) is type(right) and left == right else [f": {left!r}, {right!r}"]


def continued(engine: Any) -> Result:
    result = train(engine, batches(8)[4:])
    result.states = states_of(engine.module, ())
    return result


@cases(["Adafactor of transformers", "a subclass of AdamW", "NAdam", "bitsandbytes AdamW8bit"])
@pytest.mark.parametrize("background", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["", "async"])
def test_a_resumed_run_continues_to_the_bit(name: str, background: bool, tmp_path: Path) -> None:
    need(name)
    own, slide = model(), WINDOW | {"async_save": background}
    with engine_for(own, config(slide), optimizer=MAKERS[name](own.parameters())) as engine:
        train(engine, batches(4))
        engine.save_checkpoint(tmp_path)
        expected = continued(engine)
        kept = content(engine)
    own = model(7)
    with engine_for(own, config(slide), optimizer=MAKERS[name](own.parameters())) as engine:
        train(engine, batches(1))  # so that there is something to forget
        engine.load_checkpoint(tmp_path)
        found = continued(engine)
        assert differences(found, expected) == []
        assert found.norms == expected.norms
        assert different(content(engine), kept) == []


def test_a_checkpoint_of_another_optimizer_is_refused_by_name(tmp_path: Path) -> None:
    own = model()
    with engine_for(own, config(WINDOW), optimizer=OURS["NAdam"](own.parameters())) as engine:
        train(engine, batches(1))
        engine.save_checkpoint(tmp_path / "nadam")
    own = model()
    with engine_for(own, config(WINDOW), optimizer=torch.optim.AdamW(own.parameters())) as engine:
        engine.save_checkpoint(tmp_path / "adamw")
        with pytest.raises(SlideError, match="saved with an optimizer of the script's own, whose states are in ds_sli"):
            engine.load_checkpoint(tmp_path / "nadam")
    own = model()
    with engine_for(own, config(WINDOW), optimizer=OURS["Adafactor"](own.parameters())) as engine:
        with pytest.raises(SlideError, match=r"has the states of the optimizer torch\.optim\.nadam\.NAdam, but this"):
            engine.load_checkpoint(tmp_path / "nadam")
        with pytest.raises(SlideError, match=r"has no ds_slide_optimizer_0\.pt with the states of torch\.optim\."):
            engine.load_checkpoint(tmp_path / "adamw")
        engine.load_checkpoint(tmp_path / "adamw", load_optimizer_states=False)
        train(engine, batches(1))


# ----------------------------------------------------------------------------------------------------------------------
# Budgets and refusals.


def test_the_plan_counts_what_the_optimizer_keeps() -> None:
    for name, bytes_each in {"NAdam": 12.0, "Adafactor": 4.1}.items():
        own = model()
        with engine_for(own, config(WINDOW), optimizer=OURS[name](own.parameters())) as engine:
            runtime = engine.optimizer.runtime
            numel = sum(unit.layout.trainable_numel for unit in runtime.units)
            planned = runtime.parts.memory_report["host_state_bytes"]
            train(engine, batches(1))
            content(engine)
            kept = sum(unit.state.optimizer.client.nbytes() for unit in runtime.units)
            buffers = sum(
                buffer.tensor.nbytes
                for unit in runtime.units
                for key, buffer in unit.state.buffers.items()
                if key != "gradient"
            )
            assert planned == kept + buffers
            assert planned / numel == pytest.approx(bytes_each, rel=0.01)


def test_states_that_do_not_fit_are_refused_before_they_are_made() -> None:
    own = model()
    with pytest.raises(DoesNotFit, match=r"host_memory is 1\.0 MB, .*offload_param.* client states of model"):
        with engine_for(own, config(WINDOW | {"host_memory": 1_000_000}), optimizer=OURS["NAdam"](own.parameters())):
            pass


def test_states_that_grow_are_bounded() -> None:
    own = model()
    optimizer = clients.Growing(own.parameters(), lr=1e-3)
    with pytest.raises(SlideError, match=r"states of .* have grown to .* ds_slide\.host_memory is 3\.0 MB; raise it"):
        with engine_for(own, config(WINDOW | {"host_memory": 3_000_000}), optimizer=optimizer) as engine:
            train(engine, batches(5))
            content(engine)


class Modes(torch.optim.SGD):
    def train(self) -> None: ...

    def eval(self) -> None: ...


def hooked(parameters: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.NAdam(parameters)
    optimizer.register_step_pre_hook(lambda *_: None)
    return optimizer


REFUSED: dict[str, tuple[Make, dict[str, Any], str]] = {
    "LBFGS": (torch.optim.LBFGS, {}, r"torch\.optim\.lbfgs\.LBFGS needs a closure in step\(\)"),
    "modes": (Modes, {}, r"Modes has a train\(\) and an eval\(\) of its own"),
    "sparse": (lambda p: torch.optim.SparseAdam(list(p)), {}, "SparseAdam is for sparse gradients"),
    "hooks": (hooked, {}, "NAdam has hooks on its step"),
    "global norm": (lambda p: clients.GlobalNorm(p, lr=0.1), {}, "GlobalNorm looks at all parameters in the step"),
    "noise": (lambda p: clients.Noisy(p, lr=0.1), {}, "Noisy draws from torch's random generator"),
    "capturable": (lambda p: torch.optim.NAdam(p, capturable=True), {}, "cannot step over fp32 tensors in host memory"),
    "gpu_states": (
        torch.optim.NAdam,
        {"gpu_states": 1000},
        r"gpu_states is 1000, but torch\.optim\.nadam\.NAdam steps",
    ),
    "state_dtype": (torch.optim.NAdam, {"state_dtype": "bf16"}, r'state_dtype is "bf16", but torch\.optim\.nadam'),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_copy_for_each_unit_cannot_do_is_refused(case: str) -> None:
    make, slide, words = REFUSED[case]
    own = model()
    with pytest.raises(SlideConfigError, match=words):
        with engine_for(own, config({"window": 2} | slide), optimizer=make(own.parameters())):
            pass


def test_states_on_ssd_are_refused(tmp_path: Path) -> None:
    own = model()
    there = on_ssd(config({"window": 2}), tmp_path, "offload_optimizer")
    with pytest.raises(
        SlideConfigError, match=r'offload_optimizer\.device is "nvme", but torch\.optim\.nadam\.NAdam ma'
    ):
        with engine_for(own, there, optimizer=torch.optim.NAdam(own.parameters())):
            pass


def test_weights_on_ssd_have_the_same_bits(tmp_path: Path) -> None:
    own, data, make = model(), batches(3), OURS["Adafactor"]
    there = on_ssd(config({"window": 2, "host_memory": 600_000}), tmp_path, "offload_param")
    with engine_for(own, there, optimizer=make(own.parameters())) as engine:
        assert engine.optimizer.runtime.parts.memory_report["ssd_bytes"] > 0
        found = train(engine, data)
        found.states = states_of(own, ())
    assert differences(found, trained(make, data, 1.0)) == []


def test_the_trial_tells_optimizers_that_treat_shapes() -> None:
    parameters = list(model().parameters())
    by_shape = {name for name in OURS if trial(client_rule(OURS[name](parameters))).by_shape}
    assert by_shape == {"Adafactor", "Adafactor of transformers"}


def test_a_name_of_torch_in_the_json() -> None:
    own, data = model(), batches(2)
    named = config(WINDOW, optimizer={"type": "RMSprop", "params": {"lr": 1e-3}})
    with engine_for(own, named) as engine:
        found = train(engine, data)
        found.states = states_of(own, ())
    expected = reference(lambda parameters: torch.optim.RMSprop(parameters, lr=1e-3), data, 1.0)
    assert differences(found, expected) == []
