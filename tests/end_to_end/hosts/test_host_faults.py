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
    with trained_on_two_hosts(tmp_path, 2) as found:
        yield found


@pytest.fixture
def two_of_two(tmp_path: Path) -> Iterator[tuple[list[hosts.Host], list[warm.Run]]]:
    """Two hosts with two ranks each."""
    with trained_on_two_hosts(tmp_path, 4) as found:
        yield found


@contextlib.contextmanager
def trained_on_two_hosts(folder: Path, ranks: int) -> Iterator[tuple[list[hosts.Host], list[warm.Run]]]:
    """Two hosts, and their `ranks`, which have trained two steps."""
    with hosts.described(2, folder) as joined, contextlib.ExitStack() as runs:
        started = []
        for rank in range(ranks):
            (own := folder / f"rank-{rank}").mkdir()
            arguments = (str(folder), str(rank), str(ranks), str(LIMIT_S))
            started.append(warm.start("hosts_fault_worker.py", *arguments, folder=own))
            runs.callback(started[-1].reap)
        await_files([folder / f"began-{rank}" for rank in range(ranks)], started)
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


@pytest.mark.slow
def test_a_host_of_two_ranks_is_killed(two_of_two: tuple[list[hosts.Host], list[warm.Run]]) -> None:
    """Each rank of the other host names it, whichever of its ranks it has missed first."""
    _, runs = two_of_two
    for run in runs[2:]:
        run.kill(signal.SIGKILL)
    for run in runs[:2]:
        sentence = sentence_of(run)
        assert re.search(r"rank [23] \(host-1, process \d+\) (has not been heard from|is gone)", sentence), sentence


@pytest.mark.slow
def test_one_rank_of_two_on_a_host_is_killed(two_of_two: tuple[list[hosts.Host], list[warm.Run]]) -> None:
    """Its neighbour sees at once that the process is gone, and the ranks of the other host hear no more of one of the
    two."""
    _, runs = two_of_two
    runs[3].kill(signal.SIGKILL)
    for run in runs[:3]:
        sentence = sentence_of(run)
        assert re.search(r"rank [0-3] \(host-[01], process \d+\) (has not been heard from|is gone)", sentence), sentence
    assert "rank 3 (host-1" in runs[2].log


@pytest.mark.slow
def test_the_link_of_a_host_of_two_ranks_is_cut(two_of_two: tuple[list[hosts.Host], list[warm.Run]]) -> None:
    joined, runs = two_of_two
    joined[1].cut()
    for rank, run in enumerate(runs):
        other = 1 - rank // 2
        sentence = sentence_of(run)
        assert f"(host-{other}, process " in sentence and "has not been heard from for" in sentence, sentence
