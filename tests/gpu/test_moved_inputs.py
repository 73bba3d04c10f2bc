"""A batch that does not fit into 8 GiB when all inputs of blocks stay there fits when those of the first ones move."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
LIMIT = 8 << 30
SMALL = (2, 4)
"""Sequences of two batches that fit anyway."""
BLOCKS = 40


def trained(activations: str, steps: int, *sequences: int, disk: str = "") -> dict[str, Any]:
    words = map(str, (LIMIT, activations, disk, steps, *sequences))
    command = [sys.executable, str(HERE / "moved_inputs_worker.py"), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    answer = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert answer, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    result: dict[str, Any] = json.loads(answer[-1].removeprefix("RESULT "))
    return result


@pytest.mark.needs_cuda
@pytest.mark.timeout(450)
def test_a_batch_that_does_not_fit_without(tmp_path: Path) -> None:
    """In host memory, and, where the states fill that, on SSD."""
    one, two = trained("as_written", 2, *SMALL)["peaks"]
    of_sequence = (two - one) / (SMALL[1] - SMALL[0])
    fits = (LIMIT - one) / of_sequence + SMALL[0]
    sequences = math.ceil(1.15 * fits)
    without, moved = trained("as_written", 1, sequences), trained("auto", 8, sequences)
    on_ssd = trained("auto", 8, sequences, disk=str(tmp_path))
    print(f"{sequences} sequences, {fits:.1f} fit: {without}, {moved}, {on_ssd}")
    assert without["out_of_memory"]
    for result in (moved, on_ssd):
        assert not result["out_of_memory"] and result["peaks"][0] <= LIMIT
        assert 0 < result["activations"]["move"] <= BLOCKS - 2
        assert all(math.isfinite(loss) for loss in result["losses"]) and result["losses"][-1] < result["losses"][0]
    assert "moved_to_ssd_bytes" not in moved["activations"]
    assert on_ssd["activations"]["moved_to_ssd_bytes"] == on_ssd["activations"]["moved_bytes"]
    assert on_ssd["losses"] == pytest.approx(moved["losses"], rel=1e-2) and not list(tmp_path.iterdir())
