"""Statistics in DeepSpeed's monitors and log."""

from __future__ import annotations

import csv
import logging
import math
import re
from pathlib import Path
from typing import Any

import pytest
from harness import BATCH, batches, ds_config, engine_for, llama, train

import ds_slide
from ds_slide.report.log import size

pytestmark = pytest.mark.usefixtures("one_rank")

STEPS = 4
LANES = ("compute", "h2d", "d2h", "update")


def engine_of(slide: dict[str, Any] | None = None, *, accumulation: int = 1, **others: Any) -> Any:
    return engine_for(llama(num_hidden_layers=2), ds_config(slide, accumulation=accumulation, **others))


def csv_monitor(folder: Path) -> dict[str, Any]:
    return {"csv_monitor": {"enabled": True, "output_path": str(folder), "job_name": "run"}}


def rows(folder: Path, name: str) -> list[tuple[int, float]]:
    with open(folder / "run" / f"Slide_{name}.csv", newline="") as file:
        header, *lines = csv.reader(file)
    assert header == ["step", name]
    return [(int(samples), float(value)) for samples, value in lines]


def test_events_of_every_step(tmp_path):
    with engine_of({}, accumulation=2, **csv_monitor(tmp_path)) as engine:
        statistics = []
        for batch in batches(2 * STEPS):
            train(engine, [batch])
            statistics.append(engine.optimizer.slide_stats())
    # The first step has no beginning: books are closed from one step to the next.
    samples = [2 * BATCH * step for step in range(2, STEPS + 1)]
    written = statistics[3::2]
    for name in ("step_s", "bound_s", "efficiency"):
        assert rows(tmp_path, name) == [(x, of[name]) for x, of in zip(samples, written, strict=True)]
    for lane in LANES:
        for name in ("busy_s", "bytes"):
            expected = [(x, of["lanes"][lane][name]) for x, of in zip(samples, written, strict=True)]
            assert rows(tmp_path, f"{lane}_{name}") == expected
    assert all(value > 0 for _, value in rows(tmp_path, "h2d_bytes"))
    assert (tmp_path / "run" / "Train_Samples_lr.csv").exists()  # DeepSpeed's own events are there as before


def test_what_a_disk_is_worn_by(tmp_path, log):
    config = csv_monitor(tmp_path) | {"steps_per_print": 1}
    disk = {"device": "nvme", "nvme_path": str(tmp_path)}
    zero = {"stage": 3, "offload_optimizer": disk, "offload_param": disk}
    with engine_of({"host_memory": 0}, zero_optimization=zero, **config) as engine:
        train(engine, batches(STEPS))
        ssd = engine.optimizer.slide_stats()["ssd"]
    for name in ("written_bytes", "written_tb_per_day"):
        assert rows(tmp_path, f"ssd_{name}")[-1] == (BATCH * STEPS, ssd[name])
    # Of one step it may be zero: a busy machine has written what the last update changed before that step ended.
    assert any(value > 0 for _, value in rows(tmp_path, "ssd_written_tb_per_day"))
    assert [line for line in log if line.endswith(f"SSD {ssd['written_tb_per_day']:.1f} TB/day written")]


def test_a_skipped_step_writes_nothing(tmp_path):
    with engine_of({}, **csv_monitor(tmp_path)) as engine:
        train(engine, batches(2))
        engine.backward(engine(**batches(1)[0]).loss * math.inf)
        engine.step()
        assert engine.optimizer.overflow
    assert [samples for samples, _ in rows(tmp_path, "step_s")] == [2 * BATCH]


@pytest.fixture
def log(caplog):
    """Lines of the logger "ds_slide"."""
    caplog.set_level(logging.INFO, "ds_slide")
    return Lines(caplog)


class Lines:
    """The lines so far, as a sequence that grows."""

    def __init__(self, caplog):
        self._caplog = caplog

    def __iter__(self):
        return (record.getMessage() for record in self._caplog.records if record.name == "ds_slide")


def test_a_line_every_steps_per_print(log):
    with engine_of({}, steps_per_print=2) as engine:
        train(engine, batches(5))
    line = r"step={}, time=\d+\.\d{{3}} s, bound=\d+\.\d{{3}} s \({}\), efficiency=\d+\.\d%$"
    start, *own = log
    assert start.startswith("DS-Slide ")
    assert len(own) == 2
    for step, text in zip((2, 4), own, strict=True):
        assert re.match(line.format(step, f"({'|'.join(LANES)})"), text), text


def test_a_line_after_step_10_whatever_the_interval(log):
    """accelerate sets an infinite interval."""
    with engine_of({}, steps_per_print=float("inf")) as engine:
        train(engine, batches(11))
    _start, only = log
    assert only.startswith("step=10, ")


def test_one_line_at_the_start(log, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # nothing was measured
    with engine_of({"window": 2}) as engine:
        parameters = sum(parameter.ds_numel for parameter in engine.module.parameters())
        slots = 2 * 2 * sum(parameter.ds_numel for parameter in engine.module.model.layers[0].parameters())
    assert list(log) == [
        f"DS-Slide {ds_slide.__version__}: {parameters:,} parameters in 2 blocks and the modules outside them, "
        f"window of 2 slots ({size(slots)}); states: 0 bytes on the GPU, {size(12 * parameters)} in host memory, "
        "0 bytes on SSD; ranks: 1; gradients wait for the step; kernels: none"
    ]


def test_nothing_without_the_key(tmp_path, log):
    with engine_of(None, steps_per_print=1, **csv_monitor(tmp_path)) as engine:
        train(engine, batches(2))
        assert "_take_model_step" not in vars(engine)
    assert not list(tmp_path.rglob("Slide*"))
    assert not list(log)


def test_reporting_does_not_keep_the_engine(tmp_path):
    with engine_of({}, **csv_monitor(tmp_path)) as engine:
        train(engine, batches(2))
    reporting = vars(engine)["_take_model_step"]
    assert all(cell.cell_contents is not engine for cell in reporting.__closure__), "the engine would own itself"
