"""Two ranks over gloo: backwards that are not meant for the next step, of one rank alone or of both."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from typing import Any

import pytest
import two_ranks
from doubtful_ranks_worker import CLIPS, LOOPS, whole
from loops import assert_right, run_loop

WORKER = "doubtful_ranks_worker.py"


@pytest.fixture(scope="module")
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """The masters at the end, by rank and loop."""
    rows = two_ranks.asked_for(request, "test_the_numbers_are_plain_torchs")
    cases = json.dumps([(row["name"], row["clip"]) for row in rows])
    return two_ranks.seen_by(two_ranks.run(WORKER, tmp_path_factory.mktemp("ranks"), cases))


@pytest.mark.by_turns(2)
@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("name", LOOPS)
def test_the_numbers_are_plain_torchs(name: str, clip: float, seen: list[Any]) -> None:
    expected = run_loop(functools.partial(LOOPS[name][0], whole), "plain", clip=clip)
    for of_rank in seen:
        assert_right(replace(expected, masters=of_rank[name, clip]), expected)
