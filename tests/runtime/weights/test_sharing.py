"""Host memory that the ranks of a machine share: who may, who waits for what, and what is left of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
Seen = list[dict[str, Any]]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """What ranks 0 and 1 of `sharing_worker` saw; rank 2 was killed."""
    folder = tmp_path_factory.mktemp("sharing")
    before = set(os.listdir("/dev/shm"))
    done = subprocess.run(
        [sys.executable, str(HERE / "sharing_worker.py"), str(folder)],
        timeout=120,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")])},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert not {name for name in set(os.listdir("/dev/shm")) - before if "slide" in name}
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


def test_every_rank_reads_every_part(seen: Seen) -> None:
    for own in seen:
        assert own["parts"] == [0.0, 1.0, 2.0]
        assert own["right"]
        assert own["after close"]


def test_a_reason_of_one_rank_is_a_reason_for_all(seen: Seen) -> None:
    for own in seen:
        assert not own["off"]
        assert not own["no memory file"]["auto"]
        assert "rank 1 ([Errno 38] Function not implemented)" in own["no memory file"]["true"]
        assert not own["elsewhere"]["auto"]
        assert "several machines" in own["elsewhere"]["true"]


def test_what_the_ranks_agree_on(seen: Seen) -> None:
    for own in seen:
        assert own["least"] == [0, 8]
        assert "differ in what a test says: number is 0 on rank 0 and 1 on rank 2" in own["differ"]


def test_a_failed_lane_ends_the_waits_of_the_others(seen: Seen) -> None:
    for own in seen:
        assert "the test lane stopped with RuntimeError: the lane has failed" in own["interrupted"]


def test_a_rank_that_ends_is_named(seen: Seen) -> None:
    assert "rank 1 has ended its engine" in seen[0]["closed"]


def test_memory_of_a_killed_rank_stays_as_long_as_others_map_it(seen: Seen) -> None:
    """That nothing is left afterwards: see `seen`."""
    for own in seen:
        assert own["killed"] == [0.0, 1.0, 2.0]
