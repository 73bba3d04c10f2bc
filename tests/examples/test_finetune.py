"""The script end to end, with and without the "ds_slide" key: what it logs, reports, saves and refuses."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from finetune_models import build_model

FIELDS = {"step", "loss", "grad_norm", "lr", "tokens_per_s", "step_s", "slide"}
LANES = {"compute", "h2d", "d2h", "update"}
# The script is the same with either engine, so what takes several runs is repeated on stock DeepSpeed only on demand.
mostly_slide = pytest.mark.parametrize(
    "config", ["slide_cpu.json", pytest.param("stock_cpu.json", marks=pytest.mark.slow)]
)


@pytest.mark.parametrize("config", ["stock_cpu.json", "slide_cpu.json"])
def test_logs_and_reports_each_step(finetune: Any, config: str) -> None:
    arguments = ("--steps", "3", "--accumulation", "2", "--eval-every", "2", "--gradient-checkpointing")
    finished = finetune.run(config, *arguments)

    assert finished.column("step") == [1, 2, 3]
    assert all(line.keys() - {"eval_loss"} == FIELDS for line in finished.log)
    assert ["eval_loss" in line for line in finished.log] == [False, True, False]
    assert finished.column("lr") == pytest.approx([1e-4, 1e-4, 1.9e-4])
    # Untrained, a byte model of 264 tokens starts near ln 264 = 5.58.
    assert finished.column("loss")[0] == pytest.approx(math.log(264), abs=0.5)
    for line in finished.log:
        assert math.isfinite(line["grad_norm"]) and line["grad_norm"] > 0
        assert line["tokens_per_s"] == pytest.approx(2 * 2 * 32 / line["step_s"])
    assert "5,970,176 parameters, 1 rank(s), 3 steps" in finished.output
    assert "peak resident" in finished.output and "stock ZeRO-3 offload needs" not in finished.output

    if config == "stock_cpu.json":
        assert finished.column("slide") == [{}, {}, {}]
        assert "stock DeepSpeed, " in finished.output
    else:
        last = finished.log[-1]["slide"]
        assert last["bound_lane"] in LANES and last["lanes"].keys() == LANES
        assert 0 < last["bound_s"] <= last["step_s"]
        # Two slots and the outer modules: less than the 24 MB of fp32 weights, or nothing slides.
        assert last["memory"]["gpu_bytes"] < 4 * last["memory"]["parameters"]
        assert all(part in finished.output for part in ("DS-Slide, ", "bound by", "B/parameter"))


def test_a_run_in_bf16_is_compared_with_stocks_host_memory(finetune: Any) -> None:
    finished = finetune.run("slide_bf16.json", "--steps", "3")
    assert math.isfinite(finished.log[0]["loss"])
    assert "stock ZeRO-3 offload needs 148.0 MiB (26 B/parameter, measured)" in finished.output


@mostly_slide
def test_resumes_bit_for_bit(finetune: Any, four_steps: Any, config: str, tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    before = finetune.run(config, "--steps", "2", "--save", checkpoint)
    after = finetune.run(config, "--steps", "4", "--load", checkpoint)
    assert after.column("step") == [3, 4]
    for field in ("loss", "grad_norm", "lr"):
        assert before.column(field) + after.column(field) == four_steps(config).column(field)


def test_resume_with_other_data_is_refused() -> None:
    from finetune import changes

    saved = {"source": None, "seed": 0, "batch": 8}
    assert changes(saved, dict(saved)) == ""
    assert changes(saved, saved | {"seed": 1, "source": "a.txt"}) == "source None -> 'a.txt', seed 0 -> 1"


@pytest.mark.slow  # a minute: two ranks, twice
@mostly_slide
def test_two_ranks_share_the_data(finetune: Any, config: str) -> None:
    finished = finetune.run(config, "--steps", "2", ranks=2)
    single = finetune.run(config, "--steps", "2", "--batch", "4")
    # Rank r takes rows 2r and 2r+1 of what one rank with batch 4 takes: the same mean but for the order of the sum, in
    # bf16 forward passes of other shapes (8 bits, so 0.4 % an element, averaged over 128 tokens or 6 M gradients).
    assert finished.column("loss")[0] == pytest.approx(single.column("loss")[0], rel=1e-3)
    assert finished.column("grad_norm")[0] == pytest.approx(single.column("grad_norm")[0], rel=1e-2)


@mostly_slide
def test_local_directory_and_zero_init(finetune: Any, four_steps: Any, config: str, tmp_path: Path) -> None:
    directory = tmp_path / "model"
    build_model("tiny", dtype=torch.float32, device="cpu", seed=0).save_pretrained(directory)
    stored = finetune.run(config, "--steps", "2", "--model", directory, "--zero-init")
    assert stored.column("loss") == four_steps(config).column("loss")[:2]


@pytest.mark.slow  # half a minute
@mostly_slide
def test_zero_init_initialises_a_preset(finetune: Any, config: str) -> None:
    """Weights that zero.Init left uninitialised or with torch's defaults would start far from ln 264."""
    finished = finetune.run(config, "--steps", "1", "--zero-init")
    assert finished.column("loss")[0] == pytest.approx(math.log(264), abs=0.5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "qwen2.5_3b"], "did you mean 'qwen2.5-3b'?"),
        (["--deepspeed_config", "none.json"], "none.json"),
        (["--seq", "500000"], "a smaller --batch or --seq"),
    ],
)
def test_bad_input_is_refused_in_a_sentence(finetune: Any, arguments: list[str], message: str) -> None:
    refused = finetune("stock_cpu.json", "--steps", "1", *arguments)
    assert refused.status != 0
    assert message in refused.output
    assert "Traceback" not in refused.output
