"""Checkpoints in DeepSpeed's format: exact resume, exchange with stock ZeRO-3, and the tools that read them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.utils import safe_get_full_fp32_param
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from harness import Result, batches, differences, ds_config, engine_for, llama, same_bits, states_of, train
from torch import nn

from ds_slide.errors import SlideError

pytestmark = pytest.mark.usefixtures("one_rank")

HALF = 4
WHOLE = 2 * HALF
GATHER = {"stage3_gather_16bit_weights_on_model_save": True}
WARMUP = {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 1e-3, "warmup_num_steps": 6}}


@dataclass(frozen=True)
class Case:
    """A kind of training. `prepare` changes the model and returns what `model_parameters` is."""

    clip: float = 1.0
    accumulation: int = 1
    zero: dict[str, Any] = field(default_factory=dict)
    others: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    slide: dict[str, Any] = field(default_factory=dict)
    prepare: Callable[[nn.Module], Any] | None = None

    def engine(self, seed: int, *, slide: bool = True) -> Any:
        """Context of an engine whose weights come from `seed`."""
        model = llama(seed, num_hidden_layers=3, **self.model)
        arguments = {} if self.prepare is None else {"model_parameters": self.prepare(model)}
        config = ds_config(
            {"window": 2, **self.slide} if slide else None,
            clip=self.clip,
            accumulation=self.accumulation,
            **self.others,
        )
        config["zero_optimization"] = {**config["zero_optimization"], **GATHER, **self.zero}
        return engine_for(model, config, **arguments)


def freeze(model: nn.Module) -> list[nn.Parameter]:
    model.model.embed_tokens.requires_grad_(False)
    model.model.layers[1].mlp.requires_grad_(False)
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    return [{"params": matrices}, {"params": vectors, "weight_decay": 0.0, "lr": 3e-3}]


CASES = {
    "clipping": Case(),
    "no_clipping": Case(clip=0.0),
    "accumulation_and_schedule": Case(accumulation=2, others={"scheduler": WARMUP}),
    "frozen": Case(prepare=freeze),
    "tied": Case(clip=0.0, model={"tie_word_embeddings": True}),
    "two_groups_in_sub_groups": Case(prepare=two_groups, zero={"sub_group_size": 20_000}),
    "states_on_the_gpu": Case(slide={"gpu_states": 400_000}),
}
cases = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


def continued(engine: Any, half: int) -> Result:
    """Train one half of the data and read everything back."""
    result = train(engine, batches(WHOLE)[half * HALF : (half + 1) * HALF])
    result.states = states_of(engine.module)
    return result


def saved(case: Case, folder: Path, *, slide: bool = True) -> Result:
    """Train the first half on a new engine and save; the states at that moment."""
    with case.engine(0, slide=slide) as engine:
        result = train(engine, batches(WHOLE)[:HALF])
        engine.save_checkpoint(folder, client_state={"note": "kept"})
        result.states = states_of(engine.module)
    return result


@cases
def test_a_resumed_run_continues_to_the_bit(case, tmp_path):
    with case.engine(0) as engine:
        train(engine, batches(WHOLE)[:HALF])
        uninterrupted = continued(engine, 1)
    with case.engine(0) as engine:
        # Saved with the last step's updates pending, and trained on as if nothing had been saved.
        train(engine, batches(WHOLE)[:HALF])
        engine.save_checkpoint(tmp_path)
        assert differences(continued(engine, 1), uninterrupted) == []
    with case.engine(7) as engine:
        train(engine, batches(1))  # so that there is something to forget
        if case.accumulation > 1:
            train(engine, batches(case.accumulation - 1))
        engine.load_checkpoint(tmp_path)
        assert engine.global_steps == HALF // case.accumulation
        resumed = continued(engine, 1)
    assert differences(resumed, uninterrupted) == []
    assert resumed.norms == uninterrupted.norms


def test_a_checkpoint_before_the_first_step_resumes(tmp_path):
    case = CASES["clipping"]
    with case.engine(0) as engine:
        engine.save_checkpoint(tmp_path)
        uninterrupted = continued(engine, 0)
    with case.engine(7) as engine:
        engine.load_checkpoint(tmp_path)
        assert differences(continued(engine, 0), uninterrupted) == []


def test_client_state_and_scheduler_come_back(tmp_path):
    case = CASES["accumulation_and_schedule"]
    saved(case, tmp_path)
    with case.engine(7) as engine:
        path, client_state = engine.load_checkpoint(tmp_path)
        assert path is not None and client_state["note"] == "kept"
        assert engine.global_samples == HALF * 2
        assert engine.lr_scheduler.last_batch_iteration == HALF // 2 - 1
        assert engine.optimizer.param_groups[0]["lr"] == engine.get_lr()[0] > 0


@cases
def test_zero_to_fp32_gives_the_masters(case, tmp_path):
    states = saved(case, tmp_path).states
    exported = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path))
    if case.model:
        assert same_bits(exported.pop("lm_head.weight"), exported["model.embed_tokens.weight"])
    assert exported.keys() == states.keys()
    for name, tensors in states.items():
        expected = tensors.get("master", tensors["weight"])  # frozen parameters have no master
        assert same_bits(exported[name].contiguous(), expected), name


@pytest.mark.parametrize("name", ["clipping", "frozen", "tied"])
def test_the_16_bit_model_is_what_the_gpu_reads(name, tmp_path):
    with CASES[name].engine(0) as engine:
        train(engine, batches(2))
        assert engine.save_16bit_model(str(tmp_path), "model.bin")
        gathered = engine._zero3_consolidated_16bit_state_dict()
        states = states_of(engine.module)
    exported = torch.load(tmp_path / "model.bin")
    assert exported.keys() == gathered.keys() >= states.keys()
    for parameter, tensors in states.items():
        assert exported[parameter].dtype == torch.bfloat16
        assert same_bits(exported[parameter], tensors["weight"]), parameter
        assert same_bits(gathered[parameter], tensors["weight"]), parameter


@pytest.mark.parametrize("module_only", [False, True])
def test_weights_without_optimizer_states(module_only, tmp_path):
    """As in stock: fp32 weights from the checkpoint, rounded to the model's dtype; moments and step count start anew."""
    case = CASES["clipping"]
    states = saved(case, tmp_path).states
    with case.engine(7) as engine:
        engine.load_checkpoint(tmp_path, load_optimizer_states=False, load_module_only=module_only)
        assert engine.global_steps == (0 if module_only else HALF)
        loaded = states_of(engine.module)
        first = train(engine, batches(3)).losses
    for name, tensors in loaded.items():
        assert same_bits(tensors["weight"], states[name]["weight"]), name
        assert same_bits(tensors["master"], states[name]["weight"].float()), name
        assert not tensors["exp_avg"].any() and not tensors["exp_avg_sq"].any(), name
    with case.engine(7, slide=False) as engine:
        engine.load_checkpoint(tmp_path, load_optimizer_states=False, load_module_only=module_only)
        assert first == pytest.approx(train(engine, batches(3)).losses, rel=2e-3)


@pytest.mark.parametrize("name", ["clipping", "accumulation_and_schedule", "frozen", "tied", "two_groups_in_sub_groups"])
@pytest.mark.parametrize("from_slide", [True, False], ids=["slide_to_stock", "stock_to_slide"])
def test_exchange_with_stock(name, from_slide, tmp_path):
    case = CASES[name]
    states = saved(case, tmp_path, slide=from_slide).states
    with case.engine(7, slide=not from_slide) as engine:
        engine.load_checkpoint(tmp_path)
        loaded = states_of(engine.module)
        there = train(engine, batches(WHOLE)[HALF:])
    with case.engine(7, slide=from_slide) as engine:
        engine.load_checkpoint(tmp_path)
        here = train(engine, batches(WHOLE)[HALF:])
    for parameter, tensors in states.items():
        # A master halfway between two bf16 values is moved by one unit in the last place of fp32 (2^-23): DS-Slide
        # rebuilds masters from two planes, which could not tell which way it was rounded.
        masters = [group[parameter].pop("master", None) for group in (states, loaded)]
        if masters[0] is not None:
            torch.testing.assert_close(masters[1], masters[0], rtol=2**-22 if not from_slide else 0.0, atol=0.0)
        for key, tensor in tensors.items():
            assert same_bits(loaded[parameter][key], tensor), f"{parameter}.{key}"
    # Two bf16 engines whose masters agree to an fp32 rounding: now and then one bf16 weight is rounded the other way.
    assert there.losses == pytest.approx(here.losses, rel=2e-3)
    assert there.norms == pytest.approx(here.norms, rel=2e-2)


def test_saving_within_an_accumulation_window(tmp_path):
    """As in stock: the run goes on undisturbed, and a resumed one starts the window again."""
    case = CASES["accumulation_and_schedule"]
    with case.engine(0) as engine:
        train(engine, batches(WHOLE)[:HALF])
        engine.save_checkpoint(tmp_path / "between")
        uninterrupted = continued(engine, 1)
    with case.engine(0) as engine:
        losses = train(engine, batches(WHOLE)[: HALF + 1]).losses
        engine.save_checkpoint(tmp_path / "within")
        rest = train(engine, batches(WHOLE)[HALF + 1 :])
        rest.states = states_of(engine.module)
        rest.losses = [losses[-1], *rest.losses]
    assert differences(rest, uninterrupted) == []
    for folder in ("between", "within"):
        with case.engine(7) as engine:
            engine.load_checkpoint(tmp_path / folder)
            assert differences(continued(engine, 1), uninterrupted) == []


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
        with pytest.raises(SlideError, match=r"a checkpoint between .*engine\.step\(\) first.*hold_gradients"):
            engine.save_checkpoint(tmp_path)
        with pytest.raises(SlideError, match=r"a checkpoint between .*engine\.step\(\) first.*hold_gradients"):
            engine.load_checkpoint(tmp_path)
        engine.step()
        engine.save_checkpoint(tmp_path)


def test_another_sub_group_size_is_refused(tmp_path):
    saved(CASES["clipping"], tmp_path)
    with CASES["two_groups_in_sub_groups"].engine(7) as engine, pytest.raises(SlideError, match="sub_group_size"):
        engine.load_checkpoint(tmp_path)


def test_loading_renews_what_is_on_the_gpu(tmp_path):
    """An evaluation after loading sees the loaded weights, in the window as well as in the edges."""
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
