"""Frozen experts that pass through the GPU a few at a time: the same bits as in plain torch, and fewer bytes."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from all_mixed import all_mixed
from allocated import counted
from fused_experts import EXPERT_BYTES, EXPERTS, LAYERS, TOP_K, fetched, mixture
from harness import (
    Batch,
    batches,
    causal_loss,
    differences,
    ds_config,
    engine_for,
    llama,
    on_ssd,
    plain_training,
    states_of,
    to_bf16,
    train,
)
from packed import forward_between
from torch import nn

from ds_slide.errors import SlideConfigError, SlideError
from ds_slide.plan import memory
from ds_slide.plan.allocations import EXPERT_BUFFERS, SLOTS
from ds_slide.plan.allocations import EXPERTS as ON_THEIR_WAY

pytestmark = pytest.mark.usefixtures("one_rank")

# Three experts at a time, of eight: three passes, the last one short.
AT_ONCE = 3
PARTS: dict[str, Any] = {"window": 2, "gpu_states": 0, "experts": AT_ONCE * EXPERT_BYTES + 100}
# A slot for each block, so that experts are all that is fetched again.
ALL_SLOTS = PARTS | {"window": LAYERS}
CHECKPOINTS: dict[str, Any] = {"none": None, "hooks": {"use_reentrant": False}, "reentrant": {"use_reentrant": True}}


@contextmanager
def hits_of(model: nn.Module) -> Iterator[list[int]]:
    """The number of different experts in each call of a layer's experts."""
    found: list[int] = []
    experts = [module for module in model.modules() if hasattr(module, "is_transposed")]
    hooks = [each.register_forward_pre_hook(lambda _, args: found.append(len(args[1].unique()))) for each in experts]
    yield found
    for hook in hooks:
        hook.remove()


@pytest.mark.thinned(5)
@pytest.mark.parametrize("implementation", ["grouped_mm", "eager", "batched_mm"])
@pytest.mark.parametrize("checkpoints", CHECKPOINTS)
@pytest.mark.parametrize("shape", ["qwen3", "mixtral", "deepseek", "gpt-oss", "qwen2"])
def test_training_has_the_bits_of_plain_torch(shape: str, checkpoints: str, implementation: str) -> None:
    """An evaluation comes between each forward and its backward."""
    if (shape, implementation) == ("qwen2", "eager"):
        pytest.skip("autograd adds the gradients of the loop's steps to the shared expert's, one after the other")
    options = (implementation, CHECKPOINTS[checkpoints])
    plain = plain_training(mixture(shape, *options), batches(2), 1.0, loss_of=forward_between)
    model = mixture(shape, *options)
    with engine_for(model, ds_config(PARTS | {"debug": {"lane_delay_ms": 1.0, "seed": 3}})) as engine:
        assert [bool(unit.experts) for unit in engine.optimizer.runtime.blocks] == [shape != "deepseek", True, True]
        found = train(engine, batches(2), forward_between)
        found.states = states_of(model)
    assert differences(found, plain) == []


@pytest.mark.parametrize("data_type", ["fp32", "accumulation"])
def test_other_data_types_and_accumulation(data_type: str) -> None:
    """Without bf16, and with two micro-batches a step."""
    others = {"bf16": None} if data_type == "fp32" else {"accumulation": 2}
    size = PARTS["experts"] * (2 if data_type == "fp32" else 1)
    results = []
    for experts in (size, 0):
        model = mixture("qwen3")
        model = model.float() if data_type == "fp32" else model
        with engine_for(model, ds_config(PARTS | {"experts": experts}, **others)) as engine:
            results.append(train(engine, batches(4)))
            results[-1].states = states_of(model)
    assert differences(*results) == []


@pytest.mark.thinned(2)
@pytest.mark.parametrize("checkpoints", CHECKPOINTS)
@pytest.mark.parametrize("activations", ["auto", "as_written"])
def test_a_step_fetches_experts_twice(checkpoints: str, activations: str) -> None:
    """For forward and for backward. A recomputation by the engine takes the results of the forward; the script's own
    checkpoint knows none. (With a budget the engine takes checkpoints over, and recomputes all blocks of a first step.)
    """
    model, plain, counting = (mixture("qwen3", None, CHECKPOINTS[checkpoints]) for _ in range(3))
    data, again = batches(2), 3 if activations == "as_written" and checkpoints != "none" else 2
    expected = plain_training(plain, data, 1.0)
    with hits_of(counting) as hits, torch.no_grad():
        counting(**data[0])
    assert sum(hits) > LAYERS * AT_ONCE
    slide = ALL_SLOTS | {"activations": activations, "gpu_memory": "1GiB"}
    with engine_for(model, ds_config(slide)) as engine:
        loss = engine(**data[0]).loss
        engine.backward(loss)
        slots = sum(unit.slot_layout.local_numel * 2 for unit in engine.optimizer.runtime.blocks)
        recomputed = engine.optimizer.runtime.parts.spare.activations.statistics["recompute"]
        assert recomputed == (LAYERS if activations == "auto" else 0)
        assert fetched(engine) - slots == again * sum(hits) * EXPERT_BYTES
        engine.step()
        found = train(engine, data[1:])
        found.states = states_of(model)
        found.losses.insert(0, loss.item())
    assert differences(found, expected) == []


@pytest.mark.by_turns(2)
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("shape", ["qwen3", "gpt-oss"])
def test_blocks_that_are_kept_or_mixed_change_no_bit(shape: str, mixed: bool) -> None:
    """After the first steps the engine keeps what blocks save, or a part of it."""
    data = batches(8)
    plain = plain_training(mixture(shape), data, 1.0)
    model = mixture(shape)
    slide = PARTS | {"gpu_memory": "1GiB", "debug": {"lane_delay_ms": 1.0, "seed": 7}}
    with all_mixed() if mixed else nullcontext(), engine_for(model, ds_config(slide)) as engine:
        found = train(engine, data)
        report = engine.optimizer.slide_stats()["activations"]
        assert report["mix" if mixed else "keep"] == LAYERS
        found.states = states_of(model)
    assert differences(found, plain) == []


def test_evaluation_and_generation_fetch_what_tokens_are_routed_to() -> None:
    model = mixture("qwen3")
    plain = copy.deepcopy(model).eval()
    few = batches(1)[0]["input_ids"][:1, :2]
    options = {"max_new_tokens": 6, "do_sample": False, "use_cache": True, "pad_token_id": 0}
    with engine_for(model, ds_config(ALL_SLOTS)) as engine:
        engine.eval()
        with torch.no_grad():
            engine(input_ids=few)
            fetched(engine)
            for mode in (torch.no_grad, torch.inference_mode):
                with hits_of(plain) as hits, mode():
                    expected = plain(input_ids=few).logits
                    assert torch.equal(engine(input_ids=few).logits, expected)
                assert all(hit <= 2 * TOP_K < EXPERTS for hit in hits)
                assert fetched(engine) == sum(hits) * EXPERT_BYTES
            with hits_of(plain) as hits:
                tokens = plain.generate(few, **options)
            assert torch.equal(engine.module.generate(few, **options), tokens)
        assert len(hits) == 6 * LAYERS and hits[-LAYERS:] == [TOP_K] * LAYERS
        assert fetched(engine) == sum(hits) * EXPERT_BYTES


def test_the_gpu_needs_the_bytes_of_a_few_experts() -> None:
    model = mixture("qwen3")
    with counted() as count, engine_for(model, ds_config(PARTS)) as engine:
        assert count.difference(engine) == []
        plan = engine.optimizer.runtime.parts.plan
        experts, slots = plan.entry(ON_THEIR_WAY), plan.entry(SLOTS)
        assert (experts.count, experts.tier) == (EXPERT_BUFFERS, "gpu")
        assert AT_ONCE * EXPERT_BYTES <= experts.piece < (AT_ONCE + 1) * EXPERT_BYTES
        held = sum(p.ds_numel * 2 for p in model.model.layers[0].parameters())
        # Alignment adds at most 127 bytes to each of a block's parameters.
        assert 0 <= slots.piece - (held - EXPERTS * EXPERT_BYTES) < 128 * 20
        assert plan.report()["window_bytes"] == 2 * slots.piece


def small_automatic(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers that the plan chooses have two experts, as 256 MiB have of a large model."""
    chosen = dataclasses.replace(memory.AUTOMATIC, experts=2 * EXPERT_BYTES)
    monkeypatch.setattr(memory, "AUTOMATIC", chosen)


def test_the_plan_decides_by_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    small_automatic(monkeypatch)
    whole = LAYERS * EXPERTS * EXPERT_BYTES
    for budget, parts in (("1GiB", False), (whole, True)):
        model = mixture("qwen3")
        config = ds_config({"window": 3, "gpu_states": 0, "gpu_memory": budget})
        with engine_for(model, config) as engine:
            plan = engine.optimizer.runtime.parts.plan
            assert bool(plan.needs.experts) == parts
            assert (plan.gpu_bytes <= whole) == parts
            train(engine, batches(1))


WHOLE: dict[str, Any] = {"window": 2, "gpu_states": 0}


def short_forward_between(engine: Any, batch: Batch) -> torch.Tensor:
    """A loss, and before its backward a forward of two tokens and one of many, which take the slots."""
    loss = causal_loss(engine, batch)
    with torch.no_grad():
        engine(input_ids=batch["input_ids"][:1, :2])
        engine(input_ids=batch["input_ids"])
        engine(input_ids=batch["input_ids"][:1, 2:4])
    return loss


@pytest.mark.parametrize("shape", ["qwen3", "deepseek", "gpt-oss"])
def test_short_forwards_with_whole_blocks_change_no_bit(shape: str) -> None:
    plain = plain_training(mixture(shape), batches(2), 1.0, loss_of=short_forward_between)
    model = mixture(shape)
    with engine_for(model, ds_config(WHOLE | {"debug": {"lane_delay_ms": 1.0, "seed": 4}})) as engine:
        runtime = engine.optimizer.runtime
        assert not any(unit.experts for unit in runtime.blocks)
        found = train(engine, batches(2), short_forward_between)
        assert runtime.parts.window.few_tokens == EXPERTS // (2 * TOP_K)
        found.states = states_of(model)
    assert differences(found, plain) == []


@pytest.mark.by_turns(2)
@pytest.mark.parametrize("optimizer", [True, False])
@pytest.mark.parametrize("implementation", ["grouped_mm", "eager", "batched_mm"])
def test_generation_with_whole_blocks_leaves_experts_out(implementation: str, optimizer: bool) -> None:
    """Each step fetches the blocks without their experts, and the experts of its token."""
    model, plain = (mixture("qwen3", implementation).eval() for _ in range(2))
    model.requires_grad_(not optimizer)  # as a script leaves it that only generates
    if optimizer:
        model.model.layers[0].self_attn.q_proj.requires_grad_(True)
    prompt = batches(1)[0]["input_ids"][:1, :6]
    options = {"max_new_tokens": 5, "do_sample": False, "use_cache": True, "pad_token_id": 0}
    config = ds_config(WHOLE | {"debug": {"lane_delay_ms": 2.0, "seed": 5}})
    if not optimizer:
        del config["optimizer"]
    engine, *_ = deepspeed.initialize(model=model, config=config)
    try:
        blocks = engine.optimizer.runtime.blocks
        front = sum(unit.layout.without_experts().local_numel * 2 for unit in blocks)
        whole = sum(unit.layout.local_numel * 2 for unit in blocks)
        with torch.no_grad():
            assert torch.equal(engine.module.generate(prompt, **options), plain.generate(prompt, **options))
            mine, theirs = (each(input_ids=prompt, use_cache=True).past_key_values for each in (engine, plain))
            for step in range(4):
                fetched(engine)
                token = prompt[:, step : step + 1]
                with hits_of(plain) as hits:
                    expected = plain(input_ids=token, past_key_values=theirs, use_cache=True).logits
                assert torch.equal(engine(input_ids=token, past_key_values=mine, use_cache=True).logits, expected)
                assert hits == [TOP_K] * LAYERS
                if step:  # the first one finds whole blocks in the slots
                    assert fetched(engine) == front + sum(hits) * EXPERT_BYTES < whole / 2
            engine(input_ids=prompt)
            assert fetched(engine) >= whole / 2
    finally:
        engine.destroy()


@pytest.mark.parametrize("slide", [PARTS, WHOLE], ids=["parts", "whole"])
@pytest.mark.parametrize("what", [pytest.param("engine", marks=pytest.mark.slow), "experts"])
def test_compiled_models_have_the_same_bits(what: str, slide: dict[str, Any]) -> None:
    """Nothing is left out of whole blocks then: compiled code calls no function of the engine."""
    torch._dynamo.reset()
    plain, model = mixture("qwen3"), mixture("qwen3")
    ids, data = batches(1)[0]["input_ids"], batches(2)
    expected = plain_training(plain, data, 1.0)
    with engine_for(model, ds_config(slide)) as engine:
        for each in [engine] if what == "engine" else [layer.mlp.experts for layer in model.model.layers]:
            each.compile(backend="eager")
        found = train(engine, data)
        found.states = states_of(model)
        assert differences(found, expected) == []
        with torch.no_grad():
            for some in (ids, ids[:1, :2], ids[:1, 3:5]):
                assert torch.equal(engine(input_ids=some).logits, plain(input_ids=some).logits)


def test_experts_that_are_compiled_later_are_fetched_with_their_blocks() -> None:
    torch._dynamo.reset()
    model, plain = mixture("qwen3").eval(), mixture("qwen3").eval()
    ids = batches(1)[0]["input_ids"]
    with engine_for(model, ds_config(WHOLE)) as engine, torch.no_grad():
        assert torch.equal(engine(input_ids=ids).logits, plain(input_ids=ids).logits)
        for number in range(3):
            some = ids[:1, 2 * number : 2 * number + 2]
            assert torch.equal(engine(input_ids=some).logits, plain(input_ids=some).logits)
            assert (engine.optimizer.runtime._tokens_of_uncompiled((), {"input_ids": some}) == 0) == (number > 1)
            if number == 1:
                for layer in model.model.layers:
                    layer.mlp.experts.compile(backend="eager")
        for some in (ids[:1, 8:10], ids[:1, 10:11]):
            assert torch.equal(engine(input_ids=some).logits, plain(input_ids=some).logits)


def test_writes_to_experts_count() -> None:
    """Between forwards; and they are whole wherever a script reads them."""
    model, plain = mixture("qwen3").eval(), mixture("qwen3").eval()
    ids = batches(1)[0]["input_ids"]
    with engine_for(model, ds_config(PARTS)) as engine, torch.no_grad():
        engine(input_ids=ids)
        weights = [each.model.layers[1].mlp.experts.down_proj for each in (model, plain)]
        with deepspeed.zero.GatheredParameters(weights[:1], modifier_rank=0):
            for each in weights:
                each.mul_(1.5)
        assert torch.equal(engine(input_ids=ids).logits, plain(input_ids=ids).logits)
        with deepspeed.zero.GatheredParameters(weights[:1]):
            assert torch.equal(*weights)


@pytest.mark.parametrize("slide", [PARTS, WHOLE], ids=["parts", "whole"])
def test_a_copy_of_the_model_has_experts_of_its_own(slide: dict[str, Any]) -> None:
    model, plain = mixture("qwen3").eval(), mixture("qwen3").eval()
    ids = batches(1)[0]["input_ids"]
    with engine_for(model, ds_config(slide)) as engine, torch.no_grad():
        engine(input_ids=ids)
        copied = copy.deepcopy(model)
        for each in (copied, plain):
            each.model.layers[1].mlp.experts.down_proj.mul_(1.5)
        assert torch.equal(copied(input_ids=ids).logits, plain(input_ids=ids).logits)


@pytest.mark.parametrize("slide", [PARTS, WHOLE], ids=["parts", "whole"])
def test_another_forward_in_place_of_ours_has_all_experts(slide: dict[str, Any]) -> None:
    """A script may replace a module's forward after the start. It then reads parameters that are not there, and they
    are gathered, as in stock."""
    model, plain = mixture("qwen3").eval(), mixture("qwen3").eval()
    ids = batches(1)[0]["input_ids"][:1, :2]
    with engine_for(model, ds_config(slide)) as engine, torch.no_grad():
        engine(input_ids=ids)
        for layer in model.model.layers:
            del layer.mlp.experts.forward
        for _ in range(2):
            assert torch.equal(engine(input_ids=ids).logits, plain(input_ids=ids).logits)


def test_an_exception_in_the_middle_leaves_the_engine_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    model = mixture("qwen3")
    experts, calls = type(model.model.layers[0].mlp.experts), []
    plain = plain_training(mixture("qwen3"), batches(2), 1.0)
    with engine_for(model, ds_config(PARTS)) as engine:
        gate = experts._apply_gate
        monkeypatch.setattr(experts, "_apply_gate", lambda self, x: gate(self, x) if calls.append(0) else 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine(**batches(1)[0])
        monkeypatch.setattr(experts, "_apply_gate", gate)
        found = train(engine, batches(2))
        found.states = states_of(model)
    assert calls and differences(found, plain) == []


def train_experts(model: nn.Module) -> None:
    for layer in model.model.layers:
        layer.mlp.experts.requires_grad_(True)


def adapted_as_whole(model: nn.Module) -> None:
    """As `target_parameters` of PEFT before 0.21 wraps a module."""
    for layer in model.model.layers:
        wrapper = nn.Module()
        wrapper.base_layer, wrapper.parameter_name = layer.mlp.experts, "down_proj"
        wrapper.forward = wrapper.base_layer.forward
        layer.mlp.experts = wrapper


REFUSED: dict[str, tuple[Callable[[nn.Module], None], str]] = {
    "trained": (train_experts, "it has parameters that are trained"),
    "adapted": (
        adapted_as_whole,
        r"its adapters \(target_parameters\) are added to the whole 3-D parameter by PEFT before 0.21",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_experts_that_cannot_move_in_parts(case: str) -> None:
    change, reason = REFUSED[case]
    model = mixture("qwen3")
    change(model)
    with pytest.raises(SlideConfigError, match=f"cannot move in parts: {reason}"), engine_for(model, ds_config(PARTS)):
        pass
    results = []
    for _ in range(2):  # by themselves they move whole
        model = mixture("qwen3")
        change(model)
        with engine_for(model, ds_config({"window": 2, "gpu_states": 0})) as engine:
            assert engine.optimizer.runtime.parts.experts is None
            results.append(train(engine, batches(1)))
    assert differences(*results) == []


@pytest.mark.parametrize("slide", [PARTS, WHOLE], ids=["parts", "whole"])
def test_an_engine_without_an_optimizer(slide: dict[str, Any]) -> None:
    """Its experts require a gradient, as all parameters do of a model that a script has just made."""
    model, plain = (mixture("mixtral").requires_grad_(True) for _ in range(2))
    config, batch = ds_config(slide, optimizer=None), batches(1)[0]
    engine, *_ = deepspeed.initialize(model=model, config=config)
    try:
        assert torch.equal(engine(**batch).loss, plain(**batch).loss)
        with torch.no_grad():
            assert torch.equal(engine(**batch).logits, plain(**batch).logits)
    finally:
        engine.destroy()


def test_models_and_tiers_without_such_experts(disk: Path) -> None:
    with pytest.raises(SlideConfigError, match="no fused experts"), engine_for(llama(), ds_config(PARTS)):
        pass
    config = on_ssd(ds_config(PARTS), disk)
    with pytest.raises(SlideConfigError, match="weights may go to SSD"), engine_for(mixture("qwen3"), config):
        pass


def test_experts_are_not_unfrozen_later() -> None:
    model = mixture("qwen3")
    config = ds_config(PARTS)
    with engine_for(model, config, model_parameters=list(model.parameters())) as engine:
        train(engine, batches(1))
        model.model.layers[2].mlp.experts.down_proj.requires_grad_(True)
        with pytest.raises(SlideError, match="moves in parts"):
            engine(**batches(1)[0])


@pytest.mark.clients
def test_adapters_of_peft() -> None:
    """On attention. `test_expert_adapters` has adapters on the experts themselves."""
    peft = pytest.importorskip("peft")

    def adapted(**targets: Any) -> nn.Module:
        torch.manual_seed(3)
        config = peft.LoraConfig(r=4, init_lora_weights=False, **targets)
        return to_bf16(peft.get_peft_model(mixture("qwen3"), config)).train()

    on_attention = {"target_modules": ["k_proj"]}
    plain = plain_training(adapted(**on_attention), batches(2), 1.0)
    model = adapted(**on_attention)
    with engine_for(model, ds_config(PARTS)) as engine:
        assert engine.optimizer.runtime.parts.experts is not None
        found = train(engine, batches(2))
        found.states = states_of(model)
    assert differences(found, plain) == []
