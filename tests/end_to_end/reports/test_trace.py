"""The record of chosen steps: its events are what the statistics count, on every lane, and without it nothing is."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import deepspeed
import pytest
from harness import LAYERS, batches, differences, ds_config, engine_for, llama, states_of, train

from ds_slide.errors import SlideConfigError
from ds_slide.report import chrome, trace
from ds_slide.report.chrome import read
from ds_slide.report.host import DIRECTIONS

pytestmark = pytest.mark.usefixtures("one_rank")

FIRST, LAST, STEPS = 2, 4, 5
ROUNDING_S = 1e-6
LANE_OF = {"h2d of outer modules": "h2d"}


def run(slide: dict[str, Any], **others: Any) -> tuple[list[dict[str, Any]], Any]:
    """Statistics of every step, and what came out."""
    with engine_for(llama(), ds_config(slide, **others)) as engine:
        seen, per_step = [], others.get("accumulation", 1)
        result = train(engine, [])
        for number, batch in enumerate(batches(STEPS * per_step)):
            result.losses += train(engine, [batch]).losses
            if (number + 1) % per_step == 0:
                seen.append(engine.optimizer.slide_stats())
        result.states = states_of(engine.module)
        return seen, result


def events(path: Path) -> list[dict[str, Any]]:
    document = json.loads(path.read_text())
    return [e["args"] for e in document["traceEvents"] if e["ph"] in "Xb" and "args" in e and e["cat"] != chrome.WAIT]


@pytest.mark.parametrize(
    "others",
    [{"clip": 1.0}, {"clip": 0.0}, {"clip": 1.0, "accumulation": 2}],
    ids=["clipping", "updates under backward", "accumulation"],
)
def test_events_are_what_the_statistics_count(tmp_path: Path, others: dict[str, Any]) -> None:
    path = tmp_path / "steps.json"
    seen, result = run({"window": 2, "trace": {"path": str(path), "steps": [FIRST, LAST]}}, **others)
    busy: dict[tuple[int, str], float] = defaultdict(float)
    moved: dict[tuple[int, str], int] = defaultdict(int)
    for event in events(path):
        key = event["step"], LANE_OF.get(event["lane"], event["lane"])
        busy[key] += event["end_s"] - event["begin_s"]
        moved[key] += event["bytes"]
    assert {step for step, _ in busy} == set(range(FIRST, LAST + 1))
    for statistics in seen[FIRST - 1 : LAST]:
        update = statistics["lanes"]["update"]
        assert (0 < update["holding_s"] < update["busy_s"]) if "accumulation" in others else not update["holding_s"]
        for lane, of in statistics["lanes"].items():
            assert of["busy_s"] > 0
            assert busy[statistics["step"], lane] == pytest.approx(of["busy_s"], abs=ROUNDING_S), lane
            # Bytes are counted when a copy is given to the device, on the CPU the moment before it counts as done.
            assert moved[statistics["step"], lane] == of["bytes"]
    without, plain = run({"window": 2}, **others)
    assert without[-1].keys() == seen[-1].keys() and differences(result, plain) == []


def test_events_of_a_lane_follow_each_other_and_name_their_blocks(tmp_path: Path) -> None:
    path = tmp_path / "steps.json"
    run({"window": 2, "trace": {"path": str(path), "steps": [FIRST, LAST]}})
    document = json.loads(path.read_text())
    rows = {e["tid"]: e["args"]["name"] for e in document["traceEvents"] if e["name"] == "thread_name"}
    lanes = [name for name in rows.values() if "waits" not in name]
    assert lanes == ["step", "compute", "h2d", "h2d of outer modules", "d2h", "inputs of blocks", "update", "ssd"]
    spans: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for event in document["traceEvents"]:
        if event["ph"] == "X":
            spans[rows[event["tid"]]].append((event["ts"], event["ts"] + event["dur"]))
    assert spans.keys() >= {"step", "compute", "h2d", "h2d of outer modules", "d2h", "update"}
    for row, of_row in spans.items():
        of_row.sort()
        assert of_row[0][0] >= 0
        assert all(left[1] <= right[0] + 0.01 for left, right in itertools.pairwise(of_row)), row
    blocks = {f"model.layers.{number}" for number in range(LAYERS)}
    named = defaultdict(set)
    for event in events(path):
        named[event["lane"], event["what"]].add(event["unit"])
    for work in (("compute", "forward"), ("compute", "backward"), ("h2d", "weights")):
        assert named[work] == blocks
    assert named["d2h", "gradient"] >= blocks and named["update", "update"] >= blocks
    assert named["h2d of outer modules", "weights"] and "" in named["compute", trace.BETWEEN]


@pytest.mark.parametrize("slide", [{"window": 2}, {"gpu_states": "1GiB"}], ids=["streamed", "resident"])
def test_what_each_block_has_cost_the_host(tmp_path: Path, slide: dict[str, Any]) -> None:
    path = tmp_path / "steps.json"
    run({**slide, "trace": {"path": str(path), "steps": [FIRST, LAST]}}, accumulation=2)
    for step in read(path):
        for what in DIRECTIONS:
            calls = {cost.unit: cost.calls for cost in step.host if cost.what == what}
            assert calls == {f"model.layers.{number}": 2 for number in range(LAYERS)}
        assert all(0.0 < cost.own_s < cost.seconds for cost in step.host)


def test_requests_of_the_disk(tmp_path: Path, disk: Path) -> None:
    path = tmp_path / "steps.json"
    device = {"device": "nvme", "nvme_path": str(disk)}
    zero = {"stage": 3, "offload_optimizer": device, "offload_param": device}
    few = {"host_memory": 0, "window": 2, "ssd_buffers": 2, "weight_buffers": 3}
    seen, _ = run({**few, "trace": {"path": str(path), "steps": [FIRST, LAST]}}, zero_optimization=zero)
    requests = [event for event in events(path) if event["lane"] == "ssd"]
    assert {event["what"] for event in requests} == {"states read", "states written", "weights read", "weights written"}
    assert all(event["end_s"] > event["begin_s"] for event in requests)
    for statistics in seen[FIRST - 1 : LAST]:
        span = sum(e["end_s"] - e["begin_s"] for e in requests if e["step"] == statistics["step"])
        assert span > 0.9 * statistics["ssd"]["busy_s"]  # requests overlap; none of the disk's time is outside of them


def test_off_there_is_no_recorder_and_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with engine_for(llama(), ds_config({})) as engine:
        train(engine, batches(STEPS))
        recorder = engine.optimizer.runtime.parts.context.recorder
        assert recorder._trace is None and recorder.compute is None and recorder.requests.trace is None
        assert all(meter._trace is None for meter in (*recorder.meters.values(), recorder.stall))
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_recorded_before_and_after(tmp_path: Path) -> None:
    path = tmp_path / "step.json"
    with engine_for(llama(), ds_config({"trace": {"path": str(path), "steps": [3, 3]}})) as engine:
        recorder = engine.optimizer.runtime.parts.context.recorder
        recording = []
        for batch in batches(STEPS):
            train(engine, [batch])
            recording.append(recorder.compute is not None)
    assert recording == [False, True, False, False, False]
    assert {event["step"] for event in events(path)} == {3}


def test_an_engine_that_ends_early_writes_what_it_has(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "step.json"
    with engine_for(llama(), ds_config({"trace": {"path": str(path), "steps": [2, 50]}})) as engine:
        train(engine, batches(3))
    assert {event["step"] for event in events(path)} == {2, 3}
    other = tmp_path / "other.json"
    with engine_for(llama(), ds_config({"trace": {"path": str(other), "steps": [9, 9]}})) as engine:
        train(engine, batches(3))
    assert not other.exists() and "has ended before step 9" in caplog.text


def test_an_engine_without_an_optimizer_has_no_steps(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A reference model takes the JSON of the training: the file is not its own."""
    config = ds_config({"trace": {"path": str(tmp_path / "step.json"), "steps": [2, 3]}}, optimizer=None)
    model = llama()
    model.requires_grad_(False)
    engine, *_ = deepspeed.initialize(model=model, config=config)
    try:
        assert type(engine.optimizer).__name__ == "SlideZeroOffload"
        engine.module(**batches(1)[0])
    finally:
        engine.destroy()
    assert "has not been written" not in caplog.text and not list(tmp_path.iterdir())


def test_a_file_that_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for path, said in ((tmp_path, "is a directory"), (tmp_path / "none" / "step.json", "no file can be written in")):
        with (
            pytest.raises(SlideConfigError, match=said),
            engine_for(llama(), ds_config({"trace": {"path": str(path)}})),
        ):
            pass
    late = tmp_path / "late" / "step.json"
    late.parent.mkdir()
    with engine_for(llama(), ds_config({"trace": {"path": str(late)}})) as engine:
        train(engine, batches(2))
        late.parent.rmdir()
        train(engine, batches(3))  # does not end for it
    assert "has not been written" in caplog.text


@pytest.mark.parametrize("steps", [[1, 3], [3, 2], [2, 102], [2], [2, 3, 4], "3", [2.0, 3.0]])
def test_steps_that_cannot_be(steps: Any) -> None:
    from ds_slide.config import SlideConfig

    with pytest.raises(SlideConfigError, match=r"ds_slide\.trace\.steps is .*; expected the first and the last"):
        SlideConfig.from_deepspeed({"ds_slide": {"enabled": True, "trace": {"path": "x.json", "steps": steps}}})
