"""A head whose weight stays in host memory trains as one that is on the GPU, wherever the other states are."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad, safe_set_full_fp32_param
from harness import Result, batches, differences, ds_config, engine_for, llama, on_ssd, states_of, train, trained
from torch import nn

from ds_slide.errors import SlideConfigError, SlideError
from ds_slide.patching.head import StreamedLinear
from ds_slide.runtime.weights import rows

pytestmark = [pytest.mark.usefixtures("one_rank", "many_chunks"), pytest.mark.thinned(2)]

STEPS = 3
# Seven chunks of the head's 256 rows, the last one short, and no whole number of them in a span or in an SSD chunk.
CHUNK_ROWS = 40
STREAM = {"stream_head": True}
SCHEDULES = {"clipping": (1.0, 1), "immediate": (0.0, 1), "accumulation": (0.0, 3), "both": (1.0, 2)}
schedules = pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)

Schedule = tuple[float, int]


@pytest.fixture
def many_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "CHUNK_NUMEL", CHUNK_ROWS * 64)
    monkeypatch.setattr("ds_slide.runtime.core.unit.SPAN_NUMEL", 3008)
    monkeypatch.setattr("ds_slide.plan.ssd_settings.CHUNK_NUMEL", 4096)


def run(schedule: Schedule, slide: dict[str, Any], ssd: Path | None = None, **options: Any) -> Result:
    clip, accumulation = schedule
    config = ds_config({"window": 3, "gpu_states": 0, **slide}, clip=clip, accumulation=accumulation, **options)
    if ssd is not None:
        on_ssd(config, ssd)
    return trained(llama(), config, batches(STEPS * accumulation))


@functools.cache
def streamed(schedule: Schedule) -> Result:
    return run(schedule, STREAM)


@schedules
def test_it_trains_like_a_head_on_the_gpu(schedule: Schedule) -> None:
    found, expected = streamed(schedule), run(schedule, {})
    torch.testing.assert_close(found.losses, expected.losses, rtol=1e-3, atol=0)
    torch.testing.assert_close(found.norms, expected.norms, rtol=1e-2, atol=0)
    # The first micro-batch has the same weights, and so the same logits.
    assert found.losses[0] == pytest.approx(expected.losses[0], rel=1e-6)
    masters = [result.states["lm_head.weight"]["master"] for result in (found, expected)]
    start = llama().lm_head.weight.detach()
    # Updates of AdamW are of the size of the learning rate: most agree to a small part of that.
    changes = [master - start for master in masters]
    assert changes[1].norm() > 0
    assert (changes[0] - changes[1]).norm() < 0.1 * changes[1].norm()


PLACES: dict[str, dict[str, Any]] = {
    "window-2": {"window": 2, "gradient_buffers": 2},
    "delays": {"debug": {"lane_delay_ms": 3.0, "seed": 1}},
    "delays-window-9": {"window": 9, "cpu_threads": 2, "debug": {"lane_delay_ms": 3.0, "seed": 6}},
    # More than all other states need: the head's stay in host memory whatever room there is.
    "gpu-states": {"gpu_states": "1GiB", "debug": {"lane_delay_ms": 2.0, "seed": 2}},
}


@pytest.mark.by_turns(4)
@schedules
@pytest.mark.parametrize("slide", PLACES.values(), ids=PLACES)
def test_placement_changes_no_bit(schedule: Schedule, slide: dict[str, Any]) -> None:
    assert differences(run(schedule, {**STREAM, **slide}), streamed(schedule)) == []


@pytest.mark.thinned(3)
@schedules
@pytest.mark.parametrize("delay", [0.0, 3.0])
def test_states_on_ssd_change_no_bit(schedule: Schedule, delay: float, tmp_path: Path) -> None:
    slide = {**STREAM, "host_memory": 0, "ssd_buffers": 2, "debug": {"lane_delay_ms": delay, "seed": 4}}
    assert differences(run(schedule, slide, tmp_path), streamed(schedule)) == []


def test_holding_gradients_changes_no_bit() -> None:
    immediate = SCHEDULES["immediate"]
    assert differences(run(immediate, {**STREAM, "defer_updates": True}), streamed(immediate)) == []


def test_fp16_with_an_overflow(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first steps of a loss scale of 2^24 overflow in the head, whose gradient goes down before anybody knows."""
    monkeypatch.setattr(get_accelerator(), "is_fp16_supported", lambda: True)  # slow on a CPU, but it works
    fp16 = {"bf16": None, "fp16": {"enabled": True, "initial_scale_power": 24, "hysteresis": 1}}
    config = ds_config(STREAM, clip=1.0, **fp16)
    with engine_for(llama(), config) as engine:
        before = safe_get_full_fp32_param(engine.module.lm_head.weight).clone()
        result = train(engine, batches(1) * 12)
        assert engine.skipped_steps > 0
        assert not torch.equal(safe_get_full_fp32_param(engine.module.lm_head.weight), before)
    assert result.losses[-1] < result.losses[0]


@pytest.mark.parametrize("trainable", ["head", "body"])
def test_frozen_parts(trainable: str) -> None:
    """A frozen head sends no gradient down; a frozen body leaves the head alone in the graph."""
    results = []
    for slide in (STREAM, {}):
        model = llama()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.startswith("lm_head") == (trainable == "head"))
        results.append(trained(model, ds_config({"window": 3, "gpu_states": 0, **slide}), batches(STEPS)))
    found, expected = results
    torch.testing.assert_close(found.losses, expected.losses, rtol=1e-3, atol=0)
    torch.testing.assert_close(found.norms, expected.norms, rtol=1e-2, atol=0)
    changed = not torch.equal(found.states["lm_head.weight"]["weight"], llama().lm_head.weight.detach().bfloat16())
    assert changed == (trainable == "head")


def test_a_model_made_under_zero_init() -> None:
    """Its head's weight is a partition with an empty parameter when the engine finds it."""
    llama()  # transformers cannot be imported under zero.Init
    results = []
    for slide in (STREAM, {}):
        with deepspeed.zero.Init(config_dict_or_path=ds_config(None)):
            model = llama()
        results.append(trained(model, ds_config({"gpu_states": 0, **slide}), batches(STEPS)))
    torch.testing.assert_close(results[0].losses, results[1].losses, rtol=1e-3, atol=0)


def test_evaluation_and_generation_use_the_new_weights() -> None:
    data = batches(2)
    results = []
    for slide in (STREAM, {}):
        with engine_for(llama(), ds_config({"gpu_states": 0, **slide})) as engine:
            train(engine, data)
            engine.eval()
            with torch.no_grad():
                logits = engine(input_ids=data[0]["input_ids"]).logits
                tokens = engine.module.generate(data[0]["input_ids"][:, :4], max_new_tokens=4, do_sample=False)
            results.append((logits.float(), tokens))
    (found, found_tokens), (expected, _) = results
    torch.testing.assert_close(found, expected, rtol=3e-2, atol=3e-2)
    assert found_tokens.shape == (2, 8)


def test_reading_and_writing_the_weight_and_its_gradient() -> None:
    with engine_for(llama(), ds_config({**STREAM, "defer_updates": True})) as engine:
        weight = engine.module.lm_head.weight
        assert weight.numel() == 0
        engine.backward(engine(**batches(1)[0]).loss)
        gradient = safe_get_full_grad(weight)
        assert gradient.shape == (256, 64) and gradient.abs().sum() > 0
        engine.step()
        with deepspeed.zero.GatheredParameters([weight], modifier_rank=0):
            assert weight.shape == (256, 64)
            weight.data.zero_()
        assert weight.numel() == 0
        loss = engine(**batches(1)[0]).loss
        assert loss.item() == pytest.approx(torch.tensor(256.0).log().item(), rel=1e-3)
        safe_set_full_fp32_param(weight, torch.full((256, 64), 2.0))
        with torch.no_grad():
            logits = engine(input_ids=batches(1)[0]["input_ids"]).logits
        assert (logits == logits[..., :1]).all() and logits.abs().sum() > 0


def test_a_checkpoint_goes_on_to_the_bit_and_into_a_head_on_the_gpu(tmp_path: Path) -> None:
    data = batches(4)
    whole = trained(llama(), ds_config(STREAM), data)
    with engine_for(llama(), ds_config(STREAM)) as engine:
        train(engine, data[:2])
        engine.save_checkpoint(str(tmp_path))
    for slide, exact in ((STREAM, True), ({}, False)):
        model = llama(seed=5)
        with engine_for(model, ds_config({"gpu_states": 0, **slide})) as engine:
            engine.load_checkpoint(str(tmp_path))
            result = train(engine, data[2:])
            assert result.losses[0] == pytest.approx(whole.losses[2], rel=0 if exact else 1e-5)
            if exact:
                result.losses = whole.losses
                result.states = states_of(model)
                assert differences(result, whole) == []


@pytest.mark.parametrize("clip", [1.0, 0.0])
def test_a_backward_that_fails_half_way_through_the_rows(clip: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Held gradients: the next step is as if it had not been. Not held: updates have begun, and the run says so."""
    data = batches(3)
    expected = trained(llama(), ds_config(STREAM, clip=clip), data)
    model = llama()
    with engine_for(model, ds_config(STREAM, clip=clip)) as engine:
        first = train(engine, data[:1])
        stream = type(engine.optimizer.runtime.rows).rows_and_gradients
        with monkeypatch.context() as patch:
            patch.setattr(rows.StreamedRows, "rows_and_gradients", lambda self: fails_at(stream(self), 3))
            loss = engine(**data[1]).loss
            with pytest.raises(RuntimeError, match="fourth chunk"):
                engine.backward(loss)
        if not clip:
            with pytest.raises(SlideError, match="some blocks had been updated and others had not"):
                engine(**data[1])
            return
        engine.zero_grad()
        engine.optimizer.zero_grad()
        rest = train(engine, data[1:])
        result = Result(first.losses + rest.losses, [], states_of(model))
    assert differences(result, expected) == []


def fails_at(chunks: Any, number: int) -> Any:
    for index, chunk in enumerate(chunks):
        if index == number:
            raise RuntimeError("fourth chunk")
        yield chunk


def test_the_gpu_holds_four_chunks_instead_of_the_head() -> None:
    reports = []
    for slide in (STREAM, {}):
        with engine_for(llama(), ds_config({"gpu_states": 0, **slide})) as engine:
            train(engine, batches(1))
            reports.append(engine.optimizer.runtime.parts.memory_report["gpu_bytes"])
    assert reports[1] - reports[0] == 2 * (256 - 4 * CHUNK_ROWS) * 64


def test_the_head_is_given_back() -> None:
    model = llama()
    with engine_for(model, ds_config(STREAM)):
        assert type(model.lm_head) is StreamedLinear
    assert type(model.lm_head) is nn.Linear and not any("slide" in name for name in model.lm_head.__dict__)


def with_bias(model: nn.Module) -> None:
    model.lm_head.bias = nn.Parameter(torch.zeros(256))


def with_parameter(model: nn.Module) -> None:
    weight = model.lm_head.weight
    del model.lm_head.weight
    model.lm_head.scale, model.lm_head.weight = nn.Parameter(torch.ones(3)), weight


def with_gradient_hook(model: nn.Module) -> None:
    model.lm_head.weight.register_hook(lambda gradient: gradient)


def with_hook(model: nn.Module) -> None:
    model.lm_head.register_forward_hook(lambda *_: None)


def with_own_class(model: nn.Module) -> None:
    model.lm_head.__class__ = type("Head", (nn.Linear,), {})


REFUSED: dict[str, tuple[Callable[[nn.Module], Any] | None, dict[str, Any], str]] = {
    "tied": (None, {"tie_word_embeddings": True}, "lm_head shares its weight with model.embed_tokens.weight"),
    "bias": (with_bias, {}, "lm_head has a bias"),
    "parameter": (with_parameter, {}, "lm_head has a parameter scale"),
    "hook": (with_hook, {}, "lm_head has hooks"),
    "class": (with_own_class, {}, r"lm_head is a \S+\.Head and not torch's nn\.Linear"),
}


@pytest.mark.parametrize(("change", "options", "message"), REFUSED.values(), ids=REFUSED)
def test_a_head_that_cannot_be_streamed_is_refused(
    change: Callable[[nn.Module], Any] | None, options: dict[str, Any], message: str
) -> None:
    model = llama(**options)
    if change is not None:
        change(model)
    with pytest.raises(SlideConfigError, match=rf"ds_slide\.stream_head is true, but the head {message}"):
        with engine_for(model, ds_config(STREAM)):
            pass


def test_hooks_for_the_gradient_of_the_weight_are_refused() -> None:
    model = llama()
    with_gradient_hook(model)
    with pytest.raises(SlideConfigError, match="the weight of the head lm_head has hooks for its gradient"):
        with engine_for(model, ds_config(STREAM)):
            pass


class Sequence(nn.Module):
    """A model that is one list, its head included."""

    def __init__(self) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(4)]
        self.layers = nn.Sequential(nn.Embedding(256, 64), *blocks, nn.Linear(64, 256, bias=False))

    def get_output_embeddings(self) -> nn.Module:
        return self.layers[-1]


def test_a_head_that_is_a_block_is_refused() -> None:
    with pytest.raises(SlideConfigError, match=r"the head layers\.5 belongs to the block layers\.5"):
        with engine_for(Sequence(), ds_config({**STREAM, "blocks": ["layers"]})):
            pass


def test_a_second_backward_is_refused_before_anything_changes_where_gradients_are_not_held() -> None:
    data = batches(2)
    expected = trained(llama(), ds_config(STREAM, clip=0.0), data)
    model = llama()
    with engine_for(model, ds_config(STREAM, clip=0.0)) as engine:
        output = engine(**data[0])
        engine.backward(output.loss, retain_graph=True)
        with pytest.raises(SlideError, match=r"not the only one before its engine\.step"):
            engine.backward(output.loss)
        engine.step()
        rest = train(engine, data[1:])
        result = Result([output.loss.item(), *rest.losses], [], states_of(model))
    assert differences(result, expected) == []


def test_the_gradient_of_other_inputs_alone_leaves_the_weights_gradient_as_it_is() -> None:
    results = []
    for probe in (True, False):
        model = llama()
        with engine_for(model, ds_config(STREAM, clip=1.0)) as engine:
            batch = batches(1)[0]
            loss = engine(**batch).loss
            if probe:
                embeddings = torch.randn(2, 32, 64, dtype=torch.bfloat16, requires_grad=True)
                other = engine(inputs_embeds=embeddings, labels=batch["labels"]).loss
                assert torch.autograd.grad(other, embeddings)[0].abs().sum() > 0
            engine.backward(loss)
            gradient = safe_get_full_grad(model.lm_head.weight).clone()
            engine.step()
            results.append(gradient)
    assert torch.equal(*results)


def test_a_head_that_is_frozen_later_gets_no_gradient() -> None:
    with engine_for(llama(), ds_config(STREAM)) as engine:
        weight = engine.module.lm_head.weight
        weight.requires_grad_(False)
        engine.backward(engine(**batches(1)[0]).loss)
        assert not safe_get_full_grad(weight).any()
        weight.requires_grad_(True)
        engine.step()


def test_a_pass_that_is_left_open_does_not_hold_up_the_end_and_none_begins_after_it() -> None:
    with engine_for(llama(), ds_config(STREAM)) as engine:
        train(engine, batches(1))
        runtime = engine.optimizer.runtime
        left_open = runtime.rows.rows_and_gradients()
        next(left_open)
        start = time.perf_counter()
    assert time.perf_counter() - start < 20  # a lane that is still busy is waited for 30 s
    with pytest.raises(SlideError, match="its engine was destroyed"):
        next(runtime.rows.rows())


def test_a_model_without_a_head_is_refused() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    with pytest.raises(SlideConfigError, match="Sequential names no head"):
        with engine_for(model, ds_config(STREAM)):
            pass


def test_autocast_to_another_type_is_refused() -> None:
    with engine_for(llama(), ds_config(STREAM, bf16=None)) as engine:
        with torch.autocast("cpu", torch.bfloat16), pytest.raises(SlideError, match="leave autocast out"):
            engine(**batches(1)[0])


def test_chunks_are_as_large_as_the_limit_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    for (height, width), expected in {(151936, 2048): 8192, (152064, 3584): 4608, (1000, 64): 1000}.items():
        assert rows.chunk_rows(height, width) == expected
    for height, width in itertools.product((1, 100, 10**6), (1, 7, 2**20, 2**26)):
        chunk = rows.chunk_rows(height, width)
        assert 1 <= chunk <= height and (chunk == 1 or chunk * width <= rows.CHUNK_NUMEL)
