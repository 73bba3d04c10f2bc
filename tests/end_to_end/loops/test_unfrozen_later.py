"""A parameter that is frozen at first and requires a gradient later trains from then on, as in plain torch."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from harness import batches, ds_config, engine_for, llama, on_ssd, train
from loops import Net, Run, assert_right, inputs, made, outcome, run_loop
from moving import movable, promote
from torch import nn

from ds_slide.errors import SlideError

pytestmark = pytest.mark.usefixtures("one_rank")

STEPS = 8


def _train(engine: Any, batches: Iterable[torch.Tensor]) -> None:
    for x in batches:
        engine.backward(engine(x))
        engine.step()


def first_block(run: Run) -> None:
    model = made(Net)
    model.blocks[0].requires_grad_(False)
    engine = run.start(model)
    batches = inputs(STEPS)
    _train(engine, batches[:2])
    model.blocks[0].requires_grad_(True)
    _train(engine, batches[2:])


def from_the_head_down(run: Run) -> None:
    """Gradual unfreezing: only the head trains at first, then one more layer every other step."""
    model = made(Net)
    model.requires_grad_(False)
    model.head.requires_grad_(True)
    engine = run.start(model)
    later = [*reversed(model.blocks), model.inp]
    for number, x in enumerate(inputs(12)):
        if number % 2:
            later[min(number // 2, len(later) - 1)].requires_grad_(True)
        _train(engine, [x])


def given_to_the_optimizer(run: Run) -> None:
    """The optimizer has all parameters, of which some are frozen."""
    model = made(Net)
    model.blocks[1:3].requires_grad_(False)
    engine = run.start(model, arguments={"model_parameters": list(model.parameters())})
    batches = inputs(STEPS)
    _train(engine, batches[:3])
    model.blocks[1:3].requires_grad_(True)
    _train(engine, batches[3:])


def biases_first(run: Run) -> None:
    """What is frozen of a block changes its order: first a matrix in the middle is trained, then all."""
    model = made(Net)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith("bias"))
    engine = run.start(model)
    batches = inputs(STEPS)
    _train(engine, batches[:2])
    for block in model.blocks:
        block.up.weight.requires_grad_(True)
    _train(engine, batches[2:5])
    model.requires_grad_(True)
    _train(engine, batches[5:])


def between_two_micro_batches(run: Run) -> None:
    model = made(Net)
    model.blocks[2].requires_grad_(False)
    model.inp.requires_grad_(False)
    engine = run.start(model, accumulation=2)
    batches = inputs(STEPS)
    _train(engine, batches[:3])
    model.requires_grad_(True)
    _train(engine, batches[3:])


def frozen_again(run: Run) -> None:
    model = made(Net)
    model.blocks[3].requires_grad_(False)
    model.head.requires_grad_(False)
    engine = run.start(model)
    for number, x in enumerate(inputs(12)):
        model.blocks[3].requires_grad_(3 <= number < 6 or number >= 9)
        model.head.requires_grad_(number % 3 == 2)
        _train(engine, [x])


# Loop, and how it ends on stock, where what is unfrozen never trains, and has no master that could be read.
LOOPS = [
    (first_block, "error"),
    (from_the_head_down, "error"),
    (given_to_the_optimizer, "error"),
    (biases_first, "error"),
    (between_two_micro_batches, "error"),
    (frozen_again, "error"),
]
KEYS: dict[str, dict[str, Any]] = {
    "window 2": {"window": 2},
    "all in the window": {},
    "on the GPU": {"window": 2, "gpu_states": "1GiB"},
    "some on the GPU": {"window": 2, "gpu_states": 300_000},
    "two passes": {"window": 2, "update_passes": 2},
    "ahead into spare buffers": {"window": 2, "speculate": True, "debug": {"out_of_place": True}},
    "ahead with a log": {"window": 2, "speculate": True, "debug": {"out_of_place": False}},
}


@pytest.mark.by_turns(2)
@pytest.mark.parametrize("clip", [1.0, 0.0])
@pytest.mark.parametrize("loop", [loop for loop, _ in LOOPS])
def test_the_numbers_are_plain_torchs(loop, clip):
    assert_right(run_loop(loop, "slide", clip=clip), run_loop(loop, "plain", clip=clip))


@pytest.mark.thinned(3)
@pytest.mark.parametrize("loop, expected", LOOPS)
def test_stock_is_as_the_table_says(loop, expected):
    assert outcome(loop, "stock") == expected


def _bits(model: nn.Module, state_names: Iterable[str]) -> dict[str, torch.Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        found[name] = safe_get_full_fp32_param(parameter).clone()
        found |= {f"{name} {key}": safe_get_full_optimizer_state(parameter, key).clone() for key in state_names}
    return found


def _biases_and_head(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith("bias") or name.startswith(("head", "blocks.1")))


def _and_norms(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if "norm" in name or "down" in name:
            parameter.requires_grad_(True)


def _whole_layers(model: nn.Module) -> None:
    for frozen in (model.blocks[0], model.blocks[2], model.head):
        frozen.requires_grad_(False)


def _first_block(model: nn.Module) -> None:
    model.blocks[0].requires_grad_(True)


def _in_two_stages(
    engine: Any, batches: list[torch.Tensor], second: Callable[[nn.Module], None]
) -> dict[str, torch.Tensor]:
    _train(engine, batches[:3])
    second(engine.module)
    _train(engine, batches[3:6])
    engine.module.requires_grad_(True)
    _train(engine, batches[6:])
    return _bits(engine.module, engine.optimizer.rule.state_names)


@pytest.mark.thinned(2)
@pytest.mark.parametrize(
    "keys",
    [*KEYS.values(), {"window": 2, "state_dtype": "bf16"}, {"window": 2, "state_dtype": "8bit"}],
    ids=[*KEYS, "bf16 states", "8-bit states"],
)
@pytest.mark.parametrize(("dtype", "clip"), [("bf16", 1.0), ("bf16", 0.0), ("fp16", 1.0)])
def test_the_bits_are_those_of_an_engine_that_had_states_from_the_start(dtype, keys, clip, monkeypatch):
    monkeypatch.setattr(get_accelerator(), "is_fp16_supported", lambda: True)  # slow on a CPU, but it works
    # Random bits that round short states are those of a place in the unit, which stays the same for whole layers.
    freeze, second = (_biases_and_head, _and_norms) if "state_dtype" not in keys else (_whole_layers, _first_block)
    precision = {"bf16": None, "fp16": {"enabled": True, "loss_scale": 128.0}} if dtype == "fp16" else {}
    config = ds_config(keys, clip=clip, **precision)
    batches = [x.to(torch.float16 if dtype == "fp16" else torch.bfloat16) for x in inputs(8)]
    found = []
    for freeze_first in (False, True):
        model = made(Net)
        if freeze_first:
            freeze(model)
        with engine_for(model, config, model_parameters=list(model.parameters())) as engine:
            freeze(model)
            found.append(_in_two_stages(engine, batches, second))
    expected, later = found
    assert not [name for name in expected if not torch.equal(later[name], expected[name])]


@pytest.mark.parametrize("clip", [1.0, 0.0])
def test_a_checkpoint_loads_where_all_of_it_is_trained_from_the_start(clip, tmp_path):
    config = ds_config({"window": 2}, clip=clip)
    batches = [x.bfloat16() for x in inputs(8)]
    model = made(Net)
    _biases_and_head(model)
    with engine_for(model, config) as engine:
        _train(engine, batches[:3])
        model.requires_grad_(True)
        _train(engine, batches[3:5])
        engine.save_checkpoint(tmp_path, tag="five")
        _train(engine, batches[5:])
        expected = _bits(model, engine.optimizer.rule.state_names)
    model = made(Net, seed=1)
    with engine_for(model, config) as engine:
        engine.load_checkpoint(tmp_path, tag="five")
        _train(engine, batches[5:])
        found = _bits(model, engine.optimizer.rule.state_names)
    assert not [name for name in expected if not torch.equal(found[name], expected[name])]


def test_a_unit_that_is_on_the_gpu_for_now_goes_back_first():
    expected, found = [], []
    for results, promotes in ((expected, False), (found, True)):
        model = made(Net)
        _biases_and_head(model)
        with engine_for(model, ds_config({"window": 2})) as engine:
            runtime, batches = engine.optimizer.runtime, [x.bfloat16() for x in inputs(10)]
            _train(engine, batches[:2])
            if promotes:
                assert len(promote(runtime, *movable(runtime)).promoted) > 3
            results.append(_in_two_stages(engine, batches[2:], _and_norms))
            assert [unit.name for unit in runtime.units if unit.home] == (["blocks.1"] if promotes else [])
    assert not [name for name in expected[0] if not torch.equal(found[0][name], expected[0][name])]


def test_a_streamed_head_is_frozen_like_the_rest_and_not_unfrozen():
    config, data = ds_config({"window": 2, "stream_head": True}), batches(3)
    with engine_for(llama(), config) as engine:
        head = engine.module.lm_head.weight
        train(engine, data[:1])
        head.requires_grad_(False)
        before = safe_get_full_fp32_param(head).clone()
        train(engine, data[1:])
        assert torch.equal(safe_get_full_fp32_param(head), before)
    model = llama()
    model.lm_head.requires_grad_(False)
    with engine_for(model, config) as engine:
        train(engine, data[:1])
        model.lm_head.requires_grad_(True)
        with pytest.raises(SlideError, match=r"lm_head\.weight requires a gradient.* \(ds_slide\.stream_head\)"):
            train(engine, data[1:])


def test_each_group_has_its_own_decay():
    """The optimizer's groups have frozen members, which train later with the numbers of theirs."""
    expected, found = [], []
    for results, start in ((expected, True), (found, False)):
        model = made(Net)
        frozen = [*model.blocks[0].parameters(), *model.inp.parameters()]
        matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
        others = [parameter for parameter in model.parameters() if parameter.ndim != 2]
        optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": 0.5}, {"params": others, "weight_decay": 0.0, "lr": 1e-2}], lr=1e-3
        )
        for parameter in () if start else frozen:
            parameter.requires_grad_(False)
        config = ds_config({"window": 2}, optimizer=None, zero_force_ds_cpu_optimizer=False)
        with engine_for(model, config, optimizer=optimizer) as engine:
            for on in (False, True):
                for parameter in frozen:
                    parameter.requires_grad_(on)
                _train(engine, [x.bfloat16() for x in inputs(3, seed=2 + on)])
            results.append(_bits(model, engine.optimizer.rule.state_names))
    assert not [name for name in expected[0] if not torch.equal(found[0][name], expected[0][name])]


def _refusal(config: dict[str, Any], frozen: Callable[[nn.Module], nn.Module], **arguments: Any) -> str:
    """What the forward says that finds `frozen` of a model trainable."""
    model = made(Net)
    frozen(model).requires_grad_(False)
    with engine_for(model, config, **{name: make(model) for name, make in arguments.items()}) as engine:
        x = inputs(1)[0].bfloat16()
        _train(engine, [x])
        frozen(model).requires_grad_(True)
        with pytest.raises(SlideError) as refused:
            engine(x)
        frozen(model).requires_grad_(False)
        _train(engine, [x])  # the refusal has changed nothing
    return str(refused.value)


def test_states_that_do_not_fit_are_refused_with_their_bytes():
    """Of 34,984 parameters at 12 bytes, but for 8,416 that are frozen and have 2."""
    gc.collect()  # engines that earlier tests have dropped count against the limit until they are collected
    said = _refusal(ds_config({"window": 2, "host_memory": 350_000}), lambda model: model.blocks[0])
    assert "blocks.0.norm.weight" in said and "ds_slide.host_memory is 350,000 bytes" in said


def test_states_on_ssd_are_refused(tmp_path):
    config = on_ssd(ds_config({"window": 2, "host_memory": 0}), tmp_path)
    said = _refusal(config, lambda model: model.blocks[0])
    assert "blocks.0.norm.weight requires a gradient" in said and "is on SSD; let it require a gradient when" in said


def test_a_parameter_without_a_group_is_refused_where_there_are_several():
    def two_groups(model: nn.Module) -> Any:
        return torch.optim.AdamW([{"params": model.inp.parameters()}, {"params": model.blocks[1:].parameters()}])

    config = ds_config({"window": 2}, optimizer=None, zero_force_ds_cpu_optimizer=False)
    said = _refusal(config, lambda model: model.blocks[0], optimizer=two_groups)
    assert "blocks.0.norm.weight" in said and "none of the optimizer's 2 parameter groups" in said


def test_what_the_script_has_kept_from_the_optimizer_is_left_alone():
    """It requires a gradient from the start, and plain torch does not update it either."""
    model = made(Net)
    head = model.head.weight.detach().clone()
    parameters = [*model.inp.parameters(), *model.blocks.parameters()]
    with engine_for(model, ds_config({"window": 2}, bf16=None), model_parameters=parameters) as engine:
        _train(engine, inputs(2))
        with deepspeed.zero.GatheredParameters([model.head.weight]):
            assert torch.equal(model.head.weight, head)


class WithEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.body = nn.Embedding(16, 32), Net()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.body(self.embedding(tokens).mean(1))


class Adapted(nn.Module):
    """A linear layer with a low-rank adapter beside it."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base, self.a, self.b = base, nn.Linear(32, 4, bias=False), nn.Linear(4, 32, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.b(self.a(x))


def _resize(model: Any) -> None:
    model.embedding = nn.Embedding(20, 32)


def _replace_head(model: Any) -> None:
    model.body.head = nn.Linear(32, 4)


def _append_layer(model: Any) -> None:
    model.body.blocks.append(type(model.body.blocks[0])(32))


def _adapt(model: Any) -> None:
    model.body.inp = Adapted(model.body.inp)


CHANGES = {
    _resize: "embedding.weight [20, 32]",
    _replace_head: "body.head.weight [4, 32]",
    _append_layer: "body.blocks.4.norm.weight [32]",
    _adapt: "body.inp.a.weight [4, 32]",
}


@pytest.mark.parametrize("clip", [1.0, 0.0])
@pytest.mark.parametrize("change", CHANGES)
def test_a_parameter_that_belongs_to_no_unit_is_named_at_the_first_forward(change, clip):
    tokens = torch.randint(16, (4, 3), generator=torch.Generator().manual_seed(0))
    model = made(WithEmbedding)
    config = ds_config({"window": 2}, clip=clip, bf16=None)
    with engine_for(model, config) as engine:
        _train(engine, [tokens])
        change(model)
        with torch.no_grad():
            engine(tokens)
        with pytest.raises(SlideError) as refused:
            engine(tokens)
        assert f"parameter {CHANGES[change]} requires a gradient, but was put into the model" in str(refused.value)
        for parameter in model.parameters():
            if not hasattr(parameter, "ds_id"):
                parameter.requires_grad_(False)
        _train(engine, [tokens])  # what is frozen lies where the script has put it


def test_a_gradient_that_no_forward_of_the_model_has_seen_is_named_at_the_step():
    model = made(Net)
    model.head.requires_grad_(False)
    x = inputs(1)[0].bfloat16()
    with engine_for(model, ds_config({"window": 2})) as engine:
        loss = engine(x)
        model.head.requires_grad_(True)
        model.head.weight.grad = torch.ones(8, 32).bfloat16()
        engine.backward(loss)
        with pytest.raises(SlideError, match=r"parameter head\.weight has a gradient"):
            engine.step()
