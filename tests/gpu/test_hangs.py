"""Two ranks over NCCL, one of which dies, leaves a collective out or loses a completion: the run ends with a sentence.

On the processor (SLIDE_GPU_TESTS_DEVICE=cpu) the same over gloo.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks

HERE = Path(__file__).resolve().parent
ON_CPU = os.environ.get("SLIDE_GPU_TESTS_DEVICE") == "cpu"
HANG_TIMEOUT_S = 10.0
MARGIN_S = 5.0
"""For the end of a process."""
COMPRESSION = {"type": "lsp", "d": 32, "r": 4}
PLACES: list[dict[str, Any]] = [
    {},
    {"gpu_states": 0},
    {"gpu_states": 0, "share_weights": False},
    {"gpu_states": 0, "compression": COMPRESSION},
]

pytestmark = pytest.mark.skipif(not ON_CPU and torch.cuda.device_count() < 2, reason="needs two GPUs")

Runs = Callable[[str, dict[str, Any]], list[tuple[int, str, float]]]


@pytest.fixture
def two_ranks(tmp_path: Path) -> Runs:
    """Exit code, log and seconds of each rank."""

    def run(fault: str, slide: dict[str, Any]) -> list[tuple[int, str, float]]:
        options = json.dumps({"hang_timeout": HANG_TIMEOUT_S, **slide})
        ends = run_ranks([str(HERE / "two_ranks_worker.py"), fault, options], tmp_path)
        for rank, (code, log, seconds) in enumerate(ends):
            print(f"rank {rank}: exit code {code} after {seconds:.1f} s; {last_line(log)}")
        return ends

    return run


def last_line(log: str) -> str:
    """Empty of a rank that was killed before it said anything."""
    return log.strip().rpartition("\n")[2]


@pytest.mark.parametrize("slide", PLACES, ids=str)
def test_nothing_happens(two_ranks: Runs, slide: dict[str, Any]) -> None:
    ends = two_ranks("nothing", slide)
    for code, log, _ in ends:
        assert code == 0 and "losses" in log, log[-3000:]
    assert said(ends[0][1], "weights") == said(ends[1][1], "weights")


@pytest.mark.parametrize("slide", PLACES, ids=str)
def test_a_rank_is_killed(two_ranks: Runs, slide: dict[str, Any]) -> None:
    (code, log, ended_s), (killed, _, killed_s) = two_ranks("kill", slide)
    assert killed == -9
    assert code == 1, log[-3000:]
    assert re.search(r"rank 1 \(process \d+\) is gone", last_line(log)), log[-3000:]
    assert ended_s - killed_s < HANG_TIMEOUT_S + MARGIN_S


def test_a_rank_leaves_a_collective_out(two_ranks: Runs) -> None:
    ends = two_ranks("skip", {"gpu_states": 0})
    for code, log, _ in ends:
        assert code == 1, log[-3000:]
    text = " ".join(last_line(log) for _, log, _ in ends)
    # Over gloo the host waits; over NCCL the GPU does.
    waits = "waits for the other ranks in|the GPU is in, or waits for, collective"
    assert re.search(f"{waits}|have called different collectives", text), text


def test_the_end_of_an_update_is_lost(two_ranks: Runs) -> None:
    ends = two_ranks("drop", {"gpu_states": 0})
    for code, log, _ in ends:
        assert code == 1, log[-3000:]
    assert re.search(
        r"waits for the update of (outer module|.*layers\.\d+)", " ".join(last_line(log) for _, log, _ in ends)
    )


@pytest.mark.parametrize("slide", PLACES, ids=str)
def test_a_second_engine_changes_nothing(two_ranks: Runs, slide: dict[str, Any]) -> None:
    for (alone_code, alone, _), (code, log, _) in zip(
        two_ranks("nothing", slide), two_ranks("reference", slide), strict=True
    ):
        assert alone_code == code == 0, log[-3000:]
        losses, references = said(log, "losses"), said(log, "references")
        assert losses == pytest.approx(said(alone, "losses"), rel=1e-3)
        assert references[0] == pytest.approx(losses[0], rel=1e-3)
        assert references != losses


def said(log: str, name: str) -> list[float]:
    """The list behind `name` at the begin of a line."""
    values: list[float] = next(
        json.loads(line.removeprefix(name)) for line in log.splitlines() if line.startswith(f"{name} [")
    )
    return values
