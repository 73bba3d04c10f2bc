"""A plan for a batch that fits only where inputs of blocks wait in host memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from transformers import Qwen2Config

from ds_slide.cli.planning import output
from ds_slide.cli.planning import planner as planner_module
from ds_slide.cli.planning.model import ModelShape
from ds_slide.cli.planning.planner import Planner, Request
from ds_slide.cli.planning.steady import Decision, Question, decide
from ds_slide.plan.ceilings import read_ceilings
from ds_slide.plan.forecast import Forecast, Room
from ds_slide.plan.keeping import Kept
from ds_slide.plan.mixtures import Mixture
from ds_slide.plan.spare import BLOCKS_UNDER_WAY, LEAST_AHEAD, buffers_for

BLOCKS, SEQ, HIDDEN = 24, 512, 256
BATCH = 128
INPUT_BYTES = BATCH * SEQ * HIDDEN * 2


@pytest.fixture(scope="module")
def planner() -> Planner:
    return Planner()


@pytest.fixture(scope="module")
def request_of() -> Any:
    widths = {"hidden_size": HIDDEN, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 4}
    config = Qwen2Config(num_hidden_layers=BLOCKS, vocab_size=512, tie_word_embeddings=True, **widths)
    ceilings = read_ceilings("h200-16-cores")

    def make(gpu: int, *, ssd: int | None = None, device: str = "cpu", **block: Any) -> Request:
        raw = {
            "train_micro_batch_size_per_gpu": BATCH,
            "gradient_clipping": 1.0,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "zero_optimization": {"stage": 3, "offload_optimizer": {"device": device, "nvme_path": "/local_nvme"}},
            "ds_slide": {"enabled": True, "window": 3, "gpu_states": 0, **block},
        }
        return Request(ModelShape("narrow", config), raw, BATCH, SEQ, Room(gpu, 16 << 30, ssd), ceilings)

    return make


def test_it_fits_with_inputs_in_host_memory(planner: Planner, request_of: Any) -> None:
    def needed(request: Request) -> int:
        return sum(planner.forecast(request).gpu.values())

    enough = needed(request_of(24 << 30))
    request = request_of(enough - 4 * INPUT_BYTES)
    assert planner.forecast(request.with_block(activations="as_written")).shortage()
    first, steady = planner.forecast(request), planner.steady(request)
    assert first.shortage() is None and steady.shortage() is None
    # At first nobody knows how many; later as few as suffice, beside the margin.
    assert len(first.activations.moved) == BLOCKS - BLOCKS_UNDER_WAY > len(steady.activations.moved) >= 4
    assert steady.activations.moved_bytes == len(steady.activations.moved) * INPUT_BYTES
    assert steady.host["inputs of blocks"] == first.activations.moved_bytes > steady.activations.moved_bytes
    assert not steady.activations.kept.whole
    link = steady.time.lanes["d2h"] - planner.steady(request_of(24 << 30)).time.lanes["d2h"]
    assert link == pytest.approx(steady.activations.moved_bytes / 55.4e9)
    said = "\n".join(output.as_text(output.as_dict(steady), "narrow"))
    assert f"of {len(steady.activations.moved)} blocks wait in host memory" in said


def test_nothing_moves_without_need_or_without_room(planner: Planner, request_of: Any) -> None:
    roomy = request_of(24 << 30)
    assert not planner.forecast(roomy).activations.moved and not planner.steady(roomy).activations.moved
    tight = replace(roomy, room=Room(sum(planner.forecast(roomy).gpu.values()) - 4 * INPUT_BYTES, 16 << 30))
    assert not planner.forecast(tight.with_block(host_memory="200MiB")).activations.moved


def test_what_host_memory_does_not_hold_goes_on_to_ssd(planner: Planner, request_of: Any) -> None:
    """Of the first blocks; with its bytes in the tier, the lane and the wear, and the buffers in host memory."""
    enough = sum(planner.forecast(request_of(24 << 30)).gpu.values())

    def steady(**block: Any) -> Forecast:
        return planner.steady(request_of(enough - 8 * INPUT_BYTES, device="nvme", **block))

    roomy = steady()
    moved = len(roomy.activations.moved)
    assert moved > 5 and not roomy.activations.on_ssd and roomy.ssd == {"states": 0} and not roomy.time.ssd_written
    taken = roomy.plan.host_bytes - roomy.plan.undo_log_bytes - roomy.plan.spare_state_bytes
    limited = {"host_memory": taken + 3 * INPUT_BYTES + 1_000, "speculate": False}
    tight = steady(**limited)
    activations = tight.activations
    assert tight.shortage() is None and len(activations.moved) == moved
    assert activations.on_ssd == frozenset(sorted(activations.moved)[: moved - 3])
    gone = (moved - 3) * INPUT_BYTES
    assert tight.ssd == {"states": 0, "inputs of blocks": gone}
    assert tight.host["inputs of blocks"] == (3 + buffers_for(LEAST_AHEAD)) * INPUT_BYTES
    assert tight.time.ssd_read == tight.time.ssd_written == gone and tight.time.lanes["ssd"] > 0
    assert tight.ssd_written_a_day > 0
    said = "\n".join(output.as_text(output.as_dict(tight), "narrow"))
    assert f"in host memory, of the first {moved - 3} on SSD (" in said and "written in a day" in said
    # Half of what is there, and never beyond it.
    small = steady(ssd=2 * 2 * INPUT_BYTES, **limited)
    assert len(small.activations.on_ssd) == 2 and len(small.activations.moved) == 5


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_a_kept_block_saves_what_is_recomputed(
    micro_batches: int, planner: Planner, request_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recomputation ends behind the last tensor that backward needs, before the last product of the block."""
    asked: list[Question] = []

    def spy(question: Question) -> Decision:
        asked.append(question)
        return decide(question)

    monkeypatch.setattr(planner_module, "decide", spy)
    request = request_of(24 << 30)
    planner.steady(replace(request, raw={**request.raw, "gradient_accumulation_steps": micro_batches}))
    (question,) = asked
    nothing = Mixture(frozenset(), 0, 0.0)
    cases = Kept(), Kept(frozenset(range(100))), Kept(mixed={each.order: nothing for each in question.keepable})
    none, every, mixed = (question.forecaster.step(question.plan, kept).lanes["compute"] for kept in cases)
    assert none - every == pytest.approx(sum(each.seconds for each in question.keepable), rel=0.01)
    assert mixed == none
