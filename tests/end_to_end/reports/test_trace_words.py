"""`ds-slide trace` of engines in which one lane is slow on purpose: its words name that lane."""

from __future__ import annotations

import functools
import json
import math
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trace_worker
import two_ranks
from harness import batches, ds_config, engine_for, llama, on_ssd, train

from ds_slide.cli.__main__ import main
from ds_slide.report.causes import LargestWait, lane_shares, largest_waits
from ds_slide.report.chrome import RecordedStep, read
from ds_slide.runtime.core.device import Device
from ds_slide.runtime.gradients.sources import Packed
from ds_slide.runtime.updates.apply import HostUpdates
from ds_slide.runtime.weights.uploads import Uploads

pytestmark = pytest.mark.usefixtures("one_rank")

STEP, STEPS = 4, 4
SLOW_S = 0.03
"""For each block: six of them take longer than all that the other lanes do in a step."""
BLOCKS = {f"model.layers.{number}" for number in range(6)}

Slow = Callable[[Any, pytest.MonkeyPatch], None]


def slowly(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def slow(*arguments: Any, **named: Any) -> Any:
        time.sleep(SLOW_S)
        return call(*arguments, **named)

    return slow


def slow_updates(_: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HostUpdates, "run", slowly(HostUpdates.run))


def slow_copies_up(_: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Uploads, "fill", slowly(Uploads.fill))


def slow_copies_down(_: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Packed, "copy", slowly(Packed.copy))


def slow_disk(parts: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(parts.ssd.store, "_delay", lambda: time.sleep(SLOW_S))


def recorded(
    path: Path, slow: Slow, patch: pytest.MonkeyPatch, slide: dict[str, Any], disk: Path | None = None
) -> RecordedStep:
    config = ds_config({"window": 2, "trace": {"path": str(path), "steps": [2, STEP]}, **slide})
    with engine_for(llama(num_hidden_layers=6), config if disk is None else on_ssd(config, disk)) as engine:
        slow(engine.optimizer.runtime.parts, patch)
        train(engine, batches(STEPS))
    return read(path)[-1]


@pytest.mark.parametrize(
    ("slow", "lane", "what", "phase"),
    [
        (slow_updates, "update", {"the update of {unit}"}, "in forward"),
        (slow_copies_up, "h2d", {"the weights of {unit} in a slot of the window"}, "in forward"),
        # For the one while backward goes on, for the other at its end: how much of each is how fast compute is.
        (slow_copies_down, "d2h", {"a GPU buffer for a gradient", "what the d2h lane was given"}, "backward"),
    ],
    ids=["update", "h2d", "d2h"],
)
def test_the_largest_wait_is_for_the_lane_that_is_the_bound(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    slow: Slow,
    lane: str,
    what: set[str],
    phase: str,
) -> None:
    path = tmp_path / "step.json"
    step = recorded(path, slow, monkeypatch, {"update_passes": 1})
    assert step.bound_lane == lane and step.bound_s > 6 * SLOW_S
    waits = largest_waits(step)
    largest = waits[0]
    assert largest.waiter == "compute" and largest.what in what and phase in largest.phase
    assert set(largest.units) <= BLOCKS
    assert sum(wait.seconds for wait in waits if wait.waiter == "compute" and wait.what in what) > 2 * SLOW_S
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["trace", str(path)])
    said = capsys.readouterr().out
    assert f"for which {lane} was busy" in said and largest.sentence in said


def test_on_ssd_the_wait_is_followed_to_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disk: Path) -> None:
    """Compute waits for weights, h2d for their update, and the update for states that are read."""
    few = {"host_memory": 0, "ssd_buffers": 2, "weight_buffers": 3}
    step = recorded(tmp_path / "step.json", slow_disk, monkeypatch, few, disk)
    waits = largest_waits(step)
    assert "SSD" in waits[0].what and waits[0].waiter == "compute"
    of_disk = [wait.seconds for wait in waits if "SSD" in wait.what]
    assert sum(of_disk) > 0.5 * sum(wait.seconds for wait in waits)
    assert {wait.waiter for wait in step.waits} >= {"compute", "h2d"}
    # A wait of a lane for the disk names the block.
    read_by_lane = {wait.what for wait in step.waits if wait.what.endswith("to be read from SSD")}
    assert read_by_lane <= {f"the weights of {block} to be read from SSD" for block in BLOCKS}


def test_shares_add_up_to_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = recorded(tmp_path / "step.json", slow_updates, monkeypatch, {})
    for share in lane_shares(step):
        assert share.busy_s + share.waited_s + share.idle_s == pytest.approx(step.seconds, rel=1e-3), share.lane
        assert min(share.busy_s, share.waited_s, share.idle_s) >= 0.0


def test_two_ranks_have_one_clock_and_name_each_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    two_ranks.run("trace_worker.py", tmp_path)
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["trace", str(tmp_path / "step.json"), "--json"])
    first, second = json.loads(capsys.readouterr().out)
    assert (first["rank"], second["rank"]) == (0, 1)
    waits = [LargestWait(**{key: wait[key] for key in wait if key != "sentence"}) for wait in first["waits"]]
    assert waits[0].what.startswith("the other ranks in ") and waits[0].seconds > 0.5 * trace_worker.LATE_S
    assert not any("collective " in wait.what for wait in waits)
    paths = tmp_path / "step.rank0.json", tmp_path / "step.rank1.json"
    begins, ends = zip(*(wait_for_others(path, "the gradient") for path in paths), strict=True)
    # Rank 0 has waited for rank 1 before; the collective begins and ends on both at once.
    for moments in (begins, ends):
        assert abs(moments[1] - moments[0]) < 0.5 * trace_worker.LATE_S


def wait_for_others(path: Path, what: str) -> tuple[float, float]:
    """Begin and end, in seconds of the clock of the machine, of the first wait for other ranks in `what`."""
    events = json.loads(path.read_text())["traceEvents"]
    first = next(e for e in events if e["name"].startswith("waits for the other ranks") and what in e["name"])
    return first["ts"] / 1e6, (first["ts"] + first["dur"]) / 1e6


def test_what_perfetto_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disk: Path) -> None:
    """By the description of the trace event format."""
    path = tmp_path / "step.json"
    recorded(path, slow_disk, monkeypatch, {"host_memory": 0, "ssd_buffers": 2, "weight_buffers": 3}, disk)
    events = json.loads(path.read_text())["traceEvents"]
    names = {event["tid"] for event in events if event["ph"] == "M" and event["name"] == "thread_name"}
    timed = [event for event in events if event["ph"] != "M"]
    open_: dict[int, str] = {}
    ends: dict[int, list[float]] = defaultdict(list)
    assert [event["ts"] for event in timed] == sorted(event["ts"] for event in timed)
    for event in timed:
        assert event["ph"] in "Xbe" and event["name"] and event["cat"]
        assert type(event["pid"]) is int and event["tid"] in names
        assert math.isfinite(event["ts"]) and event["ts"] > 0
        if event["ph"] == "X":
            end = event["ts"] + event["dur"]
            while ends[event["tid"]] and ends[event["tid"]][-1] <= event["ts"] + 1e-3:
                ends[event["tid"]].pop()
            # One row's spans follow each other, or lie in each other as a whole.
            assert event["dur"] >= 0 and all(end <= outer + 1e-3 for outer in ends[event["tid"]])
            ends[event["tid"]].append(end)
        elif event["ph"] == "b":
            assert event["id"] not in open_
            open_[event["id"]] = event["name"]
        else:
            assert open_.pop(event["id"]) == event["name"]
    assert not open_


def test_ranges_of_a_profiler_begin_and_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: dict[int, str] = {}
    ended: list[int] = []
    monkeypatch.setattr(Device, "begin_range", lambda _, name: begun.setdefault(len(begun), name) and len(begun) - 1)
    monkeypatch.setattr(Device, "end_range", lambda _, of: None if of is None else ended.append(of))
    config = ds_config({"window": 2, "trace": {"path": str(tmp_path / "step.json"), "steps": [3, 4]}})
    with engine_for(llama(num_hidden_layers=6), config) as engine:
        train(engine, batches(2)[:1])
        assert not begun
        train(engine, batches(5))
    assert sorted(ended) == sorted(begun)
    names = set(begun.values())
    assert {name for name in names if name.startswith("step")} == {"step 3", "step 4"}
    for block in BLOCKS:
        assert {f"forward {block}", f"backward {block}", f"update {block}"} <= names
