"""Recorded iterations of Muon beside those that run as written. The CPU accelerator replays by calling again."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("triton")

from ds_slide.kernels.offload import tiles
from ds_slide.optim.muon import Method
from ds_slide.optim.muon_batch import orthogonal_together
from ds_slide.optim.muon_groups import Shape, numel_of
from ds_slide.report.log import log
from ds_slide.runtime.captured.graphs import Graph
from ds_slide.runtime.core.device import Device
from ds_slide.runtime.updates.iterations import Iterations

pytestmark = pytest.mark.usefixtures("quick_interpreter")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CASES: list[tuple[list[Shape], Method, torch.dtype]] = [
    ([(1, 16, 32)], "gram", torch.float16),
    ([(1, 32, 32), (1, 64, 32), (1, 32, 64)], "gram", torch.float16),
    ([(1, 32, 32), (1, 64, 32), (1, 32, 64)], "standard", torch.bfloat16),
    ([(2, 16, 16)], "standard", torch.bfloat16),
]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "TILES", {16: tiles.Tiles(16, 32, 32, warps=1, stages=1)})


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[Graph]:
    """The graphs that have been replayed, in turn."""
    made: list[Graph] = []
    replay = Graph.replay

    def noted(self: Graph) -> None:
        made.append(self)
        replay(self)

    monkeypatch.setattr(Graph, "replay", noted)
    return made


def updates(shapes: list[Shape], seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(math.prod(shape), generator=generator).to(DEVICE) for shape in shapes]


def assert_same(own: Iterations, case: tuple[list[Shape], Method, torch.dtype], seed: int) -> None:
    shapes, method, dtype = case
    given = updates(shapes, seed)
    found = own.orthogonal(shapes, iter(given), method, dtype)
    expected = orthogonal_together(shapes, iter(given), method, dtype, DEVICE)
    # Each result is read before the next batch, as an update reads it.
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_recordings_of_several_shapes_have_the_bits_of_what_is_written(replays: list[Graph]) -> None:
    own = Iterations(Device(DEVICE))
    for step in range(4):
        for index, case in enumerate(CASES):
            assert_same(own, case, 10 * step + index)
    # Memory has grown for the second case, so the first one begins anew: twice as written.
    assert len(set(map(id, replays))) == len(CASES)
    assert len(replays) == 3 * len(CASES) - 1
    assert replays[-len(CASES) :] == replays[-2 * len(CASES) : -len(CASES)]


def test_all_batches_use_one_piece_of_memory() -> None:
    own = Iterations(Device(DEVICE))
    places = set()
    for _ in range(3):
        for shapes, method, dtype in CASES:
            found = list(own.orthogonal(shapes, iter(updates(shapes, 1)), method, dtype))
            places.add(found[0].untyped_storage().data_ptr())
    assert own._bytes is not None
    assert own._bytes.numel() == max(2 * numel_of(shapes) for shapes, *_ in CASES)
    assert own._bytes.data_ptr() in places


def failing(*_: object) -> None:
    raise torch.OutOfMemoryError("there is no memory for a graph")


def test_a_recording_that_fails_runs_as_written_from_then_on(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(Graph, "record", failing)
    monkeypatch.setattr(log, "warning", told.append)
    own = Iterations(Device(DEVICE))
    for step in range(3):
        for index, case in enumerate(CASES):
            assert_same(own, case, 10 * step + index)
    assert len(told) == 1 and "there is no memory for a graph" in told[0]
    assert own._bytes is None and not own._recorded


def test_recordings_are_freed_at_the_end() -> None:
    own = Iterations(Device(DEVICE))
    for _ in range(3):
        assert_same(own, CASES[1], 1)
    own.close()
    assert own._bytes is None and not own._recorded and own._memory is None
    assert_same(own, CASES[1], 2)
