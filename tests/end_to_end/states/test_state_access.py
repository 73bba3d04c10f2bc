"""`deepspeed.utils.safe_*`, `GatheredParameters` and the attributes of the optimizer, at every point of a step.

Lanes are delayed in most of these tests: what is read too early would be read wrong.
"""

from __future__ import annotations

import math
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_grad,
    safe_set_local_optimizer_state,
    safe_update_full_grad_vectorized,
)
from harness import (
    Result,
    batches,
    differences,
    ds_config,
    engine_for,
    half_up,
    llama,
    on_ssd,
    same_bits,
    states_of,
    train,
    with_every_low_half,
)
from torch import nn

from ds_slide.errors import SlideError

pytestmark = pytest.mark.usefixtures("one_rank")

DELAYED = {"window": 2, "debug": {"lane_delay_ms": 2.0, "seed": 5}}
GatheredParameters = deepspeed.zero.GatheredParameters
BLOCK, OUTER = "model.layers.1.mlp.up_proj.weight", "model.norm.weight"


def engine_of(seed: int = 0, *, stock: bool = False, clip: float = 1.0, accumulation: int = 1, **slide: Any) -> Any:
    config = ds_config(None if stock else {**DELAYED, **slide}, clip=clip, accumulation=accumulation)
    return engine_for(llama(seed, num_hidden_layers=3), config)


def backward(engine: Any, batch: dict[str, torch.Tensor], factor: float = 1.0) -> None:
    engine.backward(engine(**batch).loss * factor)


def result_of(engine: Any) -> Result:
    return Result(states=states_of(engine.module))


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: safe_get_full_grad(parameter).clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("clip", [1.0, 0.0])
def test_states_after_a_step_are_the_updated_ones(clip):
    with engine_of(clip=clip) as engine:
        before = states_of(engine.module)
        train(engine, batches(1))
        # The last block first: its update is the last to run.
        first = {
            name: safe_get_full_optimizer_state(parameter, "exp_avg").clone()
            for name, parameter in reversed(list(engine.module.model.layers.named_parameters(prefix="model.layers")))
        }
        early = result_of(engine)
    assert all(same_bits(tensor, early.states[name]["exp_avg"]) for name, tensor in first.items())
    with engine_of(clip=clip, debug={}) as engine:
        train(engine, batches(1))
        engine.optimizer.checkpoint_event_prologue()  # waits for every update
        engine.optimizer.checkpoint_event_epilogue()
        late = result_of(engine)
    assert differences(early, late) == []
    assert all(early.states[name]["exp_avg"].any() for name in (BLOCK, OUTER))
    assert all(not same_bits(early.states[name]["master"], before[name]["master"]) for name in (BLOCK, OUTER))


@pytest.mark.parametrize("accumulation", [1, 2])
def test_between_backward_and_step(accumulation):
    """Old states and new gradients, as in stock."""
    read = {}
    for stock in (False, True):
        with engine_of(stock=stock, accumulation=accumulation) as engine:
            data = batches(accumulation)
            train(engine, data[:-1])
            before = None if stock else result_of(engine)  # stock has no moments before its first step
            backward(engine, data[-1])
            gradients = gradients_of(engine.module)
            assert before is None or differences(result_of(engine), before) == []
            for name, parameter in engine.module.named_parameters():
                assert gradients[name].shape == parameter.ds_shape
                assert gradients[name].dtype == torch.float32
                assert same_bits(safe_get_local_grad(parameter), gradients[name].flatten())
            engine.step()
            norm = float(engine.get_global_grad_norm())
            squares = sum(gradient.double().square().sum().item() for gradient in gradients.values())
            assert norm == pytest.approx(math.sqrt(squares), rel=1e-6 if not stock else 1e-3)
            read[stock] = gradients
    for name, gradient in read[True].items():
        if accumulation == 1:
            assert same_bits(read[False][name], gradient), name
        else:  # the sum of two bf16 gradients, rounded once here and there: 2^-8 each
            torch.testing.assert_close(read[False][name], gradient, rtol=2**-7, atol=1e-6)


def test_gradients_that_are_written_are_used():
    """Doubled gradients are those of a doubled loss, to the bit, and the norm is theirs."""
    batch = batches(1)[0]
    with engine_of() as engine:
        backward(engine, batch, 2.0)
        engine.step()
        expected, norm = result_of(engine), engine.get_global_grad_norm()

    def one_by_one(parameters: list[nn.Parameter]) -> None:
        for parameter in parameters:
            safe_set_full_grad(parameter, safe_get_full_grad(parameter) * 2)

    def locally(parameters: list[nn.Parameter]) -> None:
        for parameter in parameters:
            safe_set_local_grad(parameter, safe_get_local_grad(parameter) * 2)

    def together(parameters: list[nn.Parameter]) -> None:
        safe_update_full_grad_vectorized(parameters, lambda gradient, _: gradient * 2)

    for double in (one_by_one, locally, together):
        with engine_of() as engine:
            backward(engine, batch)
            double(list(engine.module.parameters()))
            engine.step()
            # The same squares, summed by the CPU instead of on the way down.
            assert float(engine.get_global_grad_norm()) == pytest.approx(float(norm), rel=1e-6)
            changed = result_of(engine)
        for name, tensors in changed.states.items():
            for key, tensor in tensors.items():
                torch.testing.assert_close(tensor, expected.states[name][key], rtol=1e-6, atol=1e-12)


def test_states_that_are_written_are_used():
    """A run that is given the states of another continues like the other, to the bit."""
    data = batches(6)
    with engine_of() as engine:
        train(engine, data[:2])
        given = states_of(engine.module)
        losses = train(engine, data[2:4]).losses
        expected = result_of(engine)
    for local in (False, True):
        with engine_of(7) as engine:
            train(engine, data[4:])
            for name, parameter in engine.module.named_parameters():
                moments = {key: given[name][key] for key in ("exp_avg", "exp_avg_sq")}
                if local:
                    safe_set_local_fp32_param(parameter, given[name]["master"].flatten())
                    for key, value in moments.items():
                        safe_set_local_optimizer_state(parameter, value.flatten(), key)
                else:
                    safe_set_full_fp32_param(parameter, given[name]["master"])
                    for key, value in moments.items():
                        safe_set_full_optimizer_state(parameter, value, key)
            assert differences(result_of(engine), Result(states=given)) == []
            assert train(engine, data[2:4]).losses == losses
            assert differences(result_of(engine), Result(states=expected.states)) == []


PLACES: dict[str, dict[str, Any]] = {
    "host": {},
    "host, 8bit moments": {"state_dtype": "8bit"},
    "gpu": {"gpu_states": 10**9},
    "ssd": {"host_memory": 0},
}


@pytest.mark.by_turns(2)
@pytest.mark.parametrize("local", [False, True], ids=["full", "local"])
@pytest.mark.parametrize("place", PLACES)
def test_masters_of_every_low_half_come_back(place, local, tmp_path):
    """What is written is read to the bit, in ties too, and an update that changes nothing leaves it so."""
    read, write = safe_get_full_fp32_param, safe_set_full_fp32_param
    if local:
        read, write = safe_get_local_fp32_param, safe_set_local_fp32_param
    config = ds_config({"window": 2, **PLACES[place]})
    if place == "ssd":
        on_ssd(config, tmp_path)
    with engine_for(llama(num_hidden_layers=3), config) as engine:
        train(engine, batches(1))
        parameters, given, count = dict(engine.module.named_parameters()), {}, 0
        for name, parameter in parameters.items():
            given[name] = with_every_low_half(read(parameter), count)
            count += given[name].numel()
            write(parameter, given[name])
        assert count > 2 * 0xFFFF
        engine.optimizer.param_groups[0]["lr"] = 0.0
        for _ in range(2):
            for name, parameter in parameters.items():
                assert same_bits(read(parameter), given[name]), name
                with GatheredParameters([parameter]):
                    assert same_bits(parameter.data, half_up(given[name]).view(parameter.shape)), name
            train(engine, batches(1))


def test_local_states_are_the_whole_at_one_rank():
    with engine_of() as engine:
        train(engine, batches(1))
        for parameter in engine.module.parameters():
            assert same_bits(safe_get_local_fp32_param(parameter), safe_get_full_fp32_param(parameter).flatten())
            for key in ("exp_avg", "exp_avg_sq"):
                local = safe_get_local_optimizer_state(parameter, key)
                assert same_bits(local, safe_get_full_optimizer_state(parameter, key).flatten())


def test_a_state_that_is_read_is_a_copy():
    with engine_of() as engine:
        parameter = dict(engine.module.named_parameters())[BLOCK]
        for read in (
            lambda: safe_get_full_fp32_param(parameter),
            lambda: safe_get_full_optimizer_state(parameter, "exp_avg"),
        ):
            before = read().clone()
            read().fill_(3.0)
            assert same_bits(read(), before)


@pytest.mark.parametrize("clip", [1.0, 0.0])
def test_gathered_parameters_that_are_written_are_kept(clip):
    """Written right after a step, while its updates are pending: some elements of several parameters of one unit."""
    names = [BLOCK, "model.layers.1.input_layernorm.weight", OUTER, "lm_head.weight"]

    def written(gather: bool) -> Result:
        with engine_of(clip=clip) as engine:
            train(engine, batches(2))
            parameters = {name: dict(engine.module.named_parameters())[name] for name in names}
            if gather:
                with GatheredParameters(list(parameters.values()), modifier_rank=0):
                    for parameter in parameters.values():
                        parameter.data.view(-1)[1::3] = 0.5
            else:  # the same through the masters: unchanged elements keep every bit of theirs
                for parameter in parameters.values():
                    master = safe_get_full_fp32_param(parameter).clone()
                    master.view(-1)[1::3] = 0.5
                    safe_set_full_fp32_param(parameter, master)
            result = result_of(engine)
            for name in names:
                assert (result.states[name]["weight"].view(-1)[1::3] == 0.5).all()
                assert not (result.states[name]["weight"].view(-1)[2::3] == 0.5).any()
            with torch.no_grad():
                result.losses.append(engine(**batches(1)[0]).loss.item())
            result.losses += train(engine, batches(2)).losses
            result.states |= {f"later {name}": tensors for name, tensors in states_of(engine.module).items()}
            return result

    assert differences(written(True), written(False)) == []


def test_gathered_parameters_are_the_updated_weights():
    with engine_of() as engine:
        train(engine, batches(1))
        for name, parameter in engine.module.named_parameters():
            with GatheredParameters([parameter]):
                assert parameter.shape == parameter.ds_shape
                assert same_bits(parameter.data, half_up(safe_get_full_fp32_param(parameter))), name
        assert engine.module.model.layers[1].mlp.up_proj.weight.numel() == 0


def test_without_held_gradients_nothing_can_be_read_before_the_step():
    with engine_of(clip=0.0) as engine:
        parameters = [dict(engine.module.named_parameters())[name] for name in (BLOCK, OUTER)]
        backward(engine, batches(1)[0])
        for parameter in parameters:
            with pytest.raises(SlideError, match=r"gradient needs the gradients between .*defer_updates"):
                safe_get_full_grad(parameter)
            with pytest.raises(SlideError, match=r"reading a state between backward\(\) and step\(\).*defer_updates"):
                safe_get_full_fp32_param(parameter)
            with pytest.raises(SlideError, match=r"writing a state between backward\(\) and step\(\).*defer_updates"):
                safe_set_full_optimizer_state(parameter, torch.zeros(parameter.ds_shape), "exp_avg")
            with (
                pytest.raises(SlideError, match=r"gathering a parameter between .*defer_updates"),
                GatheredParameters([parameter]),
            ):
                pass
        engine.step()
        assert all(safe_get_full_fp32_param(parameter) is not None for parameter in parameters)
        train(engine, batches(1))  # what was refused has left nothing behind
    with engine_of(clip=0.0, defer_updates=True) as engine:
        backward(engine, batches(1)[0])
        assert all(gradient.any() for gradient in gradients_of(engine.module).values())


def test_frozen_parameters_have_no_states():
    model = llama(num_hidden_layers=3)
    model.model.layers[1].requires_grad_(False)
    with engine_for(model, ds_config(DELAYED)) as engine:
        backward(engine, batches(1)[0])
        frozen = dict(engine.module.named_parameters())[BLOCK]
        assert safe_get_full_grad(frozen) is None
        assert safe_get_full_fp32_param(frozen) is None
        assert safe_get_full_optimizer_state(frozen, "exp_avg") is None
        safe_set_full_fp32_param(frozen, torch.zeros(frozen.ds_shape))  # nothing, as in stock
        with GatheredParameters([frozen]):
            assert frozen.data.any()
        with GatheredParameters([frozen], modifier_rank=0):
            frozen.data.fill_(0.25)
        engine.step()
        train(engine, batches(1))
        with GatheredParameters([frozen]):
            assert (frozen.data == 0.25).all()


def test_wrong_requests_are_named():
    with engine_of() as engine:
        parameter = dict(engine.module.named_parameters())[OUTER]
        with pytest.raises(SlideError, match=r"no optimizer state 'momentum'; AdamW has exp_avg and exp_avg_sq"):
            safe_get_full_optimizer_state(parameter, "momentum")
        with pytest.raises(SlideError, match=r"model.norm.weight has 64 elements, but the value given has 63"):
            safe_set_full_fp32_param(parameter, torch.zeros(63))


@pytest.mark.parametrize("clip", [1.0, 0.0])
def test_learning_rates_set_from_outside(clip):
    """Schedulers write to `param_groups`; the next update uses what is there."""
    with engine_of(clip=clip) as engine:
        train(engine, batches(1))
        before = states_of(engine.module)
        assert [group["lr"] for group in engine.optimizer.param_groups] == engine.get_lr() == [1e-3]
        engine.optimizer.param_groups[0]["lr"] = 0.0
        train(engine, batches(1))
        after = states_of(engine.module)
        assert all(same_bits(after[name]["master"], tensors["master"]) for name, tensors in before.items())
        assert not same_bits(after[BLOCK]["exp_avg"], before[BLOCK]["exp_avg"])
        engine.optimizer.set_lr(2e-3)
        assert engine.optimizer.get_lr() == engine.get_lr()[0] == 2e-3


def test_gradients_that_are_not_finite_skip_the_step():
    with engine_of() as engine:
        train(engine, batches(1))
        before, taken = result_of(engine), engine.global_steps
        assert (engine.optimizer.loss_scale, engine.optimizer.overflow, engine.was_step_applied()) == (1.0, False, True)
        backward(engine, batches(1)[0], math.inf)
        engine.step()
        assert engine.optimizer.overflow and not engine.was_step_applied() and engine.skipped_steps == 1
        assert engine.global_steps == taken + 1 and not math.isfinite(engine.get_global_grad_norm())
        assert differences(result_of(engine), before) == []
        after = train(engine, batches(1)).losses
    with engine_of() as engine:
        train(engine, batches(1))
        assert train(engine, batches(1)).losses == after
