"""Universal checkpoints on one rank: made from ours and from stock's, loaded by us and by stock, to the bit.

Other world sizes: test_universal_ranks.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import adapted
from checkpoint_runs import CASES, HALF, WHOLE, Case, Run, Wide, continued, peak_growth, saved_and_continued
from harness import ADAMW, Result, batches, differences, ds_config, engine_for, exchanged, same_bits, states_of, train
from universal import UNIVERSAL, convert, universal

from ds_slide.errors import SlideError

pytestmark = pytest.mark.usefixtures("one_rank")

TORCH = {"optimizer": {"type": "AdamW", "params": {**ADAMW, "torch_adam": True}}, "zero_force_ds_cpu_optimizer": False}
CASES = {
    **{name: case for name, case in CASES.items() if name != "no_clipping"},
    "torch_adam": Case(others=TORCH),
    "8bit": Case(slide={"state_dtype": "8bit", "gpu_states": 0}),
}
cases = pytest.mark.parametrize("name", CASES)
# Stock gives all groups the settings of the first one.
with_stock = pytest.mark.parametrize("name", ["clipping", "accumulation_and_schedule", "frozen", "torch_adam", "fp32"])


def loading(case: Case) -> Case:
    return replace(case, others={**case.others, "checkpoint": UNIVERSAL})


def seed_of(name: str) -> int:
    """Of the model that loads: another one, unless frozen weights have to agree, which are not in the checkpoint."""
    return 0 if name == "frozen" else 7


@pytest.fixture(scope="module")
def runs(one_rank, tmp_path_factory) -> Callable[..., Run]:  # noqa: ARG001
    """Runs by the name of their case, of DS-Slide or of stock, each made and converted once."""

    def run(name: str, slide: bool = True) -> Run:
        made = saved_and_continued(CASES[name], tmp_path_factory.mktemp(name), slide=slide)
        convert(made.folder)
        return made

    return cache(run)


@pytest.mark.thinned(2)
@cases
def test_a_resumed_run_continues_to_the_bit(name, runs):
    """Master, moments, step, scheduler and the settings of every parameter group: each of them shows in the bits."""
    case, run = CASES[name], runs(name)
    with loading(case).engine(seed_of(name)) as engine:
        train(engine, batches(case.accumulation))  # so that there is something to forget
        path, client_state = engine.load_checkpoint(run.folder)
        assert path is not None and client_state["note"] == "kept"
        assert engine.global_steps == HALF // case.accumulation
        # Blocks of 8 bits are encoded anew from what was decoded.
        keys = ("weight", "master") if name == "8bit" else ("weight", "master", "exp_avg", "exp_avg_sq")
        for parameter, tensors in states_of(engine.module).items():
            for key in keys:
                if key in tensors:
                    assert same_bits(tensors[key], run.half.states[parameter][key]), (parameter, key)
        resumed = continued(engine, 1)
    if name == "8bit":
        assert resumed.losses == pytest.approx(run.rest.losses, rel=2e-3)
        return
    assert differences(resumed, run.rest) == []
    assert resumed.norms == run.rest.norms


@pytest.mark.parametrize("place", ["gpu", pytest.param("ssd", marks=pytest.mark.slow), "ssd_half"])
def test_states_may_live_elsewhere(place, runs, disk):
    case, run = CASES["clipping"], runs("clipping")
    slide = {"gpu": {"gpu_states": 400_000}, "ssd": {"host_memory": 0}, "ssd_half": {"host_memory": 500_000}}[place]
    nvme = {"device": "nvme", "nvme_path": str(disk)}
    zero = {"offload_optimizer": nvme, "offload_param": nvme} if place != "gpu" else {}
    with loading(replace(case, slide=slide, zero=zero)).engine(7) as engine:
        tiers = {unit.state.buffers["exp_avg"].tier for unit in engine.optimizer.runtime.units}
        assert tiers & ({"gpu"} if place == "gpu" else {"ssd"})
        engine.load_checkpoint(run.folder)
        loaded = Result(states=states_of(engine.module))
        assert differences(loaded, replace(run.half, losses=[])) == []
        assert continued(engine, 1).losses == pytest.approx(run.rest.losses, rel=2e-3 if place == "gpu" else 0)


@pytest.mark.by_turns(2)
@with_stock
def test_stock_loads_ours(name, runs):
    run = runs(name)
    with loading(CASES[name]).engine(seed_of(name), slide=False) as engine:
        engine.load_checkpoint(run.folder)
        loaded = Result(states=states_of(engine.module))
        assert differences(loaded, Result(states=exchanged(run.half.states, to_stock=True))) == []
        rest = train(engine, batches(WHOLE)[HALF:])
    assert rest.losses == pytest.approx(run.rest.losses, rel=2e-3)
    assert rest.norms == pytest.approx(run.rest.norms, rel=2e-2)


@pytest.mark.thinned(2)
@with_stock
def test_we_load_what_stock_has_saved(name, runs):
    run = runs(name, slide=False)
    with loading(CASES[name]).engine(seed_of(name)) as engine:
        engine.load_checkpoint(run.folder)
        loaded = Result(states=states_of(engine.module))
        assert differences(loaded, Result(states=exchanged(run.half.states, to_stock=False))) == []
        rest = train(engine, batches(WHOLE)[HALF:])
    assert rest.losses == pytest.approx(run.rest.losses, rel=2e-3)
    assert rest.norms == pytest.approx(run.rest.norms, rel=2e-2)


@pytest.mark.parametrize("name", ["clipping", "torch_adam"])
def test_the_step_is_of_the_optimizers_type(name, runs):
    """As in stock's checkpoints: a tensor for torch's optimizers, a number for DeepSpeed's."""
    for slide in (True, False):
        path = next(runs(name, slide=slide).folder.glob("*/*_optim_states.pt"))
        for state in torch.load(path, weights_only=False)["optimizer_state_dict"]["optimizer_state_dict"][
            "state"
        ].values():
            step = state["step"]
            assert type(step) is (torch.Tensor if name == "torch_adam" else int) and step == HALF
            assert name != "torch_adam" or (step.dtype, step.shape) == (torch.float32, ())


@pytest.mark.parametrize("module_only", [False, True])
def test_weights_without_optimizer_states(module_only, runs):
    """As in stock: the masters are loaded, in fp32; moments stay as they are."""
    run = runs("clipping")
    for exact in (True, False):
        case = replace(loading(CASES["clipping"]), zero={"load_from_fp32_weights": exact})
        with case.engine(7) as engine:
            engine.load_checkpoint(run.folder, load_optimizer_states=False, load_module_only=module_only)
            assert engine.global_steps == (0 if module_only else HALF)
            for name, tensors in states_of(engine.module).items():
                saved = run.half.states[name]
                assert same_bits(tensors["weight"], saved["weight"]), name
                assert same_bits(tensors["master"], saved["master"] if exact else saved["weight"].float()), name
                assert not tensors["exp_avg"].any() and not tensors["exp_avg_sq"].any(), name


@pytest.fixture
def copy(runs, tmp_path) -> Path:
    """A folder with hard links to the universal checkpoint of the case "clipping", to be damaged."""
    source = runs("clipping").folder
    for path in source.rglob("*"):
        if path.is_file() and ("_universal" in str(path.relative_to(source))):
            target = tmp_path / "run" / path.relative_to(source)
            target.parent.mkdir(parents=True, exist_ok=True)
            os.link(path, target)
    return tmp_path / "run"


@pytest.fixture(scope="module")
def engine(one_rank) -> Iterator[Any]:  # noqa: ARG001
    with loading(CASES["clipping"]).engine(7) as engine:
        yield engine


MATRIX = "zero/model.layers.1.mlp.up_proj.weight/exp_avg.pt"


def cut(path: Path) -> None:
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data[: len(data) // 2])


def another_size(path: Path) -> None:
    path.unlink()
    torch.save(torch.zeros(7), path)


def no_tensor(path: Path) -> None:
    path.unlink()
    torch.save({"other": 1}, path)


@pytest.mark.parametrize(
    ("name", "damage", "sentence"),
    [
        (MATRIX, Path.unlink, r"exp_avg\.pt cannot be read \(No such file or directory\)"),
        (MATRIX, cut, r"exp_avg\.pt cannot be loaded"),
        (MATRIX, another_size, r"exp_avg\.pt holds 7 elements, but model\.layers\.1\.mlp\.up_proj\.weight .* 11,008"),
        (MATRIX, no_tensor, r"exp_avg\.pt holds no tensor"),
        ("zero/optimizer_state.pt", Path.unlink, r"optimizer_state\.pt cannot be read"),
        ("zero/optimizer_state.pt", no_tensor, r"optimizer_state\.pt does not hold the optimizer state"),
        (
            "zero_pp_rank_0_mp_rank_00_model_states.pt",
            Path.unlink,
            "has no file zero_pp_rank_0_mp_rank_00_model_states",
        ),
    ],
)
def test_a_broken_file_is_named_and_nothing_is_changed(name, damage, sentence, engine, copy):
    (tag,) = (path for path in copy.iterdir() if path.is_dir())
    damage(tag / name)
    before = Result(states=states_of(engine.module))
    with pytest.raises(SlideError, match=sentence) as caught:
        engine.load_checkpoint(copy)
    assert str(tag) in str(caught.value) and "\n" not in str(caught.value)
    assert differences(Result(states=states_of(engine.module)), before) == []
    train(engine, batches(1))  # it still can


def test_without_a_universal_checkpoint_the_missing_file_is_named(engine, tmp_path):
    with pytest.raises(SlideError, match=rf"{tmp_path}/latest_universal.*ds_to_universal\.py"):
        engine.load_checkpoint(tmp_path)


def test_an_ordinary_checkpoint_is_no_universal_one(engine, runs):
    run = runs("clipping")
    with pytest.raises(SlideError, match=r"optimizer_state\.pt cannot be read .*convert the checkpoint"):
        engine.load_checkpoint(run.folder, tag=f"global_step{HALF}")


def test_other_parameter_groups_are_refused(runs):
    with (
        loading(CASES["two_groups_in_sub_groups"]).engine(7) as engine,
        pytest.raises(SlideError, match=r"optimizer_state\.pt holds 1 parameter groups, but the optimizer has 2"),
    ):
        engine.load_checkpoint(runs("clipping").folder)


def test_several_data_types(tmp_path):
    """Adapters in fp32 and norms in bf16, which train, beside a frozen base in bf16."""
    with engine_for(adapted(trained=("input_layernorm",)), ds_config({"window": 2})) as engine:
        train(engine, batches(2))
        engine.save_checkpoint(tmp_path)
        saved = Result(states=states_of(engine.module))
        rest = train(engine, batches(4)[2:])
    convert(tmp_path)
    with engine_for(adapted(trained=("input_layernorm",)), universal(ds_config({"window": 2}))) as engine:
        engine.load_checkpoint(tmp_path)
        assert differences(Result(states=states_of(engine.module)), saved) == []
        assert train(engine, batches(4)[2:]).losses == rest.losses


def test_memory_does_not_grow_with_the_model(tmp_path):
    config = universal(ds_config({"window": 2}))
    with engine_for(Wide().bfloat16(), config) as engine:
        engine.save_checkpoint(tmp_path)
        convert(tmp_path)
        engine.load_checkpoint(tmp_path)
        assert peak_growth(lambda: engine.load_checkpoint(tmp_path)) < 32 << 20
