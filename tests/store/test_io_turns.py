"""The order of reads and writes: what a device of known speeds makes of it."""

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
        self.turns = Turns(None)
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
        turns = Turns(burst)
        for _ in range(20):
            assert not turns.writes_next(True, False)
            turns.started(MIB)
        for _ in range(20):
            assert turns.writes_next(False, True)
            turns.started(MIB)


def test_turns_have_the_length_that_was_asked_for() -> None:
    for burst, length in ((0, 1), (8 * MIB, 8)):
        turns = Turns(burst)
        kinds = []
        for _ in range(64):
            kinds.append(turns.writes_next(True, True))
            turns.started(MIB)
        changes = [place for place in range(1, 64) if kinds[place] != kinds[place - 1]]
        assert {after - before for before, after in itertools.pairwise(changes)} == {length}
