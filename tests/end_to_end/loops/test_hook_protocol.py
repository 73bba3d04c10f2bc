"""DeepSpeed's hooks taken out of a model and put back, as scripts do it around generation with whole weights."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.runtime.zero import stage3
from deepspeed.runtime.zero.partitioned_param_coordinator import iter_params
from harness import batches, causal_loss, differences, ds_config, llama, states_of, train

from ds_slide.errors import SlideError

pytestmark = pytest.mark.usefixtures("one_rank")

OPTIONS = {"max_new_tokens": 4, "do_sample": False, "use_cache": True, "pad_token_id": 0}
PROMPT = batches(1, seed=5)[0]["input_ids"][:, :6]


def offload_of(engine: Any) -> Any:
    """What the scripts begin with; stock's engines without an optimizer have no `parameter_offload`."""
    if hasattr(engine.optimizer, "parameter_offload"):
        return engine.optimizer.parameter_offload
    return engine.optimizer


def take_out(engine: Any) -> Any:
    offload = offload_of(engine)
    for parameter in iter_params(offload.module, recurse=True):
        parameter.ds_active_sub_modules.clear()
    for hook in [*offload.forward_hooks, *offload.backward_hooks]:
        hook.remove()
    offload.forward_hooks = []
    offload.backward_hooks = []
    return offload


@contextmanager
def by_setting_up_again(engine: Any) -> Iterator[None]:
    """open-instruct."""
    with deepspeed.zero.GatheredParameters(engine.module.parameters()):
        offload = take_out(engine)
        yield
        offload.setup_zero_stage3_hooks()


@contextmanager
def by_registering(engine: Any) -> Iterator[None]:
    """TRL: the parameters outside of their modules, too, and the trace, which is stale then."""
    with deepspeed.zero.GatheredParameters(engine.module.parameters()):
        offload = take_out(engine)
        module = offload.module
        for _, parameter in itertools.chain(module.named_parameters(recurse=True), module.ds_external_parameters()):
            parameter.ds_active_sub_modules.clear()
        yield
        if hasattr(offload, "param_coordinator") and not offload.param_coordinator.is_invalid_trace():
            offload.param_coordinator._invalidate_trace()
        offload._register_deepspeed_module(offload.module)


@contextmanager
def by_the_old_name(engine: Any) -> Iterator[None]:
    """TRL with DeepSpeed before 0.16.4."""
    with deepspeed.zero.GatheredParameters(engine.module.parameters()):
        offload = take_out(engine)
        yield
        offload._register_hooks_recursively(offload.module)


@contextmanager
def by_removing_all(engine: Any) -> Iterator[None]:
    """The hooks go before the parameters come, and come after those have gone."""
    offload = offload_of(engine)
    offload._remove_module_hooks()
    with deepspeed.zero.GatheredParameters(engine.module.parameters()):
        yield
    offload.get_param_coordinator()._invalidate_trace()
    offload.setup_zero_stage3_hooks()


@contextmanager
def without_emptying_the_lists(engine: Any) -> Iterator[None]:
    with deepspeed.zero.GatheredParameters(engine.module.parameters()):
        offload = offload_of(engine)
        for hook in [*offload.forward_hooks, *offload.backward_hooks]:
            hook.remove()
        offload.fwd_pre_hook.remove()
        yield
        offload.setup_zero_stage3_hooks()


@contextmanager
def gathered_until_the_cache_is_emptied(engine: Any) -> Iterator[None]:
    """Gathered one by one, and let go all together."""
    offload = take_out(engine)
    for parameter in engine.module.parameters():
        parameter.all_gather([parameter])
    yield
    offload.partition_all_parameters()
    assert all(not parameter.numel() for parameter in engine.module.model.layers.parameters())
    offload.setup_zero_stage3_hooks()
    engine.empty_partition_cache()


@contextmanager
def with_the_hooks_in_place(engine: Any) -> Iterator[None]:
    """And the hooks set up twice."""
    offload_of(engine).setup_zero_stage3_hooks()
    with deepspeed.zero.GatheredParameters(engine.module.parameters()):
        yield
    offload_of(engine).get_param_coordinator(training=False).reset_step()


WAYS: list[Callable[[Any], AbstractContextManager[Any]]] = [
    by_setting_up_again,
    by_registering,
    by_the_old_name,
    by_removing_all,
    without_emptying_the_lists,
    gathered_until_the_cache_is_emptied,
    with_the_hooks_in_place,
    stage3.unwrap_model_for_generation,
]
SLIDES = pytest.mark.parametrize("slide", [{"window": 2}, {}], ids=["window of 2", "default window"])


@contextmanager
def started(slide: dict[str, Any], clip: float = 1.0, *, trains: bool = True) -> Iterator[Any]:
    model = llama(num_hidden_layers=4)
    config = ds_config(slide, clip=clip, **({} if trains else {"optimizer": None}))
    engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=list(model.parameters()))
    try:
        yield engine
    finally:
        engine.destroy()


def plain_tokens(engine: Any) -> torch.Tensor:
    """What plain torch generates with the engine's weights."""
    plain = llama(num_hidden_layers=4).to(torch.bfloat16)
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        plain.load_state_dict(engine.module.state_dict())
    tokens: torch.Tensor = plain.train(engine.module.training).generate(PROMPT, **OPTIONS)
    return tokens


@pytest.mark.by_turns(2)
@pytest.mark.parametrize(("slide", "clip"), [({"window": 2}, 1.0), ({}, 0.0)])
@pytest.mark.parametrize("way", WAYS)
def test_generation_between_steps(way: Callable[[Any], Any], clip: float, slide: dict[str, Any]) -> None:
    """The tokens are plain torch's, and training has the bits of a run without generation."""
    results = []
    for generates in (True, False):
        with started(slide, clip) as engine:
            result = train(engine, batches(1))
            for batch in batches(2, seed=7):
                if generates:
                    expected = plain_tokens(engine)
                    with way(engine):
                        assert torch.equal(engine.module.generate(PROMPT, **OPTIONS), expected)
                result.losses += train(engine, [batch]).losses
            result.states = states_of(engine.module)
            results.append(result)
    assert differences(*results) == []


@pytest.mark.by_turns(2)
@SLIDES
@pytest.mark.parametrize("way", WAYS)
def test_generation_without_an_optimizer(way: Callable[[Any], Any], slide: dict[str, Any]) -> None:
    with started(slide, trains=False) as engine, torch.no_grad():
        before = float(causal_loss(engine, batches(1)[0]))
        expected = plain_tokens(engine)
        for _ in range(2):
            with way(engine):
                assert torch.equal(engine.module.generate(PROMPT, **OPTIONS), expected)
            assert float(causal_loss(engine, batches(1)[0])) == before


def test_hooks_that_were_removed_one_by_one_are_missed() -> None:
    """Though the script has left them in the lists."""
    with started({"window": 2}) as engine:
        with deepspeed.zero.GatheredParameters(engine.module.parameters()):
            for hook in engine.optimizer.parameter_offload.forward_hooks:
                hook.remove()
            with pytest.raises(SlideError, match=r"without DS-Slide's hooks.*setup_zero_stage3_hooks\(\)"):
                engine.backward(causal_loss(engine, batches(1)[0]))
        engine.optimizer.parameter_offload.setup_zero_stage3_hooks()


@pytest.mark.parametrize("trains", [True, False])
def test_what_cannot_be_served_says_why(trains: bool) -> None:
    with started({"window": 2}, trains=trains) as engine:
        offload = engine.optimizer.parameter_offload
        assert not offload.param_coordinator.is_complete_trace() and not offload.param_coordinator.is_record_trace()
        assert offload.mark_persistent_parameters(10**5, 10**9) == []
        for name in ("fetch_sub_module", "trace_prologue"):
            assert not hasattr(offload.param_coordinator, name)
            with pytest.raises(SlideError, match=f"no attribute '{name}': DS-Slide fetches whole blocks"):
                getattr(offload.param_coordinator, name)
        with pytest.raises(SlideError, match=r"no attribute '_prefetch_bucket_sz'|keeps no '_prefetch_bucket_sz'"):
            offload._prefetch_bucket_sz  # noqa: B018
    with pytest.raises(SlideError, match="putting hooks into the model is refused: this engine has ended"):
        offload.setup_zero_stage3_hooks()


def test_the_optimizer_has_the_coordinator_too() -> None:
    with started({"window": 2}) as engine:
        engine.optimizer.get_param_coordinator(training=True).reset_step()
        engine.optimizer._get_param_coordinator()._invalidate_trace()
        engine.optimizer._partition_all_parameters()
        train(engine, batches(1))
