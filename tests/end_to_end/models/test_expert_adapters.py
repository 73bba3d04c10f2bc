"""PEFT's `target_parameters` on fused experts that move in parts, or whole: the same bits as in plain torch."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from all_mixed import all_mixed
from fused_experts import (
    EXPERT_BYTES,
    EXPERTS,
    LAYERS,
    ON_EXPERTS,
    TOP_K,
    adapted_mixture,
    fetched,
    with_packed_experts,
)
from harness import Result, batches, causal_loss, differences, ds_config, engine_for, plain_training, states_of, train
from packed import forward_between

from ds_slide.errors import SlideError
from ds_slide.integration.parameters import ParameterProtocol
from ds_slide.patching import experts as patched

pytest.importorskip("peft")
pytestmark = pytest.mark.usefixtures("one_rank")
# Three experts at a time, of eight: three passes, the last one short.
PARTS: dict[str, Any] = {"window": 2, "gpu_states": 0, "experts": 3 * EXPERT_BYTES + 100}
WHOLE: dict[str, Any] = {"window": 2, "gpu_states": 0, "experts": "auto"}
DELAYED = {"debug": {"lane_delay_ms": 1.0, "seed": 3}}
CHECKPOINTS: dict[str, Any] = {"none": None, "hooks": {"use_reentrant": False}, "reentrant": {"use_reentrant": True}}
# The gradients of a shared expert's input are added in another order with "eager": see test_experts_in_parts.
GRID = [
    (shape, implementation, checkpoints)
    for shape in ("qwen3", "mixtral", "deepseek", "gpt-oss", "qwen2")
    for implementation in ("grouped_mm", "eager", "batched_mm")
    for checkpoints in CHECKPOINTS
    if (shape, implementation) != ("qwen2", "eager")
]


def trained(model: Any, slide: dict[str, Any], data: Any, loss_of: Any = causal_loss) -> Result:
    with engine_for(model, ds_config(slide)) as engine:
        assert (engine.optimizer.runtime.parts.experts is not None) == (slide is not WHOLE)
        result = train(engine, data, loss_of)
        result.states = states_of(model)
    return result


@pytest.mark.thinned(5)
@pytest.mark.parametrize(("shape", "implementation", "checkpoints"), GRID)
def test_training_in_parts_has_the_bits_of_plain_torch(shape: str, implementation: str, checkpoints: str) -> None:
    """An evaluation comes between each forward and its backward. Each expert has so many tokens that a sort which does
    not keep the order of equal numbers exchanges them."""
    options, data = (implementation, CHECKPOINTS[checkpoints]), batches(2, length=64)
    plain = plain_training(adapted_mixture(shape, *options), data, 1.0, loss_of=forward_between)
    found = trained(adapted_mixture(shape, *options), PARTS | DELAYED, data, forward_between)
    assert differences(found, plain) == []


@pytest.mark.thinned(11)
@pytest.mark.parametrize(("shape", "implementation", "checkpoints"), GRID)
def test_training_in_whole_blocks_has_the_bits_of_plain_torch(
    shape: str, implementation: str, checkpoints: str
) -> None:
    options = (implementation, CHECKPOINTS[checkpoints])
    plain = plain_training(adapted_mixture(shape, *options), batches(2), 1.0, loss_of=forward_between)
    assert differences(trained(adapted_mixture(shape, *options), WHOLE, batches(2), forward_between), plain) == []


def with_gradients(weights: torch.Tensor, factors: list[torch.Tensor], gradient: torch.Tensor) -> list[torch.Tensor]:
    """The sum that PEFT computes, and the gradients of its factors."""
    left, right = (each.detach().requires_grad_() for each in factors)
    result = torch.baddbmm(weights, left, right, alpha=2.0)
    return [result.detach(), *torch.autograd.grad(result, (left, right), gradient)]


@pytest.mark.parametrize("used", [[5], [1, 6], [0, 1, 2, 7]], ids=str)
@pytest.mark.parametrize("shape", ["qwen3", "gpt-oss"])
def test_products_of_some_experts_are_those_of_all(shape: str, used: list[int]) -> None:
    """With one expert, with some and with neighbours. On a CPU without AVX-512 a transposed factor changes the bits of
    a few sums; the strides show it everywhere."""
    (wrapper, *_) = [each for each in adapted_mixture(shape).modules() if hasattr(each, "get_delta_factors")]
    *factors, _ = wrapper.get_delta_factors("default")
    generator, places = torch.Generator().manual_seed(0), torch.tensor(used)
    for _ in range(20):
        for each in factors:
            each.data.normal_(generator=generator)
        weights, gradient = torch.randn(2, *wrapper.get_param().shape, generator=generator).bfloat16()
        whole = with_gradients(weights, factors, gradient)
        parts = [patched.selected(each, places) for each in factors]
        found = with_gradients(weights[places], parts, gradient[places])
        assert [torch.equal(each[places], part) for each, part in zip(whole, found, strict=True)] == [True] * 3
        for each, part in zip(factors, parts, strict=True):
            assert [stride == 1 for stride in each.stride()[1:]] == [stride == 1 for stride in part.stride()[1:]]


@pytest.mark.parametrize("targets", [ON_EXPERTS[:1], ON_EXPERTS[1:]])
def test_adapters_on_one_of_the_parameters(targets: list[str]) -> None:
    plain = plain_training(adapted_mixture("gpt-oss", targets=targets), batches(2), 1.0)
    assert differences(trained(adapted_mixture("gpt-oss", targets=targets), PARTS, batches(2)), plain) == []


@pytest.mark.parametrize("mixed", [False, True])
def test_blocks_that_are_kept_or_mixed_change_no_bit(mixed: bool) -> None:
    data = batches(8)
    plain = plain_training(adapted_mixture("qwen3"), data, 1.0)
    with all_mixed() if mixed else nullcontext():
        model = adapted_mixture("qwen3")
        with engine_for(model, ds_config(PARTS | {"gpu_memory": "1GiB"})) as engine:
            found = train(engine, data)
            assert engine.optimizer.slide_stats()["activations"]["mix" if mixed else "keep"] == LAYERS
            found.states = states_of(model)
    assert differences(found, plain) == []


@pytest.mark.parametrize("slide", [PARTS, WHOLE], ids=["parts", "whole"])
def test_a_resumed_run_continues_to_the_bit(slide: dict[str, Any], tmp_path: Path) -> None:
    data, model = batches(3), adapted_mixture("qwen3")
    with engine_for(model, ds_config(slide)) as engine:
        train(engine, data[:1])
        engine.save_checkpoint(tmp_path)
        expected = train(engine, data[1:])
        expected.states = states_of(model)
    model = adapted_mixture("qwen3")
    with engine_for(model, ds_config(slide)) as engine:
        engine.load_checkpoint(tmp_path)
        found = train(engine, data[1:])
        found.states = states_of(model)
    assert differences(found, expected) == []


@pytest.mark.parametrize("slide", [PARTS, WHOLE], ids=["parts", "whole"])
def test_adapters_are_switched_disabled_and_merged(slide: dict[str, Any]) -> None:
    """A forward of two tokens fetches the experts that they are routed to, and no other."""
    model = adapted_mixture("qwen3", names=("first", "second"))
    plain = copy.deepcopy(model)
    ids = batches(1)[0]["input_ids"]
    with engine_for(model, ds_config(slide)) as engine, torch.no_grad():
        engine.eval()
        plain.eval()
        for name in ("first", "second", "first"):
            for each in (model, plain):
                each.set_adapter(name)
            for tokens in (ids, ids[:1, :2], ids[:1, 3:5]):
                assert torch.equal(engine(input_ids=tokens).logits, plain(input_ids=tokens).logits)
        with model.disable_adapter(), plain.disable_adapter():
            assert torch.equal(engine(input_ids=ids).logits, plain(input_ids=ids).logits)
        if slide is PARTS:
            for each in (model, plain):
                each.base_model.set_adapter(["first", "second"])
            with pytest.raises(SlideError, match="2 adapters of down_proj are active"):
                engine(input_ids=ids)
            for each in (model, plain):
                each.base_model.set_adapter("first")
            assert torch.equal(engine(input_ids=ids).logits, plain(input_ids=ids).logits)
        with deepspeed.zero.GatheredParameters(list(model.parameters())):
            merged = {name: each.clone() for name, each in model.merge_and_unload().named_parameters()}
        for name, each in plain.merge_and_unload().named_parameters():
            assert torch.equal(each, merged[name]), name


def test_short_forwards_with_whole_blocks_leave_experts_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing is gathered for PEFT, which reads whole parameters."""
    gathered: list[Any] = []
    gather = ParameterProtocol.gather
    monkeypatch.setattr(ParameterProtocol, "gather", lambda *given: (gathered.append(given), gather(*given)))
    model = adapted_mixture("qwen3").eval()
    plain, tokens = copy.deepcopy(model), batches(1)[0]["input_ids"][:1]
    with engine_for(model, ds_config(WHOLE)) as engine, torch.no_grad():
        for place in range(4):
            token = tokens[:, place : place + 1]
            assert torch.equal(engine(input_ids=token).logits, plain(input_ids=token).logits)
        assert engine.optimizer.runtime.parts.window.few_tokens == EXPERTS // (2 * TOP_K)
    assert gathered == []


def test_generation_by_peft_leaves_experts_out() -> None:
    """It calls the model inside of PEFT's."""
    model = adapted_mixture("qwen3").eval()
    plain, token = copy.deepcopy(model), torch.tensor([[7]])
    options = {"max_new_tokens": 4, "do_sample": False, "use_cache": True, "pad_token_id": 0}
    with engine_for(model, ds_config(WHOLE)) as engine, torch.no_grad():
        blocks = engine.optimizer.runtime.blocks
        whole = sum(unit.layout.local_numel * 2 for unit in blocks)
        front = sum(unit.layout.without_experts().local_numel * 2 for unit in blocks)
        engine(input_ids=token)  # shows how many experts a token has
        fetched(engine)
        assert torch.equal(model.generate(input_ids=token, **options), plain.generate(input_ids=token, **options))
        assert fetched(engine) <= 4 * (front + LAYERS * TOP_K * EXPERT_BYTES) < 3 * whole


def test_an_exception_in_an_expert_leaves_the_adapters_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, model = plain_training(adapted_mixture("qwen3"), batches(1), 1.0), adapted_mixture("qwen3")
    with engine_for(model, ds_config(PARTS)) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(patched, "_output", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                engine(**batches(1)[0])
        found = train(engine, batches(1))
        found.states = states_of(model)
    assert differences(found, plain) == []


@pytest.mark.by_turns(2)
@pytest.mark.parametrize("targets", [ON_EXPERTS, ON_EXPERTS[:1]], ids=["both", "one"])
@pytest.mark.parametrize(("shape", "checkpoints"), [("qwen3", "hooks"), ("gpt-oss", "none"), ("gpt-oss", "reentrant")])
def test_adapters_on_packed_experts_are_plain_torchs(shape: str, checkpoints: str, targets: list[str]) -> None:
    """PEFT alone adds to a parametrized parameter in its first forward only."""

    def made() -> Any:
        return with_packed_experts(adapted_mixture(shape, None, CHECKPOINTS[checkpoints], targets=targets))

    plain, model = plain_training(made(), batches(2), 1.0, loss_of=forward_between), made()
    found = trained(model, WHOLE, batches(2), forward_between)
    assert any(states["weight"].dtype == torch.int8 for states in found.states.values())
    for each in (plain, found):  # the names of what the engine has taken apart are others
        each.states = {name: states for name, states in each.states.items() if "master" in states}
    assert sum("experts" in name for name in found.states) == LAYERS * 2 * len(targets)
    assert differences(found, plain) == []


def test_blocks_with_adapters_on_packed_experts_have_no_state_of_their_own() -> None:
    """Such blocks would not be recomputed where memory is short."""
    model = with_packed_experts(adapted_mixture("qwen3"))
    with engine_for(model, ds_config(WHOLE | {"gpu_memory": "1GiB"})) as engine:
        train(engine, batches(1))
        states = engine.optimizer.runtime.parts.spare.activations._states.values()
        assert len(states) == LAYERS and not [each.changes for each in states if each.changes or each.is_new]


def test_adapters_on_packed_experts_are_switched_and_disabled_and_not_merged() -> None:
    model, plain = (with_packed_experts(adapted_mixture("qwen3", names=("first", "second"))) for _ in range(2))
    ids = batches(1)[0]["input_ids"]
    with engine_for(model, ds_config(WHOLE)) as engine, torch.no_grad():
        for active in ("first", ["first", "second"], "second", "first"):
            for each in (model, plain):
                each.base_model.set_adapter(active)
            assert torch.equal(engine(input_ids=ids).logits, plain(input_ids=ids).logits)
        with model.disable_adapter(), plain.disable_adapter():
            assert torch.equal(engine(input_ids=ids).logits, plain(input_ids=ids).logits)
    for after in (nullcontext(), deepspeed.zero.GatheredParameters(list(model.parameters()))):
        with (
            after,
            pytest.raises(SlideError, match="the adapter on down_proj cannot be merged, because the packed"),
        ):
            model.merge_and_unload()
