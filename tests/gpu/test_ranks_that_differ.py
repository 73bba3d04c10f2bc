"""Two GPUs whose batches use different modules, over NCCL: plain torch's masters."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import HERE, ON_CPU
from ranks import run_ranks

pytestmark = pytest.mark.skipif(not ON_CPU and torch.cuda.device_count() < 2, reason="needs two GPUs")

CASES = (
    "images_on_one_rank, clip 1.0, accumulation 1",
    "mixture, clip 0.0, accumulation 1",
    "mixture, clip 1.0, accumulation 2",
    "default window",
    "language frozen",
    "states on the GPU",
    "experts inside, gathered",
    "llava",
    "200 steps",
)


def test_masters_are_plain_torchs(tmp_path: Path) -> None:
    ends = run_ranks([str(HERE / "differing_ranks_worker.py"), *CASES], tmp_path)
    (code, log, _), (other, other_log, _) = ends
    assert code == other == 0, log[-3000:] + other_log[-3000:]
    found = [line.rpartition(" ") for line in log.splitlines() if line.startswith("distance ")]
    assert [name for name, _, _ in found] == [f"distance {name}" for name in CASES]
    for name, _, apart in found:
        assert float(apart) < 2e-3, f"{name}: {apart}"
