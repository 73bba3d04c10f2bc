"""Muon through the JSON: beside DeepSpeed's own and plain torch, checkpoints, placement, the plan, refusals."""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from client_optimizers import Plain
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from harness import (
    Batch,
    Result,
    differences,
    ds_config,
    engine_for,
    llama,
    on_ssd,
    stepped,
    sum_gradients_by_block,
    to_bf16,
    train,
    unequal,
)
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from moving import RandomMoves, movable, promote
from torch import nn

from ds_slide.errors import SlideConfigError, SlideError
from ds_slide.integration.planning import plan_json
from ds_slide.optim.muon import orthogonal
from ds_slide.plan.allocations import MATRIX_COPIES, MATRIX_PRODUCTS, whole_pieces
from ds_slide.plan.forecast import Room

pytestmark = pytest.mark.usefixtures("one_rank")

VOCABULARY = 128
WINDOW = {"window": 2}
RATES = {"muon_lr": 0.01, "adam_lr": 3e-3, "weight_decay": 0.1, "eps": 1e-6}
"""DeepSpeed's eps of 1e-10 makes an update of the last bits of a gradient near zero, which are not the same."""
SLOWER = RATES | {"muon_lr": 2e-3, "adam_lr": 3e-4}
"""In bf16 a master's last bit can flip a weight. With the rates above, 100 steps make 0.009 of that in the loss."""


@pytest.fixture(autouse=True)
def eager() -> Iterator[None]:
    """DeepSpeed compiles Muon's functions, for every shape anew."""
    with torch.compiler.set_stance("force_eager"):
        yield


def model(seed: int = 0, **options: Any) -> nn.Module:
    return llama(seed, **({"num_hidden_layers": 3, "vocab_size": VOCABULARY} | options))


def config(slide: dict[str, Any] | None, *, bf16: bool = True, **others: Any) -> dict[str, Any]:
    params = RATES | others.pop("params", {})
    made = ds_config(
        slide,
        **{"clip": 0.0, "bf16": {"enabled": bf16}, "optimizer": {"type": "Muon", "params": params}} | others,
    )
    made["zero_optimization"]["reduce_scatter"] = False  # stock asks for it
    return made


def text(count: int, rows: int = 2) -> list[Batch]:
    """Batches of the bytes of a text that does not change."""
    tokens = torch.tensor(list((Path(__file__).parents[3] / "LICENSE").read_bytes())).clamp(max=VOCABULARY - 1)
    starts = torch.randint(0, len(tokens) - 48, (count, rows), generator=torch.Generator().manual_seed(3))
    found = [torch.stack([tokens[start : start + 48] for start in row]) for row in starts.tolist()]
    return [{"input_ids": ids, "labels": ids} for ids in found]


def states(own: nn.Module) -> dict[str, dict[str, torch.Tensor]]:
    """Master and optimizer states by name, of matrices that Muon updates and of the others."""
    found = {}
    for name, parameter in own.named_parameters():
        keys = ("momentum_buffer",) if parameter.use_muon else ("exp_avg", "exp_avg_sq")
        found[name] = {key: safe_get_full_optimizer_state(parameter, key).clone() for key in keys}
        found[name]["master"] = safe_get_full_fp32_param(parameter).clone()
    return found


def trained(slide: dict[str, Any] | None, data: list[Batch], own: nn.Module | None = None, **options: Any) -> Result:
    own = model() if own is None else own
    with engine_for(own, config(slide, **options)) as engine:
        result = train(engine, data)
        result.states = states(own)
    return result


def apart(left: Result, right: Result) -> float:
    return max(abs(one - other) for one, other in zip(left.losses, right.losses, strict=True))


# ----------------------------------------------------------------------------------------------------------------------
# Beside DeepSpeed's Muon under ZeRO-3 with CPU offload.

BESIDE: dict[str, dict[str, Any]] = {
    "gram": {},
    "standard": {"params": {"ns_method": "standard", "momentum": 0.9}},
    "accumulation": {"accumulation": 2},
    "heads": {"params": {"per_head_muon": True}},
}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.slow if case == "accumulation" else ()) for case in BESIDE]
)
def test_twenty_steps_in_fp32_are_those_of_deepspeed(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses and all states. The products of "standard" would be in bf16, where one rounding less shows."""
    monkeypatch.setattr(get_accelerator(), "is_bf16_supported", lambda: False)
    data, options = text(20), {"bf16": False, **BESIDE[case]}
    found, expected = trained(WINDOW, data, **options), trained(None, data, **options)
    assert expected.losses[0] - expected.losses[-1] > 1.0  # it learns
    assert apart(found, expected) < 1e-5
    for name, own in expected.states.items():
        assert found.states[name].keys() == own.keys()
        for key, value in own.items():
            assert torch.allclose(found.states[name][key], value, atol=2e-5), (name, key)


@pytest.mark.slow
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_a_hundred_steps_are_within_a_thousandth_of_deepspeed(bf16: bool) -> None:
    data = text(100, rows=16)  # of a loss of 96 tokens, one flipped weight is more
    options = {"bf16": bf16, "params": SLOWER if bf16 else RATES}
    found, expected = trained(WINDOW, data, **options), trained(None, data, **options)
    assert expected.losses[0] - expected.losses[-1] > 1.0
    assert apart(found, expected) < 1e-3


@pytest.mark.parametrize("method", ["gram", pytest.param("standard", marks=pytest.mark.slow)])
def test_twenty_steps_in_bf16_are_near_those_of_deepspeed(method: str) -> None:
    data, params = text(20), SLOWER | {"ns_method": method}
    assert apart(trained(WINDOW, data, params=params), trained(None, data, params=params)) < 1e-3


def test_clipping_by_the_norm_of_the_update_is_that_of_deepspeed() -> None:
    data, options = text(10), {"bf16": False, "clip": 1.0}
    found, expected = trained(WINDOW | {"muon_norm": "update"}, data, **options), trained(None, data, **options)
    assert apart(found, expected) < 1e-5
    assert found.norms == pytest.approx(expected.norms, rel=1e-4)
    assert min(found.norms) > 20  # about the root of all rows, whatever the gradients are
    by_gradient = trained(WINDOW, data, **options)
    assert max(by_gradient.norms) < 10
    assert apart(by_gradient, expected) > 0.01


def test_experts_in_one_tensor_are_matrices_as_in_deepspeed() -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    def experts() -> nn.Module:
        torch.manual_seed(0)
        sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4}
        return MixtralForCausalLM(
            MixtralConfig(
                vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, max_position_embeddings=64, **sizes
            )
        )

    data, options = text(10), {"bf16": False}
    found, expected = (trained(slide, data, experts(), **options) for slide in (WINDOW, None))
    assert any(value["master"].dim() == 3 for value in expected.states.values())
    assert apart(found, expected) < 1e-5


# ----------------------------------------------------------------------------------------------------------------------
# Beside plain torch: with clipping by the norm of the gradient, and one update in fp64.


class PlainMuon(torch.optim.Optimizer):
    """Muon of `muon` parameters and AdamW of the others, in plain torch."""

    def __init__(self, parameters: Any, muon: set[int], dtype: torch.dtype = torch.float32) -> None:
        super().__init__(parameters, {})
        self.muon, self.dtype, self.count = muon, dtype, 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # noqa: ARG002
        self.count += 1
        for number, p in enumerate(self.param_groups[0]["params"]):
            state, gradient = self.state[p], p.grad.to(self.dtype)
            value = p.detach().to(self.dtype)
            if number in self.muon:
                momentum = state.setdefault("momentum", torch.zeros_like(value)).lerp_(gradient, 0.05)
                update = orthogonal(gradient.lerp(momentum, 0.95)[None], "gram", self.dtype)[0]
                lr, update = 0.01, update * max(1.0, p.shape[0] / p.shape[1]) ** 0.5
            else:
                first = state.setdefault("first", torch.zeros_like(value)).lerp_(gradient, 0.1)
                second = state.setdefault("second", torch.zeros_like(value)).lerp_(gradient.square(), 0.05)
                root = (second / (1 - 0.95**self.count)).sqrt() + 1e-6
                lr, update = 3e-3, first / (1 - 0.9**self.count) / root
            p.copy_(value * (1 - lr * 0.1) - lr * update)


def marked(own: nn.Module) -> set[int]:
    """The numbers of the parameters that DeepSpeed marks for Muon."""
    named = enumerate(own.named_parameters())
    return {number for number, (name, p) in named if p.dim() > 1 and "embed" not in name and "lm_head" not in name}


def test_clipping_is_by_the_gradient_s_norm_as_in_plain_torch() -> None:
    data, own, norms = text(10), model(), []
    optimizer = PlainMuon(own.parameters(), marked(own))
    losses = []
    for batch in data:
        loss = own(**batch).loss
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(own.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    found = trained(WINDOW, data, clip=0.5, bf16=False)
    assert min(norms) > 0.5  # every step is clipped
    assert found.norms == pytest.approx(norms, rel=1e-4)
    assert found.losses == pytest.approx(losses, abs=1e-5)
    for name, parameter in own.named_parameters():
        assert torch.allclose(found.states[name]["master"], parameter.detach(), atol=2e-5), name


def test_an_update_is_that_of_the_same_iteration_in_fp64() -> None:
    """From the same gradients, to the last bits of the fp32 masters."""
    data, own = text(1), to_bf16(model())
    sum_gradients_by_block(own.model.layers)
    exact = stepped(Plain(own, lambda groups: PlainMuon(groups, marked(own), torch.float64), 0.0), own, data)
    found = trained(WINDOW, data)
    for name, own in exact.states.items():
        assert torch.allclose(found.states[name]["master"], own["master"], atol=3e-7, rtol=1e-6), name
        assert not torch.equal(own["master"], dict(model().named_parameters())[name].bfloat16().float())


# ----------------------------------------------------------------------------------------------------------------------
# Placement, formats and checkpoints.


@functools.cache
def of_a_window(bits: str) -> Result:
    return trained(WINDOW | {"state_dtype": bits}, text(5))


@pytest.mark.by_turns(2)
@pytest.mark.parametrize("bits", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "slide",
    [
        {"window": 4},
        {"debug": {"lane_delay_ms": 1.0, "seed": 3}},
        {"defer_updates": True},
        {"speculate": True, "update_passes": 2},
    ],
    ids=str,
)
def test_placement_changes_no_bit(slide: dict[str, Any], bits: str) -> None:
    found = trained(WINDOW | slide | {"state_dtype": bits}, text(5))
    assert differences(of_a_window(bits), found) == []


ON_GPU: dict[str, dict[str, Any]] = {
    "all": {"clip": 0.0},
    "all, clipped": {"clip": 0.5},
    "some": {"clip": 0.0},
    "some, by the update": {"clip": 1.0},
    "some, accumulated": {"clip": 0.0, "accumulation": 2},
}


@pytest.mark.parametrize("case", ON_GPU)
def test_states_on_the_gpu_have_the_same_bits(case: str) -> None:
    """Of all units, or of what is outside the blocks and one block."""
    data, options, extra = text(6), ON_GPU[case], {"muon_norm": "update"} if "update" in case else {}
    found = {}
    for nbytes in (0, 10_000_000 if case.startswith("all") else 900_000):
        with engine_for(own := model(), config(WINDOW | extra | {"gpu_states": nbytes}, **options)) as engine:
            parts = engine.optimizer.runtime.parts
            found[nbytes] = train(engine, data)
            found[nbytes].states = states(own)
            there = [parts.plan.units[index] for index in parts.plan.placement.on_gpu]
            on_gpu = sum(unit.largest_matrix > 0 for unit in there)
        assert on_gpu == (0 if not nbytes else 3 if case.startswith("all") else 1)
    one, other = found.values()
    assert differences(one, other) == []
    assert one.norms == other.norms


@pytest.mark.parametrize("slide", [{"gpu_states": 10_000_000}, {"muon_norm": "update"}], ids=str)
def test_a_step_under_autocast_has_the_same_bits(slide: dict[str, Any]) -> None:
    """Products on the thread of the script have their own data type."""
    data, found = text(3), []
    for enabled in (False, True):
        with engine_for(own := model(), config(WINDOW | slide, clip=1.0)) as engine:
            for batch in data:
                engine.backward(engine(**batch).loss)
                with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                    engine.step()
            found.append(states(own))
    assert unequal(*found) == []


@pytest.mark.by_turns(2)
@pytest.mark.parametrize("clip", [0.0, 0.5])
@pytest.mark.parametrize("bits", ["fp32", "bf16"])
def test_states_move_to_the_gpu_and_back_with_the_same_bits(bits: str, clip: float) -> None:
    data, slide, moves = text(8), WINDOW | {"state_dtype": bits}, RandomMoves(1)
    with engine_for(own := model(), config(slide, clip=clip)) as engine:
        blocks = [unit.order for unit in engine.optimizer.runtime.units if unit.spec.kind == "block"]
        assert set(blocks) <= set(movable(engine.optimizer.runtime))
        found = train(engine, data, moves)
        found.states = states(own)
    assert {order for moved in moves.made for order in moved.promoted} >= set(blocks)
    assert {order for moved in moves.made for order in moved.demoted} & set(blocks)
    assert differences(found, trained(slide, data, clip=clip)) == []


@settings(max_examples=5, deadline=None, phases=[Phase.generate])
@given(
    st.fixed_dictionaries(
        {
            "num_hidden_layers": st.integers(1, 4),
            "intermediate_size": st.sampled_from([24, 64, 172, 400]),
            "num_key_value_heads": st.sampled_from([1, 2, 4]),
        }
    ),
    st.integers(1, 4),
    st.sampled_from(["fp32", "bf16"]),
    st.sampled_from([0.0, 0.5]),
    st.integers(0, 99),
)
def test_no_number_of_copies_changes_a_bit(
    sizes: dict[str, int], under_way: int, bits: str, clip: float, seed: int
) -> None:
    """Of matrices in host memory, with delays in each lane, beside matrices whose states are on the GPU."""
    data, slide = text(4), WINDOW | {"state_dtype": bits}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ds_slide.plan.allocations.MATRICES_UNDER_WAY", under_way)
        delays = {"debug": {"lane_delay_ms": 1.0, "seed": seed}}
        found = trained(slide | delays, data, model(**sizes), clip=clip)
    with engine_for(own := model(**sizes), config(slide, clip=clip)) as engine:
        runtime = engine.optimizer.runtime
        assert promote(runtime, *movable(runtime)) is not None
        assert all(unit.tier == "gpu" for unit in [unit.state.weights.buffer for unit in runtime.blocks])
        expected = train(engine, data)
        expected.states = states(own)
    assert differences(found, expected) == []


@pytest.mark.parametrize("first", [True, False], ids=["from the GPU", "to the GPU"])
def test_a_checkpoint_goes_to_another_placement(first: bool, tmp_path: Path) -> None:
    data, places = text(8), [WINDOW | {"gpu_states": nbytes} for nbytes in ((10_000_000, 0) if first else (0, 900_000))]
    with engine_for(model(), config(places[0], clip=1.0)) as engine:
        train(engine, data[:4])
        engine.save_checkpoint(tmp_path)
    with engine_for(own := model(7), config(places[1], clip=1.0)) as engine:
        engine.load_checkpoint(tmp_path)
        found = train(engine, data[4:])
        found.states = states(own)
    expected = trained(places[0], data, clip=1.0)
    assert found.losses == expected.losses[4:]
    assert unequal(found.states, expected.states) == []


@pytest.mark.parametrize("under_way", [1, 3])
def test_a_failure_of_the_products_ends_all_lanes(under_way: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the update lane in a wait for room, and without."""

    def fail(*_arguments: Any) -> None:
        raise RuntimeError("a broken product")

    monkeypatch.setattr("ds_slide.plan.allocations.MATRICES_UNDER_WAY", under_way)
    with engine_for(model(), config(WINDOW)) as engine:
        train(engine, text(1))
        monkeypatch.setattr("ds_slide.runtime.updates.matrices.apply", fail)
        with pytest.raises(SlideError, match="the products lane stopped with RuntimeError: a broken product"):
            train(engine, text(2))
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("ds_slide-")] == []


def test_weights_on_ssd_have_the_same_bits(tmp_path: Path) -> None:
    own, data = model(), text(3)
    there = on_ssd(config(WINDOW | {"host_memory": 700_000}), tmp_path, "offload_param")
    with engine_for(own, there) as engine:
        assert engine.optimizer.runtime.parts.memory_report["ssd_bytes"] > 0
        found = train(engine, data)
        found.states = states(own)
    assert differences(found, trained(WINDOW, data)) == []


def test_momentum_in_bf16_is_rounded_without_bias() -> None:
    """After one step from the same gradients: to either neighbour, in proportion. Training differs little."""
    data, slide = text(20), WINDOW | {"state_dtype": "bf16"}
    both = [trained(each, data[:1]).states["model.layers.1.mlp.up_proj.weight"] for each in (slide, WINDOW)]
    short, exact = (each["momentum_buffer"] for each in both)
    assert torch.equal(short, short.bfloat16().float())
    error = (short - exact) / exact.abs().clamp(min=1e-20)
    assert float(error.abs().max()) < 2.0**-7
    assert abs(float(error.mean())) < 1e-4  # its spread is 2e-3, of 11,008 elements
    assert 0.1 < float((short != exact.bfloat16().float()).float().mean()) < 0.4
    assert 0 < apart(trained(slide, data), trained(WINDOW, data)) < 0.05


@pytest.mark.parametrize("bits", ["fp32", "bf16"])
def test_a_resumed_run_continues_to_the_bit(bits: str, tmp_path: Path) -> None:
    slide, data = WINDOW | {"state_dtype": bits}, text(8)

    def continued(engine: Any) -> Result:
        result = train(engine, data[4:])
        result.states = states(engine.module)
        return result

    with engine_for(model(), config(slide, clip=1.0)) as engine:
        train(engine, data[:4])
        engine.save_checkpoint(tmp_path)
        expected = continued(engine)
    with engine_for(model(7), config(slide, clip=1.0)) as engine:
        train(engine, data[:1])
        engine.load_checkpoint(tmp_path)
        found = continued(engine)
    assert differences(found, expected) == []
    assert found.norms == expected.norms


@pytest.mark.parametrize("to_stock", [True, False], ids=["to stock", "from stock"])
def test_checkpoints_are_exchanged_with_stock(to_stock: bool, tmp_path: Path) -> None:
    """And the next steps are the same."""
    data, options = text(6), {"bf16": False}
    ours, theirs = config(WINDOW, **options), config(None, **options)
    with engine_for(own := model(), ours if to_stock else theirs) as engine:
        train(engine, data[:3])
        engine.save_checkpoint(tmp_path)
        saved = states(own)
        expected = train(engine, data[3:])
    with engine_for(own := model(7), theirs if to_stock else ours) as engine:
        engine.load_checkpoint(tmp_path)
        assert unequal(states(own), saved) == []
        assert apart(train(engine, data[3:]), expected) < 1e-5


def test_a_checkpoint_of_adamw_is_refused_by_name(tmp_path: Path) -> None:
    with engine_for(model(), ds_config(WINDOW)) as engine:
        train(engine, text(1))
        engine.save_checkpoint(tmp_path)
    with engine_for(model(), config(WINDOW)) as engine:
        with pytest.raises(SlideError, match=r"holds sub-groups of \[152768\] elements on this rank"):
            engine.load_checkpoint(tmp_path)


# ----------------------------------------------------------------------------------------------------------------------
# Settings.


def test_moonlight_s_scale() -> None:
    """One step without decay: the update of each matrix is the same, by another factor."""
    data, names = text(1), ["model.layers.1.mlp.up_proj.weight", "model.layers.1.mlp.down_proj.weight"]
    start = dict(model().named_parameters())
    options = {"bf16": False, "params": {"weight_decay": 0.0}}
    found = {scale: trained(WINDOW | {"muon_scale": scale}, data, **options) for scale in ("deepspeed", "moonlight")}
    for name in names:
        steps = {scale: result.states[name]["master"] - start[name].detach() for scale, result in found.items()}
        rows, columns = start[name].shape
        factor = 0.2 * max(rows, columns) ** 0.5 / max(1.0, rows / columns) ** 0.5
        assert torch.allclose(steps["moonlight"], steps["deepspeed"] * factor, atol=1e-6)


def test_a_schedule_changes_both_halves() -> None:
    """DeepSpeed's scheduler sets one rate for all groups; losses are those of stock."""
    data, scheduler = text(8), {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 6}}
    options = {"bf16": False, "scheduler": scheduler}
    assert apart(trained(WINDOW, data, **options), trained(None, data, **options)) < 1e-5


def test_the_plan_has_at_most_nine_and_eleven_bytes_a_parameter() -> None:
    """Of host memory, for each element of a block's matrices: weight, low half, momentum and held gradient. The engine
    takes what the plan of the JSON says."""
    for bits, most in {"bf16": 9, "fp32": 11}.items():
        slide = WINDOW | {"state_dtype": bits}
        raw = config(slide, clip=1.0)
        planned = plan_json(model(), copy.deepcopy(raw), Room(None, 1 << 34)).plan
        with engine_for(model(), raw) as engine:
            plan = engine.optimizer.runtime.parts.plan
            assert [(each.what, each.nbytes) for each in plan.allocations] == [
                (each.what, each.nbytes) for each in planned.allocations
            ]
        unit = next(unit for unit in plan.units if unit.name == "model.layers.1")
        own = [each for each in plan.allocations if each.what.endswith(f" of {unit.name}") and each.tier == "host"]
        numel = sum(entry.numel for entry in unit.layout.entries)
        assert {each.what.partition(" of ")[0] for each in own} == {
            "weight",
            "remainder",
            "momentum_buffer",
            "gradient",
        }
        assert numel == 64 * (64 + 32 + 32 + 64 + 3 * 172)
        assert most - 1.2 < sum(each.nbytes for each in own) / numel < most


def test_the_plan_has_the_bytes_of_the_copies_and_of_the_products() -> None:
    """Copies of three of the largest matrix, gradient, master and momentum. Products where matrices are updated: on the
    update lane's side, on the compute thread's, or on both."""
    largest = 64 * 172
    copies = 3 * (3 * whole_pieces(2 * largest) + whole_pieces(4 * largest))
    with engine_for(model(), config(WINDOW)) as engine:
        parts = engine.optimizer.runtime.parts
        assert (parts.plan.entry(MATRIX_COPIES).nbytes, parts.plan.entry(MATRIX_COPIES).tier) == (copies, "gpu")
        assert parts.plan.entry(MATRIX_PRODUCTS).nbytes == 16 * largest
        promote(engine.optimizer.runtime, *movable(engine.optimizer.runtime))
        assert parts.plan.entry(MATRIX_COPIES).nbytes == copies  # they may come back
        assert parts.plan.entry(MATRIX_PRODUCTS).nbytes == 2 * 16 * largest
    with engine_for(model(), config(WINDOW | {"gpu_states": 10_000_000})) as engine:
        plan = engine.optimizer.runtime.parts.plan
        assert MATRIX_COPIES not in {each.what for each in plan.allocations}
        assert plan.entry(MATRIX_PRODUCTS).nbytes == 16 * largest


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "8 bits": ({"state_dtype": "8bit"}, {}, 'state_dtype is "8bit", but Muon keeps its states in fp32 and bf16 only'),
    "method": ({}, {"params": {"ns_method": "svd"}}, "ns_method must be one of .*got svd"),
    "momentum": (
        {},
        {"params": {"momentum": 1.5}},
        "parameter group 0 of MuonWithAuxAdam cannot be used: .*'momentum'",
    ),
    "states": (
        {},
        {"params": {"fp32_optimizer_states": False}},
        "optimizer.params.fp32_optimizer_states is false, but",
    ),
    "compression": ({"compression": {"type": "lsp", "d": 16, "r": 4}}, {}, "the optimizer is Muon, but compressed"),
    "norm in fp16": (
        {"muon_norm": "update"},
        {"bf16": None, "fp16": {"enabled": True}},
        'muon_norm is "update", but fp16.enabled is true',
    ),
    "heads": ({}, {"params": {"per_head_muon": True}}, "no attention projection could be tagged"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case: str) -> None:
    slide, options, words = REFUSED[case]
    raw = config(WINDOW | slide)
    raw["optimizer"]["params"] |= options.pop("params", {})
    raw = {key: value for key, value in (raw | options).items() if value is not None}
    own = model() if case != "heads" else nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    with pytest.raises((SlideConfigError, ValueError, AssertionError), match=words):
        with engine_for(own, raw):
            pass


def test_states_on_ssd_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SlideConfigError, match=r'offload_optimizer\.device is "nvme", but Muon updates whole matrices'):
        with engine_for(model(), on_ssd(config(WINDOW), tmp_path, "offload_optimizer")):
            pass


def test_a_parameter_that_is_off_is_left_alone() -> None:
    name, data = "model.layers.1.mlp.up_proj.weight", text(4)
    with engine_for(own := model(), config(WINDOW)) as engine:
        parameter = dict(own.named_parameters())[name]
        train(engine, data[:2])
        before = states(own)
        parameter.requires_grad_(False)
        train(engine, data[2:])
        parameter.requires_grad_(True)
        after = states(own)
    assert unequal(before[name], after[name]) == []
    other = name.replace("up_proj", "down_proj")
    assert len(unequal(before[other], after[other])) == 2


def test_a_parameter_that_trains_later_is_refused() -> None:
    own = model()
    frozen = dict(own.named_parameters())["model.layers.1.mlp.up_proj.weight"].requires_grad_(False)
    with engine_for(own, config(WINDOW)) as engine:
        train(engine, text(1))
        frozen.requires_grad_(True)
        with pytest.raises(SlideError, match="is in none of the optimizer's 2 parameter groups"):
            train(engine, text(1))
