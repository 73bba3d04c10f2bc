"""The order of reads and writes, and how many are at the device: what one of known speeds makes of it."""

from __future__ import annotations

import itertools

import pytest

from ds_slide._native import Turns

MIB, GIB = 1 << 20, 1 << 30
BURST = 256 * MIB
TRIALS = 6 * (GIB + BURST + 2 * MIB)


class Disk:
    """Moves requests of 1 MiB at `rates` GB/s: [where turns are short, where they are long], both divided by `drift`
    times the bytes moved so far."""

    def __init__(self, rates: tuple[float, float], drift: float = 0.0) -> None:
        self.rates, self.drift = rates, drift
        self.now_s = 0.0
        self.moved = 0
        self.turns = Turns(None, 128)
        self.slower_bytes = 0

    def move(self, nbytes: int) -> None:
        for _ in range(nbytes // MIB):
            self.turns.writes_next(True, True)
            self.turns.started(MIB)
            rate = self.rates[self.turns.burst_bytes > 0]
            self.slower_bytes += MIB * (rate < max(self.rates))
            self.now_s += MIB / 1e9 / rate * (1 + self.drift * self.moved)
            self.moved += MIB
            self.turns.finished(MIB, self.now_s, True)


@pytest.mark.parametrize(("rates", "burst"), [((4.1, 4.5), BURST), ((2.8, 2.3), 0)])
@pytest.mark.parametrize("drift", [0.0, 0.3 / TRIALS])
def test_the_faster_order_is_found_and_kept(rates: tuple[float, float], burst: int, drift: float) -> None:
    disk = Disk(rates, drift)
    disk.move(TRIALS)
    assert disk.turns.burst_bytes == burst
    disk.slower_bytes = 0
    disk.move(60 * GIB)
    assert disk.slower_bytes == 0


def test_a_disk_that_changes_is_measured_again() -> None:
    disk = Disk((3.0, 2.0))
    disk.move(TRIALS)
    assert disk.turns.burst_bytes == 0
    disk.rates = (2.0, 3.0)
    disk.move(64 * GIB + TRIALS)
    assert disk.turns.burst_bytes == BURST


def test_only_the_time_in_which_both_wait_counts() -> None:
    """Slow times without turns, under one of the orders, say nothing about it."""
    disk = Disk((3.0, 2.0))
    for _ in range(TRIALS // (64 * MIB)):
        disk.move(64 * MIB)
        disk.turns.finished(MIB, disk.now_s, False)
        disk.now_s += 5.0 if disk.turns.burst_bytes == 0 else 0.0
        disk.turns.finished(MIB, disk.now_s, True)
    assert disk.turns.burst_bytes == 0


def test_without_the_other_kind_there_are_no_turns() -> None:
    for burst in (0, 8 * MIB, None):
        turns = Turns(burst, 128)
        for _ in range(20):
            assert not turns.writes_next(True, False)
            turns.started(MIB)
        for _ in range(20):
            assert turns.writes_next(False, True)
            turns.started(MIB)


def test_turns_have_the_length_that_was_asked_for() -> None:
    for burst, length in ((0, 1), (8 * MIB, 8)):
        turns = Turns(burst, 128)
        kinds = []
        for _ in range(64):
            kinds.append(turns.writes_next(True, True))
            turns.started(MIB)
        changes = [place for place in range(1, 64) if kinds[place] != kinds[place - 1]]
        assert {after - before for before, after in itertools.pairwise(changes)} == {length}


LOW, HIGH = 32, 128
ALL_TRIALS = 2 * TRIALS
Speeds = dict[tuple[int, bool], float]
"""GB/s by (depth, whether turns are long)."""


def after_trials(speeds: Speeds, burst_bytes: int | None = None) -> Turns:
    turns, now_s = Turns(burst_bytes, HIGH, LOW), 0.0
    for _ in range(ALL_TRIALS // MIB):
        now_s += MIB / 1e9 / speeds[turns.depth, turns.burst_bytes > 0]
        turns.finished(MIB, now_s, True)
    return turns


@pytest.mark.parametrize(
    ("deeper", "longer", "depth", "burst"),
    [
        (1.04, 0.99, LOW, 0),  # more requests make all the others wait: not for 4 %
        (1.06, 0.98, HIGH, 0),
        (1.04, 1.01, LOW, BURST),
        (1.06, 1.01, HIGH, BURST),
        (0.9, 1.1, LOW, BURST),
    ],
)
def test_more_requests_only_where_they_move_more_bytes(deeper: float, longer: float, depth: int, burst: int) -> None:
    speeds = {
        (each, long): 3.0 * (deeper if each == HIGH else 1.0) * (longer if long else 1.0)
        for each in (LOW, HIGH)
        for long in (False, True)
    }
    turns = after_trials(speeds)
    assert (turns.depth, turns.burst_bytes) == (depth, burst)


def test_the_depth_is_measured_with_turns_that_are_given() -> None:
    turns = after_trials({(LOW, True): 2.0, (HIGH, True): 3.0}, burst_bytes=8 * MIB)
    assert (turns.depth, turns.burst_bytes) == (HIGH, 8 * MIB)


def test_a_depth_that_is_given_stays() -> None:
    for low in (None, HIGH):
        turns, now_s = Turns(0, HIGH, low), 0.0
        for _ in range(ALL_TRIALS // MIB):
            now_s += MIB / 2e9
            turns.finished(MIB, now_s, True)
            assert turns.depth == HIGH
