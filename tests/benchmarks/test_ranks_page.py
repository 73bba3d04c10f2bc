"""What the page of rows on several GPUs computes from records, and what a run that goes on leaves out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import ranks_page
import several_gpus
from settings import Setting


def record(setting: Setting, tokens: list[list[int]], step_s: list[float], **others: Any) -> dict[str, Any]:
    timed = sorted(step_s[setting.warmup :])
    return {
        "setting": vars(setting),
        "ranks": len(tokens),
        "status": "ok",
        "tokens": tokens,
        "step_s_all": step_s,
        "step_s": timed[len(timed) // 2],
        **others,
    }


def test_equal_lengths_compare_by_their_throughput() -> None:
    one = record(Setting("slide", steps=3, warmup=1), [[100] * 4], [9.0, 1.0, 1.0, 1.0])
    four = record(Setting("slide", steps=2, warmup=1), [[100] * 3] * 4, [9.0, 1.25, 1.25])
    assert ranks_page.efficiencies(four, [one, four]) == "0.800 of 1"
    assert ranks_page.efficiencies(one, [one, four]) == ""


def test_varying_lengths_compare_by_the_busiest_rank() -> None:
    varying: dict[str, Any] = {"shortest": 1, "warmup": 0}
    # 0.1 s and 0.01 s a token.
    one = record(Setting("slide", steps=3, **varying), [[10, 20, 40]], [0.2, 0.3, 0.5])
    two = record(Setting("slide", steps=3, **varying), [[10, 90, 10], [90, 10, 30]], [2.0, 2.0, 2.0])
    assert ranks_page.expected_s(one, two) == pytest.approx(1.0)  # of 90 tokens, in two of three steps
    assert ranks_page.efficiencies(two, [one]) == "0.500 of 1"


def test_losses_compare_with_stocks_of_the_same_ranks_and_setting() -> None:
    ours = record(Setting("slide", steps=2, warmup=0), [[1, 1]] * 2, [1.0, 1.0], losses=[5.0, 4.0, 3.0])
    stock = record(Setting("stock", steps=1, warmup=0), [[1]] * 2, [1.0], losses=[5.0, 4.5])
    clipped_less = record(Setting("stock", steps=1, warmup=0, clip=0.0), [[1]] * 2, [1.0], losses=[0.0, 0.0])
    on_one = record(Setting("stock", steps=1, warmup=0), [[1]], [1.0], losses=[0.0, 0.0])
    assert ranks_page.largest_difference(ours, [clipped_less, on_one, stock]) == "5.00e-01 in 2 steps"
    assert ranks_page.largest_difference(ours, [clipped_less, on_one]) == ""
    assert ranks_page.largest_difference(stock, [ours, stock]) == ""


def test_what_has_begun_is_left_out_and_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.jsonl"
    assert several_gpus.begun(out) == []
    first, second = several_gpus.side_by_side(2)[:2]
    of_first: dict[str, Any] = {"setting": vars(first), "ranks": 4}
    of_second: dict[str, Any] = {"setting": vars(second), "ranks": 4}
    lines = [
        {**of_first, "status": "begun"},
        {**of_first, "status": "failed", "error": "E"},
        {**of_second, "status": "begun"},
    ]
    out.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert of_first in several_gpus.begun(out) and of_second in several_gpus.begun(out)
    assert {**of_first, "ranks": 2} not in several_gpus.begun(out)
    ranks_page.print_settings(lines)
    said = capsys.readouterr().out
    assert f"{ranks_page.words(lines[0])}: E" in said
    assert f"{ranks_page.words(lines[2])}: no end" in said
