"""A trace whose work on the GPU is timed by its events: that is where it was done, and waits are where it was not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ds_slide.report.causes import lane_shares, largest_waits
from ds_slide.report.chrome import RecordedStep, read

FIRST, LAST = 4, 6
BLOCKS = {f"model.layers.{number}" for number in range(8)}
CLIPPING = {"clipping": 1.0, "updates under backward": 0.0}


@pytest.fixture(scope="module")
def traces(
    run_scenarios: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[RecordedStep]]:
    folder = tmp_path_factory.mktemp("traces")
    paths = {name: folder / f"{name}.json" for name in CLIPPING}

    def scenario(name: str, path: Path) -> dict[str, Any]:
        slide = {"gpu_states": 0, "window": 3, "trace": {"path": str(path), "steps": [FIRST, LAST]}}
        return {"name": name, "steps": LAST + 1, "clip": CLIPPING[name], "slide": slide}

    results = run_scenarios([scenario(name, path) for name, path in paths.items()])
    assert all(results[name] for name in paths)
    return {name: read(path) for name, path in paths.items()}


@pytest.mark.parametrize("name", CLIPPING)
def test_rows_are_whole(name: str, traces: dict[str, list[RecordedStep]]) -> None:
    steps = traces[name]
    assert [step.number for step in steps] == list(range(FIRST, LAST + 1))
    for step in steps:
        done = {(work.lane, work.what): set() for work in step.work}
        for work in step.work:
            assert work.end >= work.begin
            done[work.lane, work.what].add(work.unit)
        assert done["compute", "forward"] == done["compute", "backward"] == BLOCKS
        assert done["h2d", "weights"] >= BLOCKS - {"model.layers.7"} and done["d2h", "gradient"] >= BLOCKS
        shares = {share.lane: share for share in lane_shares(step)}
        # Compute either works or stands still, and what it stands still for has a name.
        assert shares["compute"].idle_s < 0.05 * step.seconds
        assert 0.0 < step.bound_s <= step.seconds
        for wait in step.waits:
            assert 0.0 <= wait.begin < wait.end <= step.seconds + 1e-6
        for largest in largest_waits(step):
            assert largest.seconds <= step.seconds and "{unit}" not in largest.sentence
