"""`ds-slide trace` on files that are small, damaged or of something else; engines are in tests/end_to_end."""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from ds_slide.report import chrome
from ds_slide.report.trace import Clock, Trace, TraceRequest
from ds_slide.report.waits import HostWait, NoRanges, Waits
from ds_slide.runtime.core.device import Marker

FIRST, LAST = 3, 4
SECONDS = 2.0
SVG = "{http://www.w3.org/2000/svg}"
AT = 100.0
"""Of the clock, when the first step begins."""


def write(path: Path, rank: int = 0, steps: tuple[int, ...] = (FIRST, LAST)) -> None:
    """Steps in each of which the compute stream waits half a second for a block whose update takes as long."""
    trace = Trace(TraceRequest(path, steps[0], steps[-1]), ["outer", "block.0"], ["h2d", "update"])
    waits = Waits(NoRanges())
    waits.is_recording = True
    ready, updated = "the weights of block.0 in a slot of the window", "the update of block.0"
    waits.keepers |= {ready: "ds_slide-h2d", updated: "ds_slide-update"}
    trace.begin(AT)
    for number in steps:
        begin = AT + SECONDS * (number - FIRST)
        trace.compute.enter(("forward", 1), Marker(at=begin + 0.5))
        trace.stall.add_interval(Marker(at=begin + 0.5), Marker(at=begin + 1.0), 0, (ready, -1))
        trace.compute.leave(("forward", 1), Marker(at=begin + 1.5))
        trace.lanes["update"].add_span(begin, begin + 1.0, 7, ("update", 1))
        trace.lanes["h2d"].add_stream_wait(Marker(at=begin), Marker(at=begin + 0.25), "a slot of the window")
        waits._ended.append(HostWait("ds_slide-h2d", updated, begin, begin + 1.0))
        for lane in (*trace.lanes.values(), trace.stall, trace.requests, trace.compute):
            lane.cut()
        lanes = {"compute": {"busy_s": 1.5}, "update": {"busy_s": 1.0}}
        trace.end_step(begin + SECONDS, {"step": number, "bound_s": 1.5, "bound_lane": "compute", "lanes": lanes})
    chrome.write(trace, Clock(Marker(at=AT), AT), waits, rank=rank)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write(tmp_path / "step.json")
    return tmp_path / "step.json"


def refused(ran: Any) -> str:
    assert (ran.code, ran.out) == (1, "")
    return ran.error


def test_what_it_says(path: Path, ds_slide: Callable[..., Any]) -> None:
    assert ds_slide("trace", path).out.splitlines() == [
        "rank 0, step 4: T = 2.00 s; T* = 1.50 s, for which compute was busy; T*/T = 75%",
        "lane                        busy        waited    idle",
        "compute                   1.50 s   75%     25%      0%",
        "h2d                       0.0 ms    0%     50%     50%",
        "update                    1.00 s   50%      0%     50%",
        "compute waited 0.50 s for the update of block.0 in forward",
    ]


def test_the_same_as_json(path: Path, ds_slide: Callable[..., Any]) -> None:
    (figures,) = ds_slide("trace", path, "--step", FIRST, "--json").answer
    assert (figures["step"], figures["step_s"], figures["bound_s"]) == (FIRST, SECONDS, 1.5)
    assert figures["lanes"][0] == {"lane": "compute", "busy_s": 1.5, "waited_s": 0.5, "idle_s": 0.0}
    (wait,) = figures["waits"]
    assert wait["units"] == {"block.0": 0.5} and wait["sentence"].endswith("the update of block.0 in forward")


def test_one_name_stands_for_the_files_of_all_ranks(tmp_path: Path, ds_slide: Callable[..., Any]) -> None:
    for rank in (10, 0, 2):
        write(tmp_path / f"step.rank{rank}.json", rank)
    (tmp_path / "step.rank.json").touch()
    (tmp_path / "step.rank1.json.partial").touch()
    said = ds_slide("trace", tmp_path / "step.json").out.splitlines()
    assert [line.split(",")[0] for line in said if line.startswith("rank")] == ["rank 0", "rank 2", "rank 10"]


def test_a_picture_shows_lanes_blocks_and_waits(path: Path, tmp_path: Path, ds_slide: Callable[..., Any]) -> None:
    pytest.importorskip("matplotlib")
    drawn = tmp_path / "step.svg"
    assert ds_slide("trace", path, "--plot", drawn).code == 0
    root = ElementTree.fromstring(drawn.read_text())
    texts = [element.text for element in root.iter(f"{SVG}text")]
    assert {"compute", "h2d", "update"} <= set(texts)
    assert texts.count("the update of block.0") == 2  # of the compute lane, and of h2d behind its own copies
    titled = [group for group in root.iter(f"{SVG}g") if group.find(f"{SVG}title") is not None]
    styles = {group.findtext(f"{SVG}title"): group.find(f"{SVG}path").get("style") for group in titled}
    assert styles["forward block.0, 0.50 s"] == styles["update block.0, 1.00 s"]


def test_a_png(path: Path, tmp_path: Path, ds_slide: Callable[..., Any]) -> None:
    pytest.importorskip("matplotlib")
    drawn = tmp_path / "step.png"
    assert ds_slide("trace", path, "--plot", drawn).code == 0
    assert drawn.read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib(path: Path, monkeypatch: pytest.MonkeyPatch, ds_slide: Callable[..., Any]) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    ran = ds_slide("trace", path, "--plot", path.with_suffix(".png"))
    assert ran.code == 1 and 'pip install "ds-slide[plot]"' in ran.error
    assert "T*/T" in ran.out  # the words are said all the same


@pytest.mark.parametrize("name", ["none/picture.svg", "picture.none"])
def test_a_picture_that_cannot_be_written(path: Path, tmp_path: Path, name: str, ds_slide: Callable[..., Any]) -> None:
    pytest.importorskip("matplotlib")
    ran = ds_slide("trace", path, "--plot", tmp_path / name)
    assert ran.code == 1 and "cannot be written: " in ran.error


def test_files_that_are_no_traces(path: Path, tmp_path: Path, ds_slide: Callable[..., Any]) -> None:
    other = tmp_path / "other.json"
    for text, sentence in (
        ("", "is not JSON"),
        (path.read_text()[:-9], "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[]", "is not a trace of DS-Slide"),
        ('{"traceEvents": []}', "is not a trace of DS-Slide"),
        ('{"otherData": {"ds_slide_trace": 1}}', "has format 1, not 2"),
        ('{"otherData": {"ds_slide_trace": 2}}', "is damaged: KeyError at 'traceEvents'"),
    ):
        other.write_text(text)
        assert f"{other} {sentence}" in refused(ds_slide("trace", other))
    other.write_bytes(b"\xff\xfe")
    assert "cannot be read" in refused(ds_slide("trace", other))
    assert "cannot be read" in refused(ds_slide("trace", tmp_path))
    assert "does not exist, nor a file of a rank (none.rank0.json)" in refused(
        ds_slide("trace", tmp_path / "none.json")
    )
    assert "step 7 is not in the trace, which has steps 3 to 4" in refused(ds_slide("trace", path, "--step", "7"))


@pytest.mark.thinned(3)
@pytest.mark.parametrize("third", range(3))
def test_damage_ends_in_a_sentence(third: int, tmp_path: Path, ds_slide: Callable[..., Any]) -> None:
    """Whatever value is lost or replaced: the file is read, or refused in one sentence. Every third damage."""
    damaged, ends, draws = tmp_path / "damaged.json", 0, find_spec("matplotlib") is not None
    write(damaged, steps=(FIRST,))
    text = damaged.read_text()
    for number, (change, where) in enumerate(list(changes(json.loads(text)))[third::3]):
        broken = json.loads(text)
        change(broken)
        damaged.write_text(json.dumps(broken))
        ran = ds_slide("trace", damaged, *(["--plot", tmp_path / "step.svg"] if draws and number % 30 == 0 else []))
        if ran.code:
            assert ran.error.startswith(f"ds-slide trace: {damaged} "), where
            ends += 1
    assert ends > 16


Change = Callable[[Any], None]


def changes(document: Any, way: tuple[Any, ...] = ()) -> Iterator[tuple[Change, tuple[Any, ...]]]:
    """Every value lost, and every value replaced by one of another type."""
    for key in document if isinstance(document, dict) else range(len(document)):
        for other in (None, [], "text", -1):
            yield lambda broken, other=other, key=key: of(broken, way).__setitem__(key, other), (*way, key, other)
        yield lambda broken, key=key: of(broken, way).__delitem__(key), (*way, key)
        if isinstance(document[key], dict | list):
            yield from changes(document[key], (*way, key))


def of(document: Any, way: tuple[Any, ...]) -> Any:
    for key in way:
        document = document[key]
    return document
