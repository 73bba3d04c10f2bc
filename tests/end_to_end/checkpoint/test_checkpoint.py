"""Checkpoints in DeepSpeed's format: exact resume, exchange with stock ZeRO-3, and the tools that read them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
from checkpoint_runs import (
    CASES,
    HALF,
    WHOLE,
    Run,
    continued,
    saved_and_continued,
)
from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from harness import (
    batches,
    differences,
    exchanged,
    half_up,
    same_bits,
    states_of,
    train,
    unequal,
    with_every_low_half,
)

from ds_slide.errors import SlideError

pytestmark = pytest.mark.usefixtures("one_rank")

cases = pytest.mark.parametrize("name", CASES)
QUICK_AS_UNIVERSAL = ("frozen", "states_on_the_gpu", "two_groups_in_sub_groups")
"""Of them a universal checkpoint is resumed in each run of the tests (test_universal.py)."""


@pytest.fixture(scope="module")
def runs(one_rank, tmp_path_factory) -> Callable[[str], Run]:  # noqa: ARG001
    """Runs of DS-Slide by the name of their case, each made once."""
    return cache(lambda name: saved_and_continued(CASES[name], tmp_path_factory.mktemp(name)))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in QUICK_AS_UNIVERSAL else ()) for name in CASES]
)
def test_a_resumed_run_continues_to_the_bit(name, runs):
    case, run = CASES[name], runs(name)
    with case.engine(7) as engine:
        train(engine, batches(case.accumulation))  # so that there is something to forget
        engine.load_checkpoint(run.folder)
        assert engine.global_steps == HALF // case.accumulation
        resumed = continued(engine, 1)
    assert differences(resumed, run.rest) == []
    assert resumed.norms == run.rest.norms


@cases
def test_saving_does_not_disturb_the_run(name, runs):
    with CASES[name].engine(0) as engine:
        train(engine, batches(WHOLE)[:HALF])
        assert differences(continued(engine, 1), runs(name).rest) == []


def test_a_checkpoint_before_the_first_step_resumes(tmp_path):
    case = CASES["clipping"]
    with case.engine(0) as engine:
        engine.save_checkpoint(tmp_path)
        uninterrupted = continued(engine, 0)
    with case.engine(7) as engine:
        engine.load_checkpoint(tmp_path)
        assert differences(continued(engine, 0), uninterrupted) == []


def test_client_state_and_scheduler_come_back(runs):
    run = runs("accumulation_and_schedule")
    with CASES["accumulation_and_schedule"].engine(7) as engine:
        path, client_state = engine.load_checkpoint(run.folder)
        assert path is not None and client_state["note"] == "kept"
        assert engine.global_samples == HALF * 2
        assert engine.lr_scheduler.last_batch_iteration == HALF // 2 - 1
        assert engine.optimizer.param_groups[0]["lr"] == engine.get_lr()[0] > 0


@cases
def test_zero_to_fp32_gives_the_masters(name, runs):
    run = runs(name)
    exported = get_fp32_state_dict_from_zero_checkpoint(str(run.folder))
    if name == "tied":
        assert same_bits(exported.pop("lm_head.weight"), exported["model.embed_tokens.weight"])
    assert exported.keys() == run.half.states.keys()
    for parameter, tensors in run.half.states.items():
        expected = tensors.get("master", tensors["weight"])  # frozen parameters have no master
        assert same_bits(exported[parameter].contiguous(), expected), parameter


@cases
def test_the_16_bit_model_is_what_the_gpu_reads(name, runs):
    run = runs(name)
    exported = torch.load(run.folder / "model.bin")
    if name == "tied":
        assert same_bits(exported.pop("lm_head.weight"), exported["model.embed_tokens.weight"])
    assert exported.keys() == run.half.states.keys()
    for parameter, tensors in run.half.states.items():
        assert same_bits(exported[parameter], tensors["weight"]), parameter


@pytest.mark.parametrize("module_only", [False, True])
def test_weights_without_optimizer_states(module_only, runs):
    """As in stock: the weights are the masters, rounded to the model's dtype; moments and step count start anew."""
    case, run = CASES["clipping"], runs("clipping")
    first = {}
    for slide in (True, False):
        with case.engine(7, slide=slide) as engine:
            engine.load_checkpoint(run.folder, load_optimizer_states=False, load_module_only=module_only)
            assert engine.global_steps == (0 if module_only else HALF)
            loaded = states_of(engine.module) if slide else {}  # stock has no moments yet
            first[slide] = train(engine, batches(3)).losses
        for name, tensors in loaded.items():
            assert same_bits(tensors["weight"], run.half.states[name]["weight"]), name
            assert same_bits(tensors["master"], run.half.states[name]["weight"].float()), name
            assert not tensors["exp_avg"].any() and not tensors["exp_avg_sq"].any(), name
    assert first[True] == pytest.approx(first[False], rel=2e-3)


@pytest.mark.by_turns(2)
@pytest.mark.parametrize("to_stock", [True, False], ids=["slide_to_stock", "stock_to_slide"])
@pytest.mark.parametrize("name", ["clipping", "accumulation_and_schedule", "frozen", "two_groups_in_sub_groups"])
def test_exchange_with_stock(name, to_stock, runs, tmp_path):
    case = CASES[name]
    run = runs(name) if to_stock else saved_and_continued(case, tmp_path, slide=False)
    with case.engine(7, slide=not to_stock) as engine:
        engine.load_checkpoint(run.folder)
        loaded = states_of(engine.module)
        rest = train(engine, batches(WHOLE)[HALF:])
    assert unequal(loaded, exchanged(run.half.states, to_stock=to_stock)) == []
    # Two bf16 engines whose masters agree to an fp32 rounding: now and then one bf16 weight is rounded the other way.
    assert rest.losses == pytest.approx(run.rest.losses, rel=2e-3)
    assert rest.norms == pytest.approx(run.rest.norms, rel=2e-2)


@pytest.mark.parametrize("to_stock", [True, False], ids=["slide_to_stock", "stock_to_slide"])
def test_masters_of_every_low_half_are_exchanged_with_stock(to_stock, tmp_path):
    case, given, count = CASES["clipping"], {}, 0
    with case.engine(0, slide=to_stock) as engine:
        train(engine, batches(1))
        for name, parameter in engine.module.named_parameters():
            given[name] = with_every_low_half(safe_get_full_fp32_param(parameter), count)
            count += given[name].numel()
            safe_set_full_fp32_param(parameter, given[name])
        engine.save_checkpoint(tmp_path)
    assert count > 2 * 0xFFFF
    exported = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path))
    assert all(same_bits(exported[name].contiguous(), master) for name, master in given.items())
    # Into either, whoever has saved it: the same masters, and weights that are nearest to them.
    for slide in (True, False):
        with case.engine(7, slide=slide) as engine:
            engine.load_checkpoint(tmp_path)
            loaded = states_of(engine.module)
        for name, master in given.items():
            assert same_bits(loaded[name]["master"], master), name
            assert same_bits(loaded[name]["weight"], half_up(master) if slide else master.bfloat16()), name


def test_weights_of_masters_in_ties_are_those_that_were_saved(tmp_path):
    """Without optimizer states the masters are rounded as by the engine that saved them."""
    case = CASES["clipping"]
    with case.engine(0) as engine:
        for parameter in engine.module.parameters():
            safe_set_full_fp32_param(parameter, with_every_low_half(safe_get_full_fp32_param(parameter)))
        engine.save_checkpoint(tmp_path)
        saved = states_of(engine.module)
    with case.engine(7) as engine:
        engine.load_checkpoint(tmp_path, load_optimizer_states=False)
        for name, tensors in states_of(engine.module).items():
            assert same_bits(tensors["weight"], saved[name]["weight"]), name
            assert same_bits(tensors["master"], saved[name]["weight"].float()), name


def test_saving_within_an_accumulation_window(runs, tmp_path):
    """As in stock: the run goes on undisturbed, and a resumed one starts the window again."""
    case, rest = CASES["accumulation_and_schedule"], runs("accumulation_and_schedule").rest
    with case.engine(0) as engine:
        losses = train(engine, batches(WHOLE)[: HALF + 1]).losses[HALF:]
        engine.save_checkpoint(tmp_path)
        result = train(engine, batches(WHOLE)[HALF + 1 :])
        result.states, result.losses = states_of(engine.module), losses + result.losses
    assert differences(result, rest) == []
    with case.engine(7) as engine:
        engine.load_checkpoint(tmp_path)
        assert differences(continued(engine, 1), rest) == []


def test_saving_between_backward_and_step(tmp_path):
    batch = batches(1)[0]
    with CASES["clipping"].engine(0) as engine:
        before = states_of(engine.module)
        engine.backward(engine(**batch).loss)
        engine.save_checkpoint(tmp_path)
    exported = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path))
    assert all(same_bits(exported[name].contiguous(), tensors["master"]) for name, tensors in before.items())
    with CASES["no_clipping"].engine(0) as engine:
        engine.backward(engine(**batch).loss)
        # The updates are under way: masters of this step beside the step count of the last.
        with pytest.raises(SlideError, match=r"a checkpoint between .*engine\.step\(\) first.*defer_updates"):
            engine.save_checkpoint(tmp_path)
        with pytest.raises(SlideError, match=r"a checkpoint between .*engine\.step\(\) first.*defer_updates"):
            engine.load_checkpoint(tmp_path)
        engine.step()
        engine.save_checkpoint(tmp_path)


def test_another_sub_group_size_is_refused(runs):
    run = runs("clipping")
    with CASES["two_groups_in_sub_groups"].engine(7) as engine, pytest.raises(SlideError, match="sub_group_size"):
        engine.load_checkpoint(run.folder)


def test_loading_renews_what_is_on_the_gpu(tmp_path):
    """An evaluation after loading sees the loaded weights, in the window as well as in the outer modules."""
    case = CASES["clipping"]
    batch = batches(1)[0]
    with case.engine(0) as engine:
        train(engine, batches(HALF))
        engine.save_checkpoint(tmp_path)
        with torch.no_grad():
            expected = engine(**batch).loss.item()
        train(engine, batches(HALF))
        assert engine(**batch).loss.item() != expected
        engine.load_checkpoint(tmp_path)
        with torch.no_grad():
            assert engine(**batch).loss.item() == expected
        master = safe_get_full_fp32_param(engine.module.model.norm.weight)
        exported = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path))
        assert same_bits(master, exported["model.norm.weight"])
