"""An engine without an optimizer: streamed forwards, alone and beside an engine that trains."""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.accelerator import get_accelerator
from harness import (
    LAYERS,
    Batch,
    Result,
    batches,
    differences,
    ds_config,
    engine_for,
    llama,
    on_ssd,
    same_bits,
    states_of,
    to_bf16,
    train,
)
from torch import nn

from ds_slide.config import SlideConfig
from ds_slide.errors import SlideError
from ds_slide.integration import assemble
from ds_slide.report.log import size
from ds_slide.runtime.core.device import Device

pytestmark = pytest.mark.usefixtures("one_rank")

STEPS = 4
# Weights of bf16 differ by single roundings after the first update (see test_parity.py).
TOLERANCE = 2.0**-8


def forward_config(slide: dict[str, Any] | None, **others: Any) -> dict[str, Any]:
    """The JSON of a training without its optimizer, as TRL and the Trainer make it."""
    config = ds_config(slide, optimizer=None, **others)
    config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
    return config


@contextmanager
def forward_engine(model: nn.Module, config: dict[str, Any]) -> Iterator[Any]:
    """An engine without an optimizer, in evaluation mode, that is destroyed at the end."""
    engine, *_ = deepspeed.initialize(model=model, config=config)
    expected = "SlideZeroOffload" if "ds_slide" in config else "DeepSpeedZeRoOffload"
    assert type(engine.optimizer).__name__ == expected
    engine.eval()
    try:
        yield engine
    finally:
        engine.destroy()


def logits_of(model: Any, data: list[Batch]) -> list[torch.Tensor]:
    with torch.no_grad():
        return [model(**batch).logits for batch in data]


def own_threads() -> list[str]:
    return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("ds_slide-"))


def assert_same(left: list[torch.Tensor], right: list[torch.Tensor]) -> None:
    assert len(left) == len(right)
    assert all(same_bits(one, other) for one, other in zip(left, right, strict=True))


# ---- alone -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slide", [{"window": 2}, {"window": 9}, {"debug": {"lane_delay_ms": 2.0, "seed": 3}}], ids=str)
def test_outputs_are_those_of_the_plain_model_and_of_stock(slide: dict[str, Any]) -> None:
    data = batches(3)
    plain = logits_of(to_bf16(llama()).eval(), data)
    with forward_engine(llama(), forward_config(None)) as engine:
        assert_same(logits_of(engine, data), plain)
    with forward_engine(llama(), forward_config(slide)) as engine:
        assert_same(logits_of(engine, data), plain)
        with torch.inference_mode():
            assert same_bits(engine(**data[1]).logits.clone(), plain[1])
        assert_same(logits_of(engine.module, data), plain)


@pytest.mark.parametrize(("settings", "dtype"), [({}, torch.float32), ({"fp16": {"enabled": True}}, torch.float16)])
def test_other_data_types(settings: dict[str, Any], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(get_accelerator(), "is_fp16_supported", lambda: True)  # slow on a CPU, but it works
    model, data = llama(), batches(2)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    plain = logits_of(model.eval(), data)
    with forward_engine(llama(), forward_config({}, bf16=None, **settings)) as engine:
        assert_same(logits_of(engine, data), plain)
        assert all(parameter.dtype == dtype for parameter in engine.module.parameters())


def test_a_model_that_was_built_in_partitions() -> None:
    data, plain = batches(2), to_bf16(llama(seed=1))  # imports transformers outside of zero.Init
    with deepspeed.zero.Init(config_dict_or_path=forward_config({}), dtype=torch.bfloat16):
        model = llama()
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    plain.load_state_dict(weights)
    for name, module in plain.named_modules():  # zero.Init makes the rotary tables in bf16, too
        for key in module._buffers:
            module._buffers[key] = model.get_submodule(name)._buffers[key]
    with forward_engine(model, forward_config({"window": 2})) as engine:
        assert_same(logits_of(engine, data), logits_of(plain.eval(), data))


def test_a_streamed_head() -> None:
    data = batches(2)
    slide = {"window": 2, "stream_head": True}
    with engine_for(llama(), ds_config(slide)) as engine:
        expected = logits_of(engine, data)
    with forward_engine(llama(), forward_config(slide)) as engine:
        assert engine.optimizer.runtime.rows is not None
        assert_same(logits_of(engine, data), expected)


def test_only_the_weights_are_held(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ds_slide")
    model = llama()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    before = own_threads()
    with forward_engine(model, forward_config({"window": 2})) as engine:
        logits_of(engine, batches(2))
        memory, runtime = engine.optimizer.slide_stats()["memory"], engine.optimizer.runtime
        padded = sum(unit.layout.local_numel for unit in runtime.units)
        assert memory["parameters"] == parameters <= padded < 1.01 * parameters
        assert memory["host_bytes"] == memory["host_state_bytes"] == 2 * padded
        assert memory["ssd_bytes"] == memory["gpu_state_bytes"] == 0
        assert all(
            not unit.state.optimizer.buffers and unit.state.buffers["gradient"].numel == 0 for unit in runtime.units
        )
        new = own_threads()
        for name in before:
            new.remove(name)
        assert new == ["ds_slide-h2d", "ds_slide-watchdog"]
    assert own_threads() == before
    (line,) = [record.message for record in caplog.records if f"parameters in {LAYERS} blocks" in record.message]
    assert "no optimizer, forwards only" in line


def test_blocks_are_uploaded_ahead_and_once_a_forward() -> None:
    data = batches(5)
    with forward_engine(llama(), forward_config({"window": 3})) as engine:
        filled: list[int] = []
        uploads = engine.optimizer.runtime.parts.uploads
        fill = uploads.fill
        uploads.fill = lambda unit, buffer, **how: filled.append(unit.order) or fill(unit, buffer, **how)
        logits_of(engine, data[:1])
        engine.optimizer.runtime.parts.context.lanes.h2d.drain()
        filled.clear()
        logits_of(engine, data)
        # With gradients enabled, too: no backward can follow, and the next forward begins with the first block.
        for batch in data:
            engine(**batch)
        engine.optimizer.runtime.parts.context.lanes.h2d.drain()
        blocks = [unit.order for unit in engine.optimizer.runtime.blocks]
        assert engine.optimizer.runtime.parts.window.misses == 0
        assert sorted(filled) == sorted(blocks * 10)


def test_weights_on_ssd(disk: Path) -> None:
    data = batches(3)
    plain = logits_of(to_bf16(llama()).eval(), data)
    config = on_ssd(forward_config({"window": 2, "host_memory": 0, "weight_buffers": 3}), disk, "offload_param")
    with forward_engine(llama(), config) as engine:
        assert_same(logits_of(engine, data), plain)
        stats = engine.optimizer.slide_stats()
        blocks = sum(unit.layout.local_numel for unit in engine.optimizer.runtime.blocks)
        assert stats["memory"]["ssd_bytes"] >= 2 * blocks
        assert stats["ssd"]["read_bytes"] >= 3 * 2 * blocks
        assert stats["memory"]["host_state_bytes"] + 2 * blocks == 2 * sum(
            unit.layout.local_numel for unit in engine.optimizer.runtime.units
        )
        name, parameter = next((n, p) for n, p in engine.module.named_parameters() if "layers.2" in n)
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
            assert same_bits(parameter.detach(), dict(to_bf16(llama()).named_parameters())[name].detach())
            parameter.data.mul_(2)
        changed = to_bf16(llama()).eval()
        dict(changed.named_parameters())[name].data.mul_(2)
        assert_same(logits_of(engine, data), logits_of(changed, data))
    assert list(disk.iterdir()) == []


def test_weights_that_do_not_fit_are_refused_with_the_way_out() -> None:
    with pytest.raises(SlideError, match=r"host_memory is 1,000 bytes, .*zero_optimization\.offload_param\.device"):
        deepspeed.initialize(model=llama(), config=forward_config({"host_memory": 1000}))


def test_a_nameless_directory_is_refused_by_its_json_path() -> None:
    config = forward_config({})
    config["zero_optimization"]["offload_param"] = {"device": "nvme"}
    with pytest.raises(SlideError, match=r"zero_optimization\.offload_param\.nvme_path or ds_slide\.nvme_path"):
        deepspeed.initialize(model=llama(), config=config)


def test_generation() -> None:
    tokens = batches(1)[0]["input_ids"][:, :5]
    options = {"max_new_tokens": 6, "do_sample": False, "use_cache": True, "attention_mask": torch.ones_like(tokens)}
    plain = to_bf16(llama()).eval().generate(tokens, **options)
    with forward_engine(llama(), forward_config({"window": 2})) as engine:
        assert torch.equal(engine.module.generate(tokens, **options), plain)
        # As TRL and DeepSpeed generate with gathered weights.
        with deepspeed.runtime.zero.stage3.unwrap_model_for_generation(engine):
            assert torch.equal(engine.module.generate(tokens, **options), plain)
        assert torch.equal(engine.module.generate(tokens, **options), plain)


def test_weights_are_read_written_and_saved(tmp_path: Path) -> None:
    plain = to_bf16(llama()).eval()
    data = batches(2)
    with forward_engine(llama(), forward_config({"window": 2})) as engine:
        logits_of(engine, data)
        assert {tuple(t.shape) for n, t in engine.module.state_dict().items() if "layers" in n} == {(0,)}
        model = engine.module
        with deepspeed.zero.GatheredParameters(list(model.parameters()), modifier_rank=0), torch.no_grad():
            for (name, parameter), own in zip(model.named_parameters(), plain.parameters(), strict=True):
                assert same_bits(parameter.detach(), own.detach()), name
                # `sync_ref_model` of TRL: towards the weights of the policy.
                parameter.data.mul_(0.5)
                own.data.mul_(0.5)
        assert_same(logits_of(engine, data), logits_of(plain, data))
        assert engine.save_16bit_model(str(tmp_path))
        saved = torch.load(tmp_path / "pytorch_model.bin")
        assert saved.keys() == plain.state_dict().keys()
        assert all(same_bits(saved[name], tensor) for name, tensor in plain.state_dict().items())
        consolidated = engine._zero3_consolidated_16bit_state_dict()
        assert all(same_bits(consolidated[name], tensor) for name, tensor in plain.state_dict().items())


REFUSED = {
    "backward": lambda engine, batch: engine.backward(engine(**batch).loss),
    "torch's backward": lambda engine, batch: engine(**batch).loss.backward(),
    "step": lambda engine, _: engine.step(),
    "save_checkpoint": lambda engine, _: engine.save_checkpoint("nowhere"),
    "load_checkpoint": lambda engine, _: engine.load_checkpoint("nowhere"),
    "get_lr": lambda engine, _: engine.get_lr(),
}


def test_what_only_a_training_can_do_is_refused() -> None:
    batch = batches(1)[0]
    plain = logits_of(to_bf16(llama()).eval(), [batch])
    with forward_engine(llama(), forward_config({"window": 2})) as engine:
        for name, call in REFUSED.items():
            with pytest.raises(SlideError, match="this engine has no optimizer") as caught:
                call(engine, batch)
            assert "DeepSpeed config" in str(caught.value), name
            assert "\n" not in str(caught.value)
        assert not hasattr(engine.optimizer, "fp32_partitioned_groups_flat")
        assert_same(logits_of(engine, [batch]), plain)


@pytest.mark.parametrize("frozen", [False, True])
def test_gradients_pass_through_the_module(frozen: bool) -> None:
    """A frozen judge of embeddings. As in stock, the module's own backward works, and gradients of parameters stay in
    them."""

    def gradients(model: nn.Module, embeddings: torch.Tensor) -> list[torch.Tensor]:
        for _ in range(2):
            embeddings.grad = None
            model.zero_grad()
            model(inputs_embeds=embeddings).logits.float().square().mean().backward()
        return [embeddings.grad, *(p.grad for p in model.parameters() if p.grad is not None)]

    embeddings = torch.randn(2, 8, 64, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(1))
    plain, model = (to_bf16(llama(tie_word_embeddings=False)).eval().requires_grad_(not frozen) for _ in range(2))
    expected = gradients(plain, embeddings.clone().requires_grad_())
    with forward_engine(model, forward_config({"window": 2})) as engine:
        assert_same(gradients(engine.module, embeddings.clone().requires_grad_()), expected)
        assert len(expected) == (1 if frozen else 1 + len(list(model.parameters())) - 1)  # the embedding is not used
        assert_same(logits_of(engine, batches(1)), logits_of(plain, batches(1)))


# ---- one model, one engine after the other ---------------------------------------------------------------------------


def test_a_model_that_was_evaluated_is_trained() -> None:
    """`Trainer.evaluate()` and then `Trainer.train()`: nobody destroys the first engine."""
    model, data = llama(), batches(STEPS)
    with engine_for(llama(), ds_config({"window": 2})) as engine:
        expected = train(engine, data)
        expected.states = states_of(engine.module)
    first, *_ = deepspeed.initialize(model=model, config=forward_config({"window": 2}))
    before = logits_of(first, data)
    with engine_for(model, ds_config({"window": 2})) as engine:
        assert first.optimizer.runtime.hooks.attached == []
        result = train(engine, data)
        result.states = states_of(model)
        first.destroy()
        assert_same(logits_of(engine, data), logits_of(first.module, data))
    assert differences(result, expected) == []
    assert_same(before, logits_of(to_bf16(llama()), data))


def test_a_model_that_was_trained_is_evaluated() -> None:
    model, data = llama(), batches(STEPS)
    trained, *_ = deepspeed.initialize(
        model=model, config=ds_config({"window": 2}), model_parameters=list(model.parameters())
    )
    train(trained, data)
    with torch.no_grad():
        expected = [trained(**batch).logits for batch in data]
    train(trained, data[:1])
    del expected
    with engine_for(llama(), ds_config({"window": 2})) as other:
        train(other, data)
        train(other, data[:1])
        expected = logits_of(other.module, data)
    # The last update may not have run yet: it does before the other engine takes the weights.
    with forward_engine(model, forward_config({"window": 2})) as engine:
        assert_same(logits_of(engine, data), expected)
    trained.destroy()


def test_weights_on_ssd_are_not_taken_from_an_engine_that_runs(disk: Path) -> None:
    model, data = llama(), batches(1)
    with forward_engine(model, on_ssd(forward_config({"host_memory": 0}), disk, "offload_param")) as engine:
        before = logits_of(engine, data)
        with pytest.raises(SlideError, match=r"belongs to an engine that has weights on SSD, .* build the model again"):
            deepspeed.initialize(model=model, config=ds_config({}), model_parameters=list(model.parameters()))
        assert_same(logits_of(engine, data), before)


# ---- beside an engine that trains ------------------------------------------------------------------------------------


def preference_loss(policy: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Of logits: a distance to the reference beside a goal, so that both engines' bits are in the loss."""
    log_policy, log_reference = (logits.float().log_softmax(-1) for logits in (policy, reference))
    distance = torch.nn.functional.kl_div(log_policy, log_reference, log_target=True, reduction="batchmean")
    return distance - log_policy[..., 7].mean()


def train_beside(engine: Any, reference: Any, data: list[Batch]) -> Result:
    """Alternating forwards of both, as DPO and GRPO do them."""
    result = Result()
    for batch in data:
        theirs = logits_of(reference, [batch])[0]
        loss = preference_loss(engine(**batch).logits, theirs)
        engine.backward(loss)
        engine.step()
        result.losses.append(loss.item())
    result.states = states_of(engine.module)
    return result


PAIRS = {
    "clipping": ({"window": 2}, {"window": 2}, 1.0),
    "immediate": ({"window": 2}, {"window": 3}, 0.0),
    "delays": (
        {"window": 2, "debug": {"lane_delay_ms": 2.0, "seed": 5}},
        {"window": 2, "debug": {"lane_delay_ms": 2.0, "seed": 7}},
        1.0,
    ),
    "everything fits": ({"window": 9}, {"window": 9}, 1.0),
}


@pytest.fixture(scope="module")
def alone(one_rank: None) -> dict[float, Result]:  # noqa: ARG001 - for its order
    """Of a training beside a plain model that has the reference's weights, by its clipping."""
    results = {}
    for clip in (1.0, 0.0):
        with engine_for(llama(), ds_config({"window": 2}, clip=clip)) as engine:
            results[clip] = train_beside(engine, to_bf16(llama(seed=1)).eval(), batches(STEPS))
    return results


@pytest.mark.by_turns(2)
@pytest.mark.parametrize("reference_first", [True, False])
@pytest.mark.parametrize("name", PAIRS)
def test_a_pair_trains_as_each_does_alone(name: str, reference_first: bool, alone: dict[float, Result]) -> None:
    ours, theirs, clip = PAIRS[name]

    def policy() -> Any:
        return engine_for(llama(), ds_config(ours, clip=clip))

    def judge() -> Any:
        return forward_engine(llama(seed=1), forward_config(theirs, clip=clip))

    data = batches(STEPS)
    plain = logits_of(to_bf16(llama(seed=1)).eval(), data)
    if reference_first:
        with judge() as reference, policy() as engine:
            result = train_beside(engine, reference, data)
            engine.destroy()
            assert_same(logits_of(reference, data), plain)
    else:
        with policy() as engine, judge() as reference:
            result = train_beside(engine, reference, data)
            reference.destroy()
            train(engine, data[:1])
    assert differences(result, alone[clip]) == []


def test_a_pair_has_the_losses_of_stocks_pair(alone: dict[float, Result]) -> None:
    with (
        forward_engine(llama(seed=1), forward_config(None)) as reference,
        engine_for(llama(), ds_config(None)) as engine,
    ):
        data = batches(STEPS)
        losses = []
        for batch in data:
            loss = preference_loss(engine(**batch).logits, logits_of(reference, [batch])[0])
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    # From the second step on, a weight in a tie may be rounded the other way: one in 131,072, of 300,000 in each step.
    assert alone[1.0].losses[0] == losses[0]
    assert alone[1.0].losses == pytest.approx(losses, rel=TOLERANCE)


def test_weights_go_from_one_engine_to_the_other() -> None:
    """`sync_ref_model` of TRL gathers the parameters of both in one call."""
    with (
        forward_engine(llama(seed=1), forward_config({"window": 2})) as reference,
        engine_for(llama(), ds_config({"window": 2})) as engine,
    ):
        data = batches(STEPS)
        train(engine, data)
        both = list(zip(reference.module.parameters(), engine.module.parameters(), strict=True))
        for target, source in both:
            with deepspeed.zero.GatheredParameters([target, source], modifier_rank=0):
                target.data.copy_(source.data)
        assert_same(logits_of(reference, data), logits_of(engine, data))


NO_LOGS = {"window": 2, "speculate": False}
"""Undo logs are written only if an update is done ahead, and take what memory others leave."""


def test_memory_that_an_engine_has_not_touched_yet_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Moments are written by the first update; until then the operating system counts them as free."""
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=10**9, total=10**9))
    monkeypatch.setenv("LOCAL_SIZE", "1")
    config, device = SlideConfig(), Device(torch.device("cpu"))

    def host_free() -> int:
        return assemble._budgets(nn.Module(), [], config, device).host_free

    gc.collect()
    alone = host_free()
    with engine_for(llama(), ds_config(NO_LOGS)) as engine:
        moments = sum(
            state_buffer.tensor.nbytes
            for unit in engine.optimizer.runtime.units
            for name, state_buffer in unit.state.buffers.items()
            if name.startswith("exp_avg")
        )
        assert moments > 1_500_000
        assert alone - host_free() >= moments
        train(engine, batches(2))
        states_of(engine.module)  # waits for the updates
        assert alone - host_free() < moments // 10
    assert host_free() == alone


def test_the_limits_are_for_all_engines_together() -> None:
    """A byte less than both need stops the second engine and leaves the first alone."""
    with (
        forward_engine(llama(seed=1), forward_config({"window": 2})) as reference,
        engine_for(llama(), ds_config(NO_LOGS)) as engine,
    ):
        ours, theirs = (one.optimizer.runtime.parts.taken for one in (engine, reference))
    del reference, engine
    gc.collect()
    assert theirs.host_states > 0
    assert ours.host_states > 5 * theirs.host_states
    gpu, host = ours.gpu + theirs.gpu, ours.host_states + theirs.host_states
    for limits, message in (
        (
            {"gpu_memory": gpu - 1},
            rf"gpu_memory is {size(ours.gpu - 1)} beside the {size(theirs.gpu)} of other engines",
        ),
        (
            {"host_memory": host - 1},
            rf"host_memory is {size(ours.host_states - 1)} beside the {size(theirs.host_states)} of",
        ),
    ):
        with forward_engine(llama(seed=1), forward_config({"window": 2, **limits})) as reference:
            with pytest.raises(SlideError, match=message), engine_for(llama(), ds_config({**NO_LOGS, **limits})):
                pass
            assert_same(logits_of(reference, batches(1)), logits_of(to_bf16(llama(seed=1)).eval(), batches(1)))
    limits = {"gpu_memory": gpu, "host_memory": host}
    with forward_engine(llama(seed=1), forward_config({"window": 2, **limits})):
        with engine_for(llama(), ds_config({**NO_LOGS, **limits})) as engine:
            train(engine, batches(1))
        # What a destroyed engine had is free again.
        with engine_for(llama(), ds_config({**NO_LOGS, **limits})) as engine:
            train(engine, batches(1))
