"""The lane that bounds a step beside the computation, by the number of ranks and what was measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ds_slide.compression.codec import Identity
from ds_slide.model.layout import ParameterInfo, build_layout
from ds_slide.optim.adamw import ADAMW
from ds_slide.optim.low_precision import STATE_FORMATS
from ds_slide.plan.bound import Bound, bound_of
from ds_slide.plan.ceilings import Ceilings, DiskCeilings, read_ceilings
from ds_slide.plan.memory import Plan
from ds_slide.plan.needs import Needs, Placement, SsdNeeds, UnitSize
from ds_slide.plan.rank_ceilings import PairOfRanks, RankRates, RanksCeilings
from ds_slide.plan.step_work import BESIDE_COPIES
from ds_slide.store.state_buffers import optimizer_buffers

torch = pytest.importorskip("torch")

NUMEL, UNITS = 1 << 20, 8
SPECS = optimizer_buffers(torch.bfloat16, ADAMW, STATE_FORMATS["fp32"])
HOST = read_ceilings("h200-16-cores").model_copy(update={"disks": ()})


def plan(ranks: int, **placed: Any) -> Plan:
    layout = build_layout([ParameterInfo("weight", (NUMEL,), NUMEL, 0)], ranks)
    units = [
        UnitSize(str(index), layout, Identity(layout, torch.bfloat16), "block", SPECS, 2) for index in range(UNITS)
    ]
    ssd = SsdNeeds(weights=True, states=True, chunk_numel=1 << 16)
    needs = Needs(held_bytes=2, window=UNITS, ring=0, world_size=ranks, shares_weights=True, ssd=ssd)
    return Plan.of(units, needs, Placement(window=UNITS, **placed))


def bound(ranks: int, ceilings: Ceilings, disks: tuple[Path, ...] = (), **placed: Any) -> Bound:
    found = bound_of(plan(ranks, **placed), ceilings, ranks, on_gpu=True, micro_batches=1, disks=disks)
    assert found is not None
    return found


def measured(ranks: int, **rates: float) -> Ceilings:
    each = (RankRates(**rates),) * ranks
    pairs = (PairOfRanks(ranks=(0, 1), kept=0.5),)
    return HOST.with_measured(RanksCeilings(alone=each, together=each, places=("",) * ranks, pairs=pairs))


def test_updates_bound_a_rank_that_has_the_host_for_itself() -> None:
    found = bound(1, HOST)
    seconds = UNITS * 26 * NUMEL / (BESIDE_COPIES * HOST.cpu.update_gb_s * 1e9)
    assert (found.lane, found.seconds) == ("update", pytest.approx(seconds))
    assert str(found).endswith(" s")


def test_four_ranks_that_divide_the_host_take_as_long_as_one() -> None:
    found = bound(4, HOST)
    assert (found.lane, found.seconds) == ("update", pytest.approx(bound(1, HOST).seconds, rel=0.01))
    assert "with a part for each of 4 ranks, which `ds-slide doctor --ranks 4` measures" in str(found)


def test_a_link_that_four_ranks_share_bounds_them() -> None:
    """Each rank uploads the weights of all, and has a quarter of the updates."""
    shared = measured(4, update_gb_s=50.0, h2d_gb_s=13.0, d2h_gb_s=13.0, both_ways_gb_s=6.0)
    found = bound(4, shared)
    assert (found.lane, found.seconds) == ("h2d", pytest.approx(UNITS * 2 * NUMEL / 13e9))
    assert str(found).endswith(" s with 4 ranks at once")
    own = measured(4, update_gb_s=20.0, h2d_gb_s=55.0, d2h_gb_s=55.0, both_ways_gb_s=50.0)
    assert bound(4, own).lane == "update"
    # Two ranks were not measured.
    assert bound(2, shared).lane == "update" and not bound(2, shared).measured


def test_a_disk_counts_where_it_was_measured(tmp_path: Path) -> None:
    on_disk = {"chunks_on_ssd": frozenset(range(UNITS))}
    assert bound_of(plan(1, **on_disk), HOST, 1, on_gpu=True, micro_batches=1, disks=[tmp_path]) is None
    disk = DiskCeilings(path=str(tmp_path), read_gb_s=3, write_gb_s=3, mixed_gb_s=3, direct=True, backend="threads")
    there = HOST.model_copy(update={"disks": (disk,)})
    one, two = (bound(ranks, there, (tmp_path,), **on_disk) for ranks in (1, 2))
    assert one.lane == two.lane == "ssd" and two.seconds == pytest.approx(one.seconds, rel=0.3)


def test_nothing_is_said_where_nothing_moves() -> None:
    everything = plan(1, on_gpu=frozenset(range(UNITS)))
    assert bound_of(everything, HOST, 1, on_gpu=True, micro_batches=1, disks=[]) is None
