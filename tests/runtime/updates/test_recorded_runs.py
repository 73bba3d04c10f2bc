"""Recorded products of single runs beside those that run as written. The CPU accelerator replays by calling again."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("triton")

from ds_slide.kernels.offload import tiles
from ds_slide.runtime.captured.graphs import Graph
from ds_slide.runtime.core.device import Device
from ds_slide.runtime.updates import recorded_runs
from ds_slide.runtime.updates.recorded_runs import Products, RecordedRuns

pytestmark = pytest.mark.usefixtures("quick_interpreter")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CASES = [
    Products((1, 16, 32), "gram", torch.float32, by_kernel=False),
    Products((2, 32, 16), "standard", torch.float32, by_kernel=False),
    Products((1, 32, 32), "gram", torch.float16, by_kernel=True),
    Products((1, 64, 16), "gram", torch.float32, by_kernel=False),
]
MOST = max(math.prod(case.shape) for case in CASES)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "TILES", {16: tiles.Tiles(16, 32, 32, warps=1, stages=1)})


def update(products: Products, seed: int) -> torch.Tensor:
    return torch.randn(math.prod(products.shape), generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def assert_same(runs: RecordedRuns, products: Products, seed: int) -> None:
    recorded, given = runs.get(products), update(products, seed)
    assert recorded is not None
    recorded.update.copy_(given)
    assert torch.equal(recorded.replay(), products.of(given))


def test_replays_of_several_runs_in_turn_have_the_bits_of_the_operators() -> None:
    runs = RecordedRuns(Device(DEVICE), MOST, first=True)
    for count, products in enumerate(CASES, start=1):
        runs.prepare(CASES[:count])
        assert len(runs) == count
        for seed, each in enumerate([*CASES[:count], products]):
            assert_same(runs, each, 10 * count + seed)


def test_the_first_recordings_are_measured_before_their_owner_sees_them() -> None:
    runs = RecordedRuns(Device(DEVICE), MOST, first=True)
    runs.prepare(CASES[:2], measures=True)
    runs.prepare(CASES, measures=True)
    found = [runs.get(each) for each in CASES]
    seconds = [each.seconds for each in found if each is not None]
    assert [each is None for each in seconds] == [False, False, True, True]
    assert all(each > 0 for each in seconds[:2] if each is not None)
    for seed, each in enumerate(CASES):
        assert_same(runs, each, seed)


def test_all_runs_read_the_same_memory() -> None:
    runs = RecordedRuns(Device(DEVICE), MOST, first=False)
    runs.prepare(CASES)
    recorded = [runs.get(each) for each in CASES]
    assert len({each.update.data_ptr() for each in recorded if each is not None}) == 1
    assert [each.update.numel() for each in recorded if each is not None] == [math.prod(each.shape) for each in CASES]


def test_after_a_recording_that_fails_the_others_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(recorded_runs.log, "warning", told.append)
    runs = RecordedRuns(Device(DEVICE), MOST, first=True)
    runs.prepare(CASES[:1])

    def failing(*_: object) -> None:
        raise torch.OutOfMemoryError("there is no memory for a graph")

    with monkeypatch.context() as patch:
        patch.setattr(Graph, "record", failing)
        runs.prepare(CASES)
    runs.prepare(CASES)
    assert len(told) == 1 and "there is no memory for a graph" in told[0]
    assert [runs.get(each) is None for each in CASES] == [False, True, True, True]
    assert_same(runs, CASES[0], 1)


def test_recordings_are_freed_at_the_end() -> None:
    runs = RecordedRuns(Device(DEVICE), MOST, first=True)
    runs.prepare(CASES)
    runs.close()
    runs.prepare(CASES)
    assert len(runs) == 0 and runs._memory is None and runs._update is None
