"""States are read and written alike in memory and on SSD, whatever the span and the storage of the moments."""

from __future__ import annotations

import random
from collections.abc import Iterator
from mmap import PAGESIZE
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_slide.model.layout import ParameterInfo, build_layout
from ds_slide.optim.adamw import ADAMW
from ds_slide.optim.low_precision import STATE_FORMATS
from ds_slide.report.statistics import LaneMeter
from ds_slide.report.trace import Requests
from ds_slide.runtime.core.futures import Failures
from ds_slide.runtime.ssd.buffers import BufferCache
from ds_slide.store import host_memory
from ds_slide.store.host_memory import HostMemory
from ds_slide.store.in_memory import HeldInMemory, InMemory, StatesInMemory, WeightsInMemory
from ds_slide.store.ssd.extents import unit_extents
from ds_slide.store.ssd.store import SsdStore
from ds_slide.store.ssd.unit import ChunkKey, GradientBuffer, HeldOnSsd, SsdOptimizerStates, SsdWeights, in_one_piece
from ds_slide.store.state import UnitState
from ds_slide.store.state_buffers import optimizer_buffers

NUMEL, CHUNK_NUMEL = 10_048, 4096
LAYOUT = build_layout([ParameterInfo("weight", (NUMEL,), NUMEL, 0)], 1)

Pair = tuple[UnitState, UnitState]


@pytest.fixture(params=sorted(STATE_FORMATS))
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pair]:
    """The same zeroed states in memory and on SSD."""
    specs = optimizer_buffers(torch.bfloat16, ADAMW, STATE_FORMATS[request.param])
    extents = unit_extents(
        0, specs, weight_bytes=NUMEL * 2, chunks_of=NUMEL, chunk_numel=CHUNK_NUMEL, gradient_bytes=NUMEL * 4
    )
    failures, requests = Failures(), Requests()
    store = SsdStore([("ds_slide.nvme_path", tmp_path)], extents.end, failures)
    assert extents.weight_offset is not None and extents.gradient_offset is not None
    source: Any = None
    weight_buffers: BufferCache[int] = BufferCache(source, failures)
    chunk_buffers: BufferCache[ChunkKey] = BufferCache(source, failures)
    on_ssd = UnitState(
        specs,
        SsdWeights(
            0, in_one_piece(store, torch.bfloat16, NUMEL, extents.weight_offset), weight_buffers, False, requests
        ),
        SsdOptimizerStates(0, store, specs, extents.chunks, chunk_buffers, weight_buffers, requests),
        HeldOnSsd(in_one_piece(store, torch.float32, NUMEL, extents.gradient_offset), GradientBuffer(LaneMeter())),
    )
    in_memory = UnitState(
        specs,
        WeightsInMemory(InMemory(torch.zeros(NUMEL, dtype=torch.bfloat16))),
        StatesInMemory(
            specs, {spec.name: InMemory(torch.zeros(spec.items(NUMEL), dtype=spec.dtype)) for spec in specs}
        ),
        HeldInMemory(InMemory(torch.zeros(NUMEL))),
    )
    yield in_memory, on_ssd
    store.close()
    assert not failures.message


def test_reads_after_writes_are_the_same(pair: Pair) -> None:
    in_memory, on_ssd = pair
    assert {each.tier for each in on_ssd.buffers.values()} == {"ssd"}
    assert on_ssd.nbytes() == in_memory.nbytes() > 0
    draw, generator = random.Random(0), torch.Generator().manual_seed(0)
    for _ in range(60):
        name = draw.choice(["weight", "remainder", "exp_avg", "exp_avg_sq", "gradient"])
        start = draw.randrange(NUMEL)
        span = slice(start, draw.randrange(start + 1, NUMEL + 1))
        values = torch.rand(span.stop - span.start, generator=generator)
        values = (values * 1000).to(torch.int16) if name == "remainder" else values
        for state in pair:
            state.write(name, span, values)
        for kind in ("weight", "remainder", "exp_avg", "exp_avg_sq", "gradient"):
            whole = slice(0, NUMEL)
            assert torch.equal(in_memory.read(kind, whole), on_ssd.read(kind, whole)), (name, span, kind)
    for state in pair:
        assert state.read("gradient", whole).any()
        state.zero_gradient()
        assert not state.read("gradient", whole).any() and state.read("exp_avg", whole).any()


def test_what_is_written_is_what_is_read(pair: Pair) -> None:
    for state in pair:
        span = slice(4000, 4200)  # over the end of a chunk
        weight = torch.linspace(-1, 1, 200).bfloat16()
        state.write("weight", span, weight)
        assert torch.equal(state.read("weight", span), weight)
        moment = torch.linspace(0.5, 1, 200)
        state.write("exp_avg_sq", span, moment)
        assert torch.allclose(state.read("exp_avg_sq", span), moment, rtol=0.05)
        assert torch.equal(state.read("exp_avg_sq", slice(0, 4000)), torch.zeros(4000))


def test_memory_that_was_never_written_is_known() -> None:
    memory = HostMemory(page_lock=False, huge_pages=False)
    pages = 64
    tensor = memory.tensor(pages * PAGESIZE, torch.uint8, transfers=False)
    other = memory.tensor(PAGESIZE // 2, torch.bfloat16, transfers=False)
    assert memory.untouched_bytes() == (pages + 1) * PAGESIZE
    tensor[10 * PAGESIZE : 13 * PAGESIZE] = 1
    assert memory.untouched_bytes() == (pages + 1 - 3) * PAGESIZE
    tensor.fill_(1)
    other.fill_(1)
    assert memory.untouched_bytes() == 0


def test_memory_that_was_written_is_not_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """91 GB take 0.24 s, and each forward may ask."""
    memory = HostMemory(page_lock=False, huge_pages=False)
    written, other = (memory.tensor(4 * PAGESIZE, torch.uint8, transfers=False) for _ in range(2))
    written.fill_(1)
    looks = []

    def look(address: int, pages: int, count: Any = host_memory._untouched_pages) -> int:
        looks.append(address)
        return int(count(address, pages))

    monkeypatch.setattr(host_memory, "_untouched_pages", look)
    assert [memory.untouched_bytes() for _ in range(2)] == [4 * PAGESIZE] * 2
    assert looks == [written.data_ptr(), other.data_ptr(), other.data_ptr()]
    memory.give_back(written, transfers=False)
    assert written.data_ptr() not in memory._touched  # another tensor may get its address
