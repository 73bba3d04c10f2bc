"""Bytes of memory forecasts, which no change of the model of a step may move."""

from __future__ import annotations

import json
from pathlib import Path

import plan_check

from ds_slide.cli.planning.model import ModelShape
from ds_slide.cli.planning.planner import Planner, Request
from ds_slide.plan.ceilings import read_ceilings

HERE = Path(__file__).resolve().parent
RECORDS = HERE.parents[1] / "benchmarks/results/2026-11-26_nvidia-h100_forecast.jsonl"
BYTES = HERE / "memory_forecasts.json"
"""Of the first steps, by tier and by what they are for, as on 26 November."""


def test_the_first_steps_take_the_same_bytes_as_before() -> None:
    planner, found = Planner(), {}
    for record, ceilings in plan_check.with_ceilings(plan_check.lines_of(str(RECORDS)), read_ceilings("h200-16-cores")):
        setting, model = record["setting"], record["setting"]["model"]
        shape, room = ModelShape(model, plan_check.shape_config(model)), plan_check.room_of(record, ceilings)
        raw, batch, seq = record["deepspeed_config"], setting["batch"], setting["seq"]
        forecast = planner.forecast(Request(shape, raw, batch, seq, room, ceilings))
        tiers = {"gpu": forecast.gpu, "host": forecast.host, "ssd": forecast.ssd}
        found[record["command"]] = {**tiers, "gpu peak": forecast.gpu_peak_allocated}
    assert found == json.loads(BYTES.read_text())
