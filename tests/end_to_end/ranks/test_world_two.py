"""Two ranks over gloo. Both run the worker once; the tests look at what each of them saw."""

from __future__ import annotations

import math

import pytest
import torch
import two_ranks
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from harness import engine_for, exchanged, half_up, same_bits, unequal
from world_two_worker import STEPS, TRAININGS, config_of, tokens_of
from world_two_worker import train as train_tokens

# Clipping is off and gradients are accumulated in others, too; test_frozen_ranks.py freezes parameters.
SLOW = ("no_clipping", "frozen", "accumulation_with_gpu_states")
ALWAYS = ("clipping", "adapters")


def runs(*names):
    return [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in names]


trainings = pytest.mark.parametrize("name", runs(*TRAININGS))


@pytest.fixture(scope="module")
def folder(request, tmp_path_factory):
    names = dict.fromkeys([*ALWAYS, *two_ranks.names_asked_for(request, {})])
    return two_ranks.run("world_two_worker.py", tmp_path_factory.mktemp("ranks"), *names)


def test_the_first_rank_says_what_was_decided(folder):
    starts = [
        [line for line in (folder / f"rank{rank}.log").read_text().splitlines() if "[ds_slide] DS-Slide " in line]
        for rank in range(2)
    ]
    assert starts[0] and all("; ranks: 2; " in line for line in starts[0])
    assert starts[1] == []


@trainings
def test_both_ranks_end_with_the_same_states(name, seen):
    assert unequal(seen[0][name]["states"], seen[1][name]["states"]) == []
    assert seen[0][name]["norm"] == seen[1][name]["norm"] > 0
    for tensors in seen[0][name]["states"].values():
        if (master := tensors.get("master")) is not None:
            in_fp32 = tensors["weight"].dtype == torch.float32
            assert same_bits(master if in_fp32 else half_up(master), tensors["weight"])


@trainings
def test_every_trainable_parameter_has_moved_to_its_last_element(name, seen):
    """The last element is the second rank's, next to its padding."""
    build, _ = TRAININGS[name]
    for parameter_name, parameter in build(0).named_parameters():
        tensors = seen[0][name]["states"][parameter_name]
        before = parameter.detach().to(tensors["weight"].dtype)
        if parameter.requires_grad:
            assert tensors["exp_avg"].view(-1)[-1] != 0, parameter_name
            assert not same_bits(tensors["master"], before.float()), parameter_name
        else:
            assert same_bits(tensors["weight"], before), parameter_name


@trainings
def test_a_resumed_run_continues_to_the_bit(name, seen):
    for rank in range(2):
        run = seen[rank][name]
        assert run["resumed_losses"] == run["losses"][STEPS // 2 :]
        assert unequal(run["resumed_states"], run["states"]) == []


@trainings
def test_zero_to_fp32_joins_the_partitions(name, seen, folder):
    exported = get_fp32_state_dict_from_zero_checkpoint(str(folder / name))
    for parameter, tensors in seen[0][name]["half"].items():
        assert same_bits(exported[parameter].contiguous(), tensors.get("master", tensors["weight"])), parameter


@trainings
def test_the_16_bit_model_is_gathered_on_the_first_rank(name, seen):
    assert not seen[1][name]["sixteen_bit"]
    for parameter, tensors in seen[0][name]["states"].items():
        assert same_bits(seen[0][name]["sixteen_bit"][parameter], tensors["weight"]), parameter


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("name", runs("clipping", "no_clipping", "tied"))
def test_losses_are_those_of_one_rank_with_both_batches(name, seen):
    build, arguments = TRAININGS[name]
    both = [torch.cat(pair) for pair in zip(tokens_of(0, STEPS), tokens_of(1, STEPS), strict=True)]
    with engine_for(build(0), config_of(train_micro_batch_size_per_gpu=4, **arguments)) as engine:
        alone = train_tokens(engine, both)
        norm = float(engine.get_global_grad_norm())
    shared = [sum(pair) / 2 for pair in zip(seen[0][name]["losses"], seen[1][name]["losses"], strict=True)]
    # The mean of two bf16 gradients is not the gradient of the mean: 2^-8 a gradient, a tenth of that in the loss.
    assert shared == pytest.approx(alone, rel=2e-3)
    # Adam does not see a factor in the gradients; the norm does.
    assert seen[0][name]["norm"] == pytest.approx(norm, rel=2e-2)


@pytest.mark.parametrize("name", ["clipping", "adapters"])
def test_stock_loads_the_checkpoint(name, seen):
    for rank in range(2):
        stock, slide = seen[rank]["stock"][name], seen[rank][name]
        assert unequal(stock["states"], exchanged(slide["half"], to_stock=True)) == []
        assert stock["losses"] == pytest.approx(slide["losses"][STEPS // 2 :], rel=2e-3)


def test_what_rank_0_writes_is_everyones(seen):
    names = {"layers.1.up.weight", "norm.weight", "head.weight"}
    for rank in range(2):
        before, after = seen[rank]["access"]["before"], seen[rank]["access"]["gathered"]
        for name, tensors in after.items():
            if name in names:
                assert (tensors["weight"].view(-1)[::2] == 0.5).all() and (tensors["master"].view(-1)[::2] == 0.5).all()
                kept = before[name]["master"].view(-1)[1::2].contiguous()
                assert same_bits(tensors["master"].view(-1)[1::2].contiguous(), kept), name
            else:
                assert unequal(tensors, before[name]) == [], name


def test_states_are_written_in_partitions(seen):
    numel = 33 * 65
    own = math.ceil(numel / 2)
    for rank in range(2):
        access = seen[rank]["access"]
        assert (access["set (33, 65)"] == torch.tensor(0.3)).all() and (access["set (33,)"] == torch.tensor(0.3)).all()
        assert access["local_numel"] == access["local_gradient_numel"] == own
        whole = access["set_locally"].view(-1)
        assert (whole[:own] == torch.tensor(0.7)).all()
        assert (whole[own:] == torch.tensor(1.7)).all()


def test_gradients_and_norm_are_shared(seen):
    gradients = [seen[rank]["access"]["gradient"] for rank in range(2)]
    assert unequal(*gradients) == []
    squares = sum(gradient.double().square().sum().item() for gradient in gradients[0].values())
    assert [seen[rank]["access"]["norm"] for rank in range(2)] == pytest.approx([math.sqrt(squares)] * 2, rel=1e-6)
    assert unequal(seen[0]["access"]["states"], seen[1]["access"]["states"]) == []
    assert all(gradient.any() for gradient in gradients[0].values())


def test_a_gradient_that_is_late_on_one_rank_counts(seen):
    assert unequal(seen[0]["astray"], seen[1]["astray"]) == []
    states = seen[0]["astray"]["layers.2.up.weight"]
    assert states["exp_avg"].any()


def test_only_the_first_rank_reports(folder, seen):
    assert len(seen) == 2
    assert (folder / "monitor0" / "run" / "Slide_step_s.csv").exists()
    assert not list((folder / "monitor1").rglob("*.csv"))
