"""Parameters of several data types in one model: each is trained from its own exact master, wherever its states live.

Gradients of all of them are reduced in the data type that is enabled in the JSON, as in stock ZeRO-3.
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from adapters import RANK, Adapter, adapted, under_zero_init
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from harness import (
    ADAMW,
    Batch,
    Result,
    batches,
    causal_loss,
    differences,
    ds_config,
    engine_for,
    first_gradients,
    llama,
    on_ssd,
    plain_training,
    same_bits,
    states_of,
    sum_gradients_by_block,
    to_bf16,
    train,
    trained,
    unequal,
)
from torch import nn

from ds_slide.errors import SlideConfigError

pytestmark = [pytest.mark.usefixtures("one_rank"), pytest.mark.thinned(2)]

STEPS = 4
# What trains beside the adapters: nothing; a norm in every block, the last norm and the head, in bf16.
MODELS = {"adapters": (), "adapters_and_bf16": ("input_layernorm", "model.norm", "lm_head")}
SCHEDULES = {"clipping": (1.0, 1), "immediate": (0.0, 1), "accumulation": (1.0, 2)}
models = pytest.mark.parametrize("beside", MODELS.values(), ids=MODELS)
schedules = pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)


def config_of(slide: dict[str, Any] | None, schedule: tuple[float, int] = (1.0, 1), **others: Any) -> dict[str, Any]:
    clip, accumulation = schedule
    if slide is not None:
        slide = {"window": 2, "cpu_threads": 1, "gpu_states": 0, **slide}
    return ds_config(slide, clip=clip, accumulation=accumulation, **others)


@functools.cache
def reference(schedule: tuple[float, int], beside: Collection[str]) -> Result:
    """With all states in host memory."""
    return trained(adapted(trained=beside), config_of({}, schedule), batches(STEPS * schedule[1]))


@models
@pytest.mark.parametrize("clip", [1.0, 0.0], ids=["clipping", "immediate"])
def test_plain_torch_gives_the_same_bits(clip: float, beside: Collection[str]) -> None:
    """Losses, norms and states: fp32 parameters are their own masters, bf16 ones have theirs in two halves."""
    plain = adapted(trained=beside, partitioned=False).train()
    sum_gradients_by_block(plain.model.layers)
    expected = plain_training(plain, batches(STEPS), clip, gradient_dtype=torch.bfloat16)
    found = reference((clip, 1), beside)
    assert {tensors["weight"].dtype for tensors in found.states.values()} == {torch.bfloat16, torch.float32}
    assert differences(found, expected) == []
    assert found.norms == pytest.approx(expected.norms, rel=1e-6)


PLACEMENTS: dict[str, dict[str, Any]] = {
    "a slot for each block": {"window": 9},
    "delays": {"debug": {"lane_delay_ms": 2.0, "seed": 1}},
    "the first states on the GPU": {"gpu_states": 30_000},
    "all states on the GPU": {"gpu_states": "1GiB"},
    "held": {"defer_updates": True},
}


@pytest.mark.thinned(7)
@models
@schedules
@pytest.mark.parametrize("slide", PLACEMENTS.values(), ids=PLACEMENTS)
def test_placement_changes_no_bit(schedule: Any, beside: Collection[str], slide: dict[str, Any]) -> None:
    found = trained(adapted(trained=beside), config_of(slide, schedule), batches(STEPS * schedule[1]))
    assert differences(found, reference(schedule, beside)) == []
    assert found.norms == reference(schedule, beside).norms


@models
@schedules
def test_states_on_ssd_change_no_bit(
    schedule: Any, beside: Collection[str], disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ds_slide.plan.ssd_settings.CHUNK_NUMEL", 2048)
    config = on_ssd(config_of({"host_memory": 0, "debug": {"lane_delay_ms": 1.0, "seed": 2}}, schedule), disk)
    model = adapted(trained=beside)
    with engine_for(model, config) as engine:
        assert engine.optimizer.runtime.parts.memory_report["ssd_units"] > 3  # blocks, and parts of them
        found = train(engine, batches(STEPS * schedule[1]))
        found.states = states_of(model)
    assert differences(found, reference(schedule, beside)) == []


@pytest.mark.parametrize("schedule", [SCHEDULES["clipping"], SCHEDULES["immediate"]], ids=["clipping", "immediate"])
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
def test_checkpointing_changes_no_bit(schedule: Any, reentrant: bool) -> None:
    model = adapted()
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    assert differences(trained(model, config_of({}, schedule), batches(STEPS)), reference(schedule, ())) == []


def test_forwards_without_an_optimizer_are_stocks() -> None:
    losses = []
    for slide in (None, {}):
        model = adapted().requires_grad_(False)
        engine, *_ = deepspeed.initialize(model=model, config=config_of(slide, optimizer=None))
        with torch.no_grad():
            losses.append([engine(**batch).loss.item() for batch in batches(3)])
        engine.destroy()
    assert losses[0] == losses[1]


def test_gradients_of_a_part_leave_with_its_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not at the end of backward, when those of all blocks would be on the GPU."""
    model = adapted(trained=MODELS["adapters_and_bf16"])
    with engine_for(model, config_of({})) as engine:
        runtime, left = engine.optimizer.runtime, []
        blocks = [unit for unit in runtime.units if unit.spec.kind == "block"]
        assert [[part.dtype for part in block.parts] for block in blocks] == [[torch.float32]] * 3
        finalize, end = runtime.parts.gradients.send, runtime.end_backward

        def record(unit: Any, **how: Any) -> None:
            left.append(unit)
            finalize(unit, **how)

        def ended() -> None:
            left.append(None)
            end()

        monkeypatch.setattr(runtime.parts.gradients, "send", record)
        monkeypatch.setattr(runtime, "end_backward", ended)
        engine.backward(causal_loss(engine, batches(1)[0]))
        # Nothing that trains is before the first block: its last gradient tells that its backward is over.
        assert left[: left.index(None)] == [each for block in reversed(blocks) for each in (*block.parts, block)]
        engine.step()


def test_blocks_of_different_data_types_pass_through_one_window() -> None:
    """Without a precision in the JSON DeepSpeed converts nothing: an encoder in fp32 beside one in bf16."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(3))
            self.second = nn.ModuleList(nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 64)) for _ in "123")
            self.second.bfloat16()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.first:
                x = layer(x)
            x = x.bfloat16()
            for layer in self.second:
                x = layer(x)
            return x.float().square().mean()

    generator = torch.Generator().manual_seed(1)
    data = [{"x": torch.randn(4, 64, generator=generator)} for _ in range(STEPS)]

    def loss_of(model: Any, batch: Batch) -> torch.Tensor:
        loss: torch.Tensor = model(**batch)
        return loss

    expected = plain_training(Two(), data, 1.0, loss_of, gradient_dtype=torch.float32)
    for slide in ({"blocks": ["first", "second"]}, {"blocks": ["first", "second"], "window": 9, "gpu_states": 200_000}):
        found = trained(Two(), config_of(slide, bf16=None), data, loss_of=loss_of)
        assert differences(found, expected) == []


# ---- beside stock ----------------------------------------------------------------------------------------------------

# At 1e-3 the runs part by more than rounding (see test_parity).
SMALL_STEPS = {"type": "AdamW", "params": ADAMW | {"lr": 2e-4}}


def summed_as_by_stock(model: nn.Module) -> nn.Module:
    """Stock lets the inputs of every module with parameters through an identity, and an adapter's gradient with it."""
    sum_gradients_by_block(module for module in model.modules() if isinstance(module, Adapter))
    return model


@schedules
def test_losses_are_stocks(schedule: Any) -> None:
    runs = []
    for slide in (None, {}):
        config = config_of(slide, schedule, optimizer=SMALL_STEPS)
        runs.append(trained(summed_as_by_stock(adapted()), config, batches(8)))
    stock, found = runs
    assert {name: tensors["weight"].dtype for name, tensors in stock.states.items()} == {
        name: tensors["weight"].dtype for name, tensors in found.states.items()
    }
    # One step only: fp32 adapters show at once that stock's update is another one by an ulp.
    assert found.losses[: schedule[1]] == stock.losses[: schedule[1]]
    assert found.losses == pytest.approx(stock.losses, abs=2.0**-9)
    assert found.norms == pytest.approx(stock.norms, rel=1e-2)


@pytest.mark.parametrize("accumulation", [1, 3])
def test_first_gradients_are_stocks_to_the_bit(accumulation: int) -> None:
    configs = (config_of(slide, (1.0, accumulation)) for slide in (None, {}))
    stock, slide = (first_gradients(summed_as_by_stock(adapted()), config) for config in configs)
    assert unequal(slide, stock) == []


def test_gradients_may_be_reduced_in_a_longer_data_type() -> None:
    """Without a precision in the JSON DeepSpeed reduces in fp32, whatever the model's weights are."""
    runs = []
    for slide in (None, {}):
        config = config_of(slide, SCHEDULES["accumulation"], optimizer=SMALL_STEPS, bf16=None)
        runs.append(trained(to_bf16(llama(num_hidden_layers=3)), config, batches(8)))
    stock, found = runs
    assert found.losses[:4] == stock.losses[:4]
    assert found.losses == pytest.approx(stock.losses, abs=2.0**-9)
    assert found.norms[0] == pytest.approx(stock.norms[0], rel=1e-6)


# ---- checkpoints -----------------------------------------------------------------------------------------------------


@models
def test_a_resumed_run_continues_to_the_bit(beside: Collection[str], tmp_path: Path) -> None:
    schedule, half = SCHEDULES["clipping"], STEPS // 2
    with engine_for(adapted(trained=beside), config_of({}, schedule)) as engine:
        train(engine, batches(STEPS)[:half])
        engine.save_checkpoint(tmp_path)
        saved = states_of(engine.module)
    exported = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path))
    for name, tensors in saved.items():
        assert same_bits(exported[name].contiguous(), tensors.get("master", tensors["weight"])), name
    with engine_for(adapted(5, trained=beside), config_of({"gpu_states": 30_000}, schedule)) as engine:
        engine.load_checkpoint(tmp_path)
        train(engine, batches(STEPS)[half:])
        assert differences(Result(states=states_of(engine.module)), whole(schedule, beside)) == []


def whole(schedule: Any, beside: Collection[str]) -> Result:
    return Result(states=reference(schedule, beside).states)


def test_checkpoints_go_to_stock_and_back(tmp_path: Path) -> None:
    """Of adapters alone: stock brings several data types of what trains to one."""
    engines = {"slide": config_of({}), "stock": config_of(None)}
    for first, second in (("slide", "stock"), ("stock", "slide")):
        folder = tmp_path / first
        with engine_for(adapted(), engines[first]) as engine:
            train(engine, batches(2))
            engine.save_checkpoint(folder)
            saved = states_of(engine.module)
            rest = train(engine, batches(4)[2:])
        with engine_for(adapted(5), engines[second]) as engine:
            engine.load_checkpoint(folder)
            assert unequal(states_of(engine.module), saved) == []
            assert train(engine, batches(4)[2:]).losses == pytest.approx(rest.losses, abs=2.0**-9)


# ---- access ----------------------------------------------------------------------------------------------------------


def test_adapters_are_merged_under_gathered_parameters() -> None:
    """And the merged weights are what the next forward computes with."""
    model = adapted()
    with engine_for(model, config_of({})) as engine:
        train(engine, batches(2))
        before = engine(**batches(1)[0]).loss.item()
        pairs = [module for module in model.modules() if isinstance(module, Adapter)]
        assert len(pairs) == 10
        for pair in pairs:
            parameters = [pair.base.weight, pair.down, pair.up]
            with deepspeed.zero.GatheredParameters(parameters, modifier_rank=0), torch.no_grad():
                assert pair.up.shape[1] == pair.down.shape[0] == RANK
                expected = (pair.base.weight.float() + pair.up @ pair.down).bfloat16()
                pair.base.weight.copy_(expected)
                pair.up.zero_()
            with deepspeed.zero.GatheredParameters(parameters):
                assert same_bits(pair.base.weight.detach(), expected) and not pair.up.any()
        assert engine(**batches(1)[0]).loss.item() == pytest.approx(before, abs=2e-2)


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_a_streamed_head_whose_gradient_would_be_converted_is_refused() -> None:
    model = under_zero_init(to_bf16(llama(num_hidden_layers=3)))
    config = config_of({"stream_head": True}, communication_data_type="fp32", data_types={"grad_accum_dtype": "fp32"})
    with pytest.raises(SlideConfigError, match=r"lm_head is torch.bfloat16 and gradients are reduced in torch.float32"):
        deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)
