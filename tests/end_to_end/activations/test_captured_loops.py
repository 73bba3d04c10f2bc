"""Loops as people write them, around blocks that replay recordings: the bits of blocks that run as they are written."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from captured_loops import LOOPS, OTHER_LOOPS
from captured_runs import RESIDENT, STREAMED, Train, both, counted_replays, one, weights_as_in_graphs
from harness import Result, differences

from ds_slide.runtime.captured import shapes as shapes_module
from ds_slide.runtime.captured.graphs import Graph

pytest.importorskip("transformers")
pytestmark = [pytest.mark.usefixtures("one_rank")]


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[Graph]:
    """All replays, of forwards and backwards."""
    return counted_replays(monkeypatch)


@functools.cache
def as_written(loop: Train) -> Result:
    return one(loop, slide=STREAMED, wanted=False)


@pytest.mark.by_turns(2)
@pytest.mark.parametrize("slide", [RESIDENT, STREAMED], ids=["resident", "streamed"])
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_loops_as_people_write_them(
    loop: Train, slide: dict[str, Any], replays: list[Graph], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks are kept, or recomputed."""
    expected = as_written(loop)
    assert not replays
    if slide is STREAMED:
        weights_as_in_graphs(monkeypatch)
    result = one(loop, slide=slide, wanted=True)
    assert differences(result, expected) == []
    assert replays


@pytest.mark.parametrize("loop", OTHER_LOOPS)
def test_loops_that_change_what_is_recorded(loop: str, replays: list[Graph], monkeypatch: pytest.MonkeyPatch) -> None:
    weights_as_in_graphs(monkeypatch)
    monkeypatch.setattr(shapes_module, "RECORDED", 2)
    expected, result = both(OTHER_LOOPS[loop], slide=STREAMED)
    assert differences(result, expected) == []
    assert bool(replays) == ("records" not in loop)
