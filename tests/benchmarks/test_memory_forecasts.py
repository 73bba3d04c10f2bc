"""Bytes of memory forecasts, which no change of the model of a step may move."""

from __future__ import annotations

import json
from pathlib import Path

import plan_check
import pytest

from ds_slide.cli.planning.model import ModelShape
from ds_slide.cli.planning.planner import Planner, Request
from ds_slide.plan.ceilings import read_ceilings

HERE = Path(__file__).resolve().parent
RECORDS = HERE.parents[1] / "benchmarks/results/2026-11-26_nvidia-h100_forecast.jsonl"
BYTES = HERE / "memory_forecasts.json"
"""Of the first steps, by tier and by what they are for, as on 26 November."""


@pytest.mark.parametrize("every", [6, pytest.param(1, marks=pytest.mark.slow)])
def test_the_first_steps_take_the_same_bytes_as_before(every: int) -> None:
    planner, found = Planner(), {}
    records = list(plan_check.with_ceilings(plan_check.lines_of(str(RECORDS)), read_ceilings("h200-16-cores")))
    for record, ceilings in records[::every]:
        setting, model = record["setting"], record["setting"]["model"]
        shape, room = ModelShape(model, plan_check.shape_config(model)), plan_check.room_of(record, ceilings)
        raw, batch, seq = record["deepspeed_config"], setting["batch"], setting["seq"]
        forecast = planner.forecast(Request(shape, raw, batch, seq, room, ceilings))
        tiers = {"gpu": forecast.gpu, "host": forecast.host, "ssd": forecast.ssd}
        found[record["command"]] = {**tiers, "gpu peak": forecast.gpu_peak_allocated}
    expected = json.loads(BYTES.read_text())
    assert len(records) == len(expected)
    assert found == {command: expected[command] for command in found}
