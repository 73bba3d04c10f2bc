"""Blocks that replay recordings on two GPUs, over NCCL: the same bits, and no hang."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import HERE, ON_CPU
from ranks import run_ranks
from recorded_ranks_worker import CASES

pytestmark = pytest.mark.skipif(not ON_CPU and torch.cuda.device_count() < 2, reason="needs two GPUs")
BLOCKS = 4


def test_recordings_of_two_ranks_have_the_same_bits(tmp_path: Path) -> None:
    for code, log, _ in run_ranks([str(HERE / "recorded_ranks_worker.py")], tmp_path):
        assert code == 0, log[-3000:]
        found = [line for line in log.splitlines() if line.partition(":")[0] in CASES]
        # Forward and backward, and of a recomputed block the forward once more.
        expected = [f"{name}: same {BLOCKS * (3 if name.startswith('streamed') else 2)}" for name in CASES]
        assert found == expected, log[-6000:]
