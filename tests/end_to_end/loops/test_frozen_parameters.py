"""A parameter whose `requires_grad` is off at a step keeps its bits, and trains on as in plain torch when it is on."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from harness import ds_config, engine_for, on_ssd
from loops import Net, Run, assert_right, inputs, made, outcome, run_loop

pytestmark = pytest.mark.usefixtures("one_rank")

STEPS = 12


def _train(engine: Any, batches: Iterable[torch.Tensor]) -> None:
    for x in batches:
        engine.backward(engine(x))
        engine.step()


def lisa(run: Run) -> None:
    """Two random layers of four, others every three steps."""
    model, engine_random = made(Net), random.Random(3)
    engine = run.start(model)
    for number, x in enumerate(inputs(STEPS)):
        if number % 3 == 0:
            chosen = engine_random.sample(range(4), 2)
            for index, block in enumerate(model.blocks):
                block.requires_grad_(index in chosen)
        _train(engine, [x])


def badam(run: Run) -> None:
    """One block at a time."""
    model = made(Net)
    engine = run.start(model)
    for number, x in enumerate(inputs(STEPS)):
        for index, block in enumerate(model.blocks):
            block.requires_grad_(index == number // 2 % 4)
        _train(engine, [x])


def half_of_each_block(run: Run) -> None:
    """What has momentum is frozen, trained again, and frozen for good."""
    model = made(Net)
    engine = run.start(model)
    for number, x in enumerate(inputs(STEPS)):
        for block in model.blocks:
            block.up.requires_grad_(number < 3 or 6 <= number < 9)
        _train(engine, [x])


def biases_only(run: Run) -> None:
    model = made(Net)
    engine = run.start(model)
    for number, x in enumerate(inputs(STEPS)):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(number < 3 or name.endswith("bias"))
        _train(engine, [x])


def outer_modules_on_and_off(run: Run) -> None:
    """The input layer is frozen after two steps, and trained again after eight; the head is frozen in between."""
    model = made(Net)
    engine = run.start(model)
    for number, x in enumerate(inputs(STEPS)):
        model.inp.requires_grad_(number < 2 or number >= 8)
        model.head.requires_grad_(number < 4 or number >= 6)
        _train(engine, [x])


def all_but_the_head(run: Run) -> float:
    """The blocks get no gradient at all, after steps with momentum. -> the norm, which is the head's alone."""
    model = made(Net)
    engine = run.start(model)
    for number, x in enumerate(inputs(STEPS)):
        model.blocks.requires_grad_(number < 4)
        model.inp.requires_grad_(number < 4)
        _train(engine, [x])
    return float(engine.get_global_grad_norm())


def with_accumulation(run: Run) -> None:
    model = made(Net)
    engine = run.start(model, accumulation=2)
    for number, x in enumerate(inputs(STEPS)):
        if number % 2 == 0:
            for index, block in enumerate(model.blocks):
                block.requires_grad_((index + number // 2) % 2 == 0)
                block.norm.requires_grad_(number % 3 != 0)
        _train(engine, [x])


# Loop, and how it ends on stock: it moves frozen layers by momentum and decay.
LOOPS = [
    (lisa, "wrong"),
    (badam, "wrong"),
    (half_of_each_block, "wrong"),
    (biases_only, "wrong"),
    (outer_modules_on_and_off, "wrong"),
    (all_but_the_head, "wrong"),
    (with_accumulation, "wrong"),
]
KEYS = {
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


@pytest.mark.by_turns(2)
@pytest.mark.parametrize("clip", [1.0, 0.0])
@pytest.mark.parametrize("keys", [keys for keys in KEYS if keys != "window 2"])
@pytest.mark.parametrize("loop", [half_of_each_block, lisa])
def test_wherever_and_whenever_updates_run(loop, keys, clip):
    assert_right(run_loop(loop, "slide", clip=clip, slide=KEYS[keys]), run_loop(loop, "plain", clip=clip))


@pytest.mark.thinned(3)
@pytest.mark.parametrize("loop, expected", LOOPS)
def test_stock_is_as_the_table_says(loop, expected):
    assert outcome(loop, "stock") == expected


ON = ("0.up.weight", "2.norm.weight", "3.norm.weight")
"""Of the blocks, those that go on training: a part of the first, of the third and of the last."""
OPTIMIZERS = {
    "AdamW": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
    "Lion": {"type": "Lion", "params": {"lr": 1e-2, "weight_decay": 0.1}},
    "SGD": {"type": "SGD", "params": {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.1}},
}
STORES: dict[str, dict[str, Any]] = {
    **{name: keys for name, keys in KEYS.items() if name != "all in the window"},
    "bf16 states": {"window": 2, "state_dtype": "bf16"},
    "8-bit states": {"window": 2, "state_dtype": "8bit"},
    "compressed": {"window": 2, "compression": {"type": "lsp", "d": 16, "r": 2}},
    "compressed and rounded": {
        "window": 2,
        "compression": {"type": "lsp", "d": 16, "r": 2, "master_dtype": "bf16"},
    },
    "on SSD": {"window": 2, "host_memory": 0},
}


def _bits(model: torch.nn.Module, state_names: Iterable[str], compressed: bool) -> dict[str, torch.Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        found[name] = safe_get_full_fp32_param(parameter)
        if not compressed:
            found |= {f"{name} {key}": safe_get_full_optimizer_state(parameter, key) for key in state_names}
    return {name: value.clone() for name, value in found.items()}


@pytest.mark.by_turns(2)
@pytest.mark.parametrize("clip", [1.0, 0.0])
@pytest.mark.parametrize(
    "store, optimizer", [*((store, "AdamW") for store in STORES), ("window 2", "Lion"), ("window 2", "SGD")]
)
def test_what_is_off_keeps_every_bit(store, optimizer, clip, tmp_path):
    config = ds_config(
        STORES[store], clip=clip, optimizer=OPTIMIZERS[optimizer], zero_allow_untested_optimizer=optimizer == "SGD"
    )
    if store == "on SSD":
        config = on_ssd(config, tmp_path)
    batches = [x.bfloat16() for x in inputs(8)]
    model = made(Net)
    with engine_for(model, config) as engine:
        keys = engine.optimizer.rule.state_names
        _train(engine, batches[:3])
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.removeprefix("blocks.") in ON)
        before = _bits(model, keys, store.startswith("compressed"))
        _train(engine, batches[3:6])
        after = _bits(model, keys, store.startswith("compressed"))
        moved = {name for name in before if not torch.equal(before[name], after[name])}
        assert {name.split()[0] for name in moved} == {f"blocks.{name}" for name in ON}
        model.requires_grad_(True)
        _train(engine, batches[6:])
        trained = _bits(model, keys, store.startswith("compressed"))
        assert not [name for name in before if torch.equal(after[name], trained[name])]


def _freeze(model: torch.nn.Module, number: int) -> None:
    model.blocks[1].requires_grad_(number % 3 == 0)
    model.blocks[2].up.requires_grad_(number % 2 == 0)


@pytest.mark.parametrize("clip", [1.0, 0.0])
def test_a_checkpoint_carries_how_often_each_was_updated(clip, tmp_path):
    config = ds_config({"window": 2}, clip=clip)
    batches = [x.bfloat16() for x in inputs(8)]

    def steps(engine: Any, numbers: range) -> None:
        for number in numbers:
            _freeze(engine.module, number)
            _train(engine, [batches[number]])

    with engine_for(made(Net), config) as engine:
        steps(engine, range(4))
        engine.save_checkpoint(tmp_path, tag="four")
        steps(engine, range(4, 8))
        expected = _bits(engine.module, engine.optimizer.rule.state_names, False)
    with engine_for(made(Net, seed=1), config) as engine:
        engine.load_checkpoint(tmp_path, tag="four")
        steps(engine, range(4, 8))
        found = _bits(engine.module, engine.optimizer.rule.state_names, False)
    assert not [name for name in expected if not torch.equal(found[name], expected[name])]
