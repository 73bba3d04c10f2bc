"""Generation between steps and publishing weights, as online reinforcement learning does them."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.runtime.zero import stage3
from harness import (
    PlainAdamW,
    batches,
    ds_config,
    engine_for,
    half_up,
    llama,
    states_of,
    sum_gradients_by_block,
    to_bf16,
    train,
    unequal,
)

from ds_slide.errors import SlideError
from ds_slide.runtime.core.futures import Future

pytestmark = pytest.mark.usefixtures("one_rank")

SLIDE: dict[str, dict[str, Any]] = {"host": {"window": 2}, "gpu": {"window": 2, "gpu_states": "1GiB"}}
OPTIONS = {"max_new_tokens": 6, "do_sample": False, "use_cache": True, "pad_token_id": 0}


@contextmanager
def unwrapped_by_trl(engine: Any) -> Iterator[None]:
    """What TRL 1.16 does around generation with ds3_gather_for_generation (tests/clients run the original)."""
    offload = engine.optimizer.parameter_offload
    with deepspeed.zero.GatheredParameters(engine.parameters()):
        named = itertools.chain(offload.module.named_parameters(recurse=True), offload.module.ds_external_parameters())
        for _, parameter in named:
            parameter.ds_active_sub_modules.clear()
        for hook in offload.forward_hooks:
            hook.remove()
        for hook in offload.backward_hooks:
            hook.remove()
        offload.forward_hooks = []
        offload.backward_hooks = []
        yield
        if hasattr(offload, "param_coordinator") and not offload.param_coordinator.is_invalid_trace():
            offload.param_coordinator._invalidate_trace()
        offload._register_deepspeed_module(offload.module)


WAYS: dict[str, Callable[[Any], AbstractContextManager[Any]]] = {
    "streamed": lambda _engine: nullcontext(),
    "gathered-by-trl": unwrapped_by_trl,
    "gathered-by-deepspeed": stage3.unwrap_model_for_generation,
}


@pytest.mark.thinned(3)
@pytest.mark.parametrize("clip", [1.0, 0.0], ids=["clipping", "immediate"])
@pytest.mark.parametrize("states", SLIDE)
@pytest.mark.parametrize("way", WAYS)
def test_tokens_and_training_are_those_of_plain_torch(way: str, states: str, clip: float) -> None:
    model = llama(num_hidden_layers=4)
    plain = to_bf16(copy.deepcopy(model)).train()
    sum_gradients_by_block(plain.model.layers)
    reference, prompt = PlainAdamW(plain, clip), batches(1, seed=5)[0]["input_ids"][:, :8]
    with engine_for(model, ds_config(SLIDE[states], clip=clip)) as engine:
        for batch in batches(3):
            mine, theirs = engine(**batch).loss, plain(**batch).loss
            assert mine.item() == theirs.item()
            engine.backward(mine)
            theirs.backward()
            engine.step()
            reference.step()
            with WAYS[way](engine):
                tokens = engine.module.generate(prompt, **OPTIONS)
            assert tokens.shape == (2, 14)
            assert torch.equal(tokens, plain.generate(prompt, **OPTIONS))
        assert unequal(states_of(model), reference.states()) == []


def test_while_the_hooks_are_away_no_block_passes_through_the_window() -> None:
    model = llama(num_hidden_layers=4)
    with engine_for(model, ds_config({"window": 2})) as engine:
        train(engine, batches(1))
        entered: list[str] = []
        enter = engine.optimizer.runtime.enter_forward
        engine.optimizer.runtime.enter_forward = lambda unit, **how: (entered.append(unit.name), enter(unit, **how))
        with unwrapped_by_trl(engine):
            engine.module.generate(batches(1)[0]["input_ids"][:, :4], **OPTIONS)
        assert entered == []
        with torch.no_grad():
            engine(**batches(1)[0])
        assert len(entered) == 4


def test_training_without_the_hooks_is_refused() -> None:
    model = llama(num_hidden_layers=2)
    with engine_for(model, ds_config({})) as engine, deepspeed.zero.GatheredParameters(model.parameters()):
        offload = engine.optimizer.parameter_offload
        for hook in offload.forward_hooks:
            hook.remove()
        offload.forward_hooks = []
        with pytest.raises(SlideError, match=r"without DS-Slide's hooks.*setup_zero_stage3_hooks"):
            engine.backward(engine(**batches(1)[0]).loss)
        with pytest.raises(SlideError, match="LlamaModel, but DS-Slide has those of the whole LlamaForCausalLM"):
            offload._register_deepspeed_module(model.model)
        offload._register_deepspeed_module(model)


# ---- publishing weights ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("states", SLIDE)
def test_weights_published_one_by_one_are_those_of_the_last_step(states: str) -> None:
    model = llama()
    with engine_for(model, ds_config(SLIDE[states])) as engine:
        units = [unit for unit in engine.optimizer.runtime.units if unit.is_streamed]
        streamed, published = [parameter for unit in units for parameter in unit.parameters], {}
        train(engine, batches(2))
        for name, parameter in model.named_parameters():
            with deepspeed.zero.GatheredParameters([parameter]):
                published[name] = parameter.data.clone()
                # Of the streamed blocks nothing else is there.
                others = [p for p in streamed if p is not parameter]
                assert sum(p.numel() for p in others) == 0
        states_now = states_of(model)
        assert published.keys() == states_now.keys()
        for name, weight in published.items():
            assert torch.equal(weight, states_now[name]["weight"]), name
            assert torch.equal(weight, half_up(states_now[name]["master"])), name


def test_reading_a_weight_waits_for_the_update_of_its_block_alone() -> None:
    """The last block's update is held back: everything before it can be read, and a wait for it would not end."""
    model = llama()
    with engine_for(model, ds_config({"window": 2, "hang_timeout": 20})) as engine:
        train(engine, batches(1))
        runtime = engine.optimizer.runtime
        last = runtime.blocks[-1]
        updated, last.updated = last.updated, Future(runtime.parts.context.failures, "an update that is held back")
        late = {id(parameter) for parameter in last.parameters}
        read = 0
        for parameter in model.parameters():
            if id(parameter) not in late:
                with deepspeed.zero.GatheredParameters([parameter]):
                    read += parameter.numel()
        assert read == sum(parameter.ds_numel for parameter in model.parameters() if id(parameter) not in late)
        last.updated = updated


@pytest.mark.parametrize("states", SLIDE)
def test_what_is_done_to_gathered_weights_without_a_modifier_is_forgotten(states: str) -> None:
    """An adapter is merged for publishing and taken out again, which leaves rounding errors."""
    model = llama()
    with engine_for(model, ds_config(SLIDE[states])) as engine:
        train(engine, batches(1))
        before = states_of(model)
        with deepspeed.zero.GatheredParameters(list(model.parameters())):
            for parameter in model.parameters():
                parameter.data += 1.0
        assert unequal(states_of(model), before) == []
        with torch.no_grad():
            again = engine(**batches(1)[0]).loss.item()
        plain = to_bf16(llama())
        plain.load_state_dict({name: tensors["weight"] for name, tensors in before.items()})
        with torch.no_grad():
            assert again == plain(**batches(1)[0]).loss.item()
