"""Muon whose matrices are updated together by the kernel, in Triton's interpreter: placement changes no bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from harness import Batch, Result, differences, ds_config, engine_for, llama, train

pytest.importorskip("triton")

from ds_slide.integration import update_rules
from ds_slide.kernels.offload import tiles
from ds_slide.optim import muon_batch
from ds_slide.optim.muon_groups import most_bytes
from ds_slide.plan.allocations import MATRIX_PRODUCTS
from ds_slide.runtime.captured.captures import Captures
from ds_slide.runtime.captured.graphs import Graph
from ds_slide.runtime.updates import matrices, recorded_runs
from ds_slide.runtime.updates.iterations import Iterations
from ds_slide.runtime.updates.recorded_runs import RecordedRun

pytestmark = pytest.mark.usefixtures("one_rank", "quick_interpreter")

SIZES = {"num_hidden_layers": 2, "vocab_size": 64, "intermediate_size": 96, "num_key_value_heads": 2}
BLOCK = [(1, 64, 64), (1, 32, 64), (1, 32, 64), (1, 64, 64), (1, 96, 64), (1, 96, 64), (1, 64, 96)]
SLIDE = {"window": 2, "muon_kernel": True}
EVERYTHING = {"gpu_states": 10_000_000}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "TILES", {32: tiles.Tiles(64, 64, 64, warps=1, stages=1)})
    monkeypatch.setattr(muon_batch, "has_kernel", lambda _: True)
    dtypes = {"gram": torch.float16, "standard": torch.bfloat16}
    monkeypatch.setattr(update_rules, "_product_dtypes", lambda: dtypes)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of parameters of each batch."""
    made: list[int] = []

    def counted(shapes: Any, *others: Any) -> Any:
        made.append(len(shapes))
        return muon_batch.orthogonal_together(shapes, *others)

    for where in (matrices, recorded_runs):
        monkeypatch.setattr(where, "orthogonal_together", counted)
    return made


def config(slide: dict[str, Any], method: str, clip: float = 0.0) -> dict[str, Any]:
    params = {"muon_lr": 0.01, "adam_lr": 1e-3, "weight_decay": 0.1, "eps": 1e-6, "ns_method": method}
    made = ds_config(SLIDE | slide, clip=clip, bf16={"enabled": True}, optimizer={"type": "Muon", "params": params})
    made["zero_optimization"]["reduce_scatter"] = False
    return made


def trained(slide: dict[str, Any], method: str, clip: float = 0.0) -> Result:
    generator = torch.Generator().manual_seed(3)
    batches = [torch.randint(0, 64, (2, 16), generator=generator) for _ in range(2)]
    data: list[Batch] = [{"input_ids": ids, "labels": ids} for ids in batches]
    with engine_for(own := llama(0, **SIZES), config(slide, method, clip)) as engine:
        result = train(engine, data)
        result.states = {}
        for name, parameter in own.named_parameters():
            keys = ("momentum_buffer",) if parameter.use_muon else ("exp_avg", "exp_avg_sq")
            result.states[name] = {key: safe_get_full_optimizer_state(parameter, key).clone() for key in keys}
            result.states[name]["master"] = safe_get_full_fp32_param(parameter).clone()
    return result


@pytest.mark.parametrize("method", ["gram", "standard"])
def test_the_matrices_of_a_unit_together_have_the_bits_of_each_alone(method: str, taken: list[int]) -> None:
    alone = trained({"gpu_states": 0}, method)
    assert set(taken) == {1} and len(taken) == 2 * 2 * len(BLOCK)
    taken.clear()
    together = trained(EVERYTHING, method)
    assert sorted(taken) == sorted(2 * 2 * [2, 5])
    assert differences(alone, together) == []
    if method == "gram":
        delays = {"debug": {"lane_delay_ms": 1.0, "seed": 3}}
        assert differences(alone, trained({"gpu_states": 0, **delays}, method)) == []


def test_recordings_have_the_same_bits_and_end_with_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU accelerator a replay calls the iterations again."""
    replayed: list[Graph] = []
    replay = Graph.replay
    monkeypatch.setattr(Graph, "replay", lambda self: (replayed.append(self), replay(self))[1])
    plain = trained({**EVERYTHING, "captured_blocks": False}, "gram")
    assert not replayed
    # Blocks stay as they are: only the updates are recorded.
    monkeypatch.setattr(Captures, "begin", lambda *_: None)
    kept: list[Iterations] = []
    made = Iterations.__init__
    monkeypatch.setattr(Iterations, "__init__", lambda self, device: (kept.append(self), made(self, device))[1])
    recorded = trained({**EVERYTHING, "captured_blocks": True}, "gram")
    # Two batches in each of two blocks and two steps. Memory grows for the second, so the first is as written twice.
    assert len(replayed) == 2 * 2 * 2 - 3 and len(set(map(id, replayed))) == 2
    assert differences(plain, recorded) == []
    assert kept and all(each._bytes is None and not each._recorded for each in kept)


@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_recordings_of_the_lane_have_the_same_bits(clip: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Updates of the first step that are under way without clipping run as written."""
    replayed: list[RecordedRun] = []
    replay = RecordedRun.replay
    monkeypatch.setattr(RecordedRun, "replay", lambda self: (replayed.append(self), replay(self))[1])
    streamed = {"gpu_states": 0, "muon_kernel": False}
    plain = trained({**streamed, "captured_blocks": False}, "gram", clip)
    assert not replayed
    monkeypatch.setattr(Captures, "begin", lambda *_: None)
    delayed = {"debug": {"lane_delay_ms": 1.0, "seed": 4}}
    recorded = trained({**streamed, **delayed, "captured_blocks": True}, "gram", clip)
    assert len(replayed) == (2 if clip else 1) * 2 * len(BLOCK)
    assert len(set(map(id, replayed))) == len(set(BLOCK))
    assert differences(plain, recorded) == []


@pytest.mark.parametrize("kernel", [pytest.param(True, marks=pytest.mark.slow), False])
def test_recordings_before_the_norm_of_updates_have_the_same_bits(
    kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that computes makes all updates for their norm, before the step applies them."""
    replayed: list[RecordedRun] = []
    replay = RecordedRun.replay
    monkeypatch.setattr(RecordedRun, "replay", lambda self: (replayed.append(self), replay(self))[1])
    by_update = {"gpu_states": 0, "muon_kernel": kernel, "muon_norm": "update"}
    plain = trained({**by_update, "captured_blocks": False}, "gram", clip=1.0)
    assert not replayed
    monkeypatch.setattr(Captures, "begin", lambda *_: None)
    recorded = trained({**by_update, "captured_blocks": True}, "gram", clip=1.0)
    assert len(replayed) == 2 * 2 * len(BLOCK)
    assert differences(plain, recorded) == []


def test_it_learns_as_without_the_kernel(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    by_kernel = trained(EVERYTHING, "gram")
    plain = trained({**EVERYTHING, "muon_kernel": False}, "gram")
    assert "needs a Hopper GPU" not in caplog.text
    monkeypatch.setattr(muon_batch, "has_kernel", lambda _: False)
    assert differences(trained(EVERYTHING, "gram"), plain) == []
    assert "needs a Hopper GPU" in caplog.text
    assert differences(by_kernel, plain)
    assert by_kernel.losses == pytest.approx(plain.losses, abs=2e-3)


def test_the_plan_counts_a_batch_where_states_are_on_the_gpu() -> None:
    largest = 64 * 96
    for slide, nbytes in (({"gpu_states": 0}, 16 * largest), (EVERYTHING, most_bytes(BLOCK))):
        with engine_for(llama(0, **SIZES), config(slide, "gram")) as engine:
            assert engine.optimizer.runtime.parts.plan.entry(MATRIX_PRODUCTS).nbytes == nbytes
    assert most_bytes(BLOCK) > 16 * largest
