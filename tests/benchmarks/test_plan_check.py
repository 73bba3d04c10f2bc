"""The records of this tree beside their forecasts: the errors that the committed page shows do not grow unseen."""

from __future__ import annotations

from pathlib import Path

import plan_check
import pytest

from ds_slide.cli.planning.planner import Planner
from ds_slide.plan.ceilings.figures import read_ceilings
from ds_slide.plan.forecast import Room

ROOT = Path(__file__).resolve().parents[2]
MOST = {"GPU peak": 0.016, "host peak": 0.03, "step": 0.15}


def test_forecasts_are_near_the_records() -> None:
    records = list(filter(plan_check.usable, plan_check.lines_of(str(ROOT / plan_check.RECORDS[0]))))
    planner, ceilings = Planner(), read_ceilings("h200-16-cores")
    assert ceilings.gpu is not None
    room = Room(ceilings.gpu.memory_bytes, ceilings.cpu.memory_bytes)
    compared = [plan_check.compare(planner, record, ceilings, room) for record in records]
    assert len(compared) == 11
    for each in compared:
        for figure, most in MOST.items():
            assert each.error(figure) == pytest.approx(0, abs=most), (each.what, figure)


def test_the_settings_that_are_run_cover_what_was_asked_for() -> None:
    settings = list(plan_check.checks("DIR"))
    assert len(settings) >= 12 and len({setting.command() for setting in settings}) == len(settings)
    assert {setting.seq for setting in settings} >= {512, 32_768}
    assert {setting.grad_accum for setting in settings} >= {1, 4}
    assert sum(setting.gpu_fraction < 1 for setting in settings) == 3
