"""A host that is killed or cut off ends the run on the others, with a sentence that names it. A slow link does not."""

from __future__ import annotations

import contextlib
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import hosts
import pytest
import warm

LIMIT_S = 8.0
"""So that silence counts after 4 s: four lines of a rank, also on a machine that is busy."""


@pytest.fixture
def two(tmp_path: Path) -> Iterator[tuple[list[hosts.Host], list[warm.Run]]]:
    """Two hosts with a rank each, which have trained two steps."""
    with hosts.described(2, tmp_path) as joined, contextlib.ExitStack() as runs:
        started = []
        for rank in range(2):
            (own := tmp_path / f"rank-{rank}").mkdir()
            arguments = (str(tmp_path), str(rank), "2", str(LIMIT_S))
            started.append(warm.start("hosts_fault_worker.py", *arguments, folder=own))
            runs.callback(started[-1].reap)
        await_files([tmp_path / f"began-{rank}" for rank in range(2)], started)
        yield joined, started


def await_files(files: list[Path], runs: list[warm.Run]) -> None:
    """Wait until the files exist, or fail with the log of a run that has ended."""
    while not all(file.exists() for file in files):
        for run in runs:
            assert not run.has_ended(0.05), run.log[-4000:]


def sentence_of(run: warm.Run) -> str:
    assert run.end(60.0) == 1, run.log[-3000:]
    last = run.log.strip().splitlines()[-1]
    assert last.startswith(("ds_slide.errors.SlideError: ", "ds_slide: ")), run.log[-3000:]
    return last


def test_a_host_is_killed(two: tuple[list[hosts.Host], list[warm.Run]]) -> None:
    _, runs = two
    runs[1].kill(signal.SIGKILL)
    sentence = sentence_of(runs[0])
    assert re.search(rf"rank 1 \(host-1, process {runs[1].pid}\) has not been heard from", sentence), sentence


def test_the_first_host_is_killed(two: tuple[list[hosts.Host], list[warm.Run]]) -> None:
    """The table of the ranks goes with it."""
    _, runs = two
    runs[0].kill(signal.SIGKILL)
    sentence = sentence_of(runs[1])
    assert re.search(rf"rank 0 \(host-0, process {runs[0].pid}\) is gone", sentence), sentence


def test_a_link_is_cut(two: tuple[list[hosts.Host], list[warm.Run]]) -> None:
    """No socket closes: without the watchdog both would wait for the time-out of the process group, 30 minutes."""
    joined, runs = two
    joined[1].cut()
    for rank, run in enumerate(runs):
        other = 1 - rank
        sentence = sentence_of(run)
        pattern = rf"rank {other} \(host-{other}, process {runs[other].pid}\) has not been heard from for \d+ s"
        assert re.search(pattern, sentence), sentence
