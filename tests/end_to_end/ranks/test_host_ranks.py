"""Ranks over gloo on a host whose cores are memory nodes of their own: where their threads run, and what they tell."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import two_ranks
from harness import unequal

CORES = sorted(os.sched_getaffinity(0))
several_cores = pytest.mark.skipif(len(CORES) < 2, reason="one core has no other node")


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    ranks: int = request.param
    folder: Path = tmp_path_factory.mktemp(f"host{ranks}")
    two_ranks.run("host_ranks_worker.py", folder, str(ranks), str(folder / "cache"))
    return two_ranks.seen_by(folder, ranks)


@several_cores
def test_the_threads_of_a_rank_run_on_the_node_of_its_gpu(seen: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(seen):
        of_engine = found["auto"]["threads"]
        assert {"slide-update-0", "ds_slide-h2d", "ds_slide-d2h", "ds_slide-update"} <= set(of_engine)
        # With more cores than ranks, nodes without a GPU are divided, too.
        if len(CORES) <= len(seen):
            assert set(map(frozenset, of_engine.values())) == {frozenset([CORES[rank % len(CORES)]])}
        assert all(cores < set(CORES) for cores in of_engine.values())
        assert found["auto"]["main"] == set(CORES)


def test_nothing_is_pinned_where_the_user_says_so(seen: list[dict[str, Any]]) -> None:
    for found in seen:
        assert all(cores == set(CORES) for cores in found["none"]["threads"].values())
        assert unequal(found["none"]["states"], found["auto"]["states"]) == []


def test_the_first_line_names_the_lane_that_bounds_so_many_ranks(seen: list[dict[str, Any]]) -> None:
    starts = [line for line in seen[0]["lines"] if line.startswith("DS-Slide ")]
    assert starts[0].endswith(f"; `ds-slide doctor` has not measured what {len(seen)} ranks share here")
    # A gradient goes down once, and each weight comes up: copies at 0.5 GB/s take longer than updates at 100.
    told = rf"; beside the computation the h2d lane bounds a step, at [\d.e-]+ s with {len(seen)} ranks at once$"
    assert re.search(told, starts[1]), starts[1]
