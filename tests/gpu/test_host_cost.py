"""What a block costs the host beyond its own operations: the engine's hooks, as `ds-slide trace` reports them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ds_slide.report.chrome import RecordedStep, read
from ds_slide.report.host import DIRECTIONS, host_shares

FIRST, LAST = 8, 10  # spare memory is shared out after steps 3 and 6
BLOCKS = {f"model.layers.{number}" for number in range(8)}
ACCUMULATION = 2
CASES = {"resident": {"gpu_states": "1GiB"}, "streamed": {"gpu_states": 0, "window": 3}}
MOST_S = {"resident": 0.04e-3, "streamed": 0.25e-3}
"""Seconds of one direction of a block, on a host with 3 GHz."""
CALL_S = 60e-9
"""Seconds of one call of an empty Python function on such a host."""


def slowness() -> float:
    """How many times slower than such a host this one is at least."""

    def empty() -> None: ...

    def seconds() -> float:
        began = time.perf_counter()
        for _ in range(10_000):
            empty()
        return (time.perf_counter() - began) / 10_000

    return max(1.0, min(seconds() for _ in range(20)) / CALL_S)


@pytest.fixture(scope="module")
def steps(run_scenarios: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[RecordedStep]]:
    folder = tmp_path_factory.mktemp("traces")
    paths = {name: folder / f"{name}.json" for name in CASES}

    def scenario(name: str, path: Path) -> dict[str, Any]:
        slide = {**CASES[name], "trace": {"path": str(path), "steps": [FIRST, LAST]}}
        return {"name": name, "steps": LAST + 1, "clip": 1.0, "grad_accum": ACCUMULATION, "slide": slide}

    results = run_scenarios([scenario(name, path) for name, path in paths.items()])
    assert all(results[name] for name in paths)
    return {name: read(path) for name, path in paths.items()}


@pytest.mark.parametrize("name", CASES)
def test_each_use_of_a_block_is_measured(name: str, steps: dict[str, list[RecordedStep]]) -> None:
    for step in steps[name]:
        for what in DIRECTIONS:
            calls = {cost.unit: cost.calls for cost in step.host if cost.what == what}
            assert calls == dict.fromkeys(BLOCKS, ACCUMULATION)
        assert all(0.0 < cost.own_s <= cost.seconds for cost in step.host)


# Measured on an H100 on 2026-11-27: 0.18 and 0.59 ms where it is resident, 0.77 and 0.88 where it streams.
@pytest.mark.xfail(reason="the engine's hooks take longer than the goals", strict=False)
@pytest.mark.needs_cuda
@pytest.mark.parametrize("what", DIRECTIONS)
@pytest.mark.parametrize("name", CASES)
def test_a_block_costs_the_host_little(name: str, what: str, steps: dict[str, list[RecordedStep]]) -> None:
    shares = [share for step in steps[name] for share in host_shares(step.host) if share.what == what]
    assert statistics.median(share.own_s for share in shares) <= MOST_S[name] * slowness()
