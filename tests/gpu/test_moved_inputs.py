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


def trained(activations: str, steps: int, *sequences: int) -> dict[str, Any]:
    numbers = map(str, (LIMIT, activations, steps, *sequences))
    command = [sys.executable, str(HERE / "moved_inputs_worker.py"), *numbers]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    answer = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert answer, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    result: dict[str, Any] = json.loads(answer[-1].removeprefix("RESULT "))
    return result


@pytest.mark.needs_cuda
@pytest.mark.timeout(350)
def test_a_batch_that_does_not_fit_without() -> None:
    one, two = trained("as_written", 2, *SMALL)["peaks"]
    of_sequence = (two - one) / (SMALL[1] - SMALL[0])
    fits = (LIMIT - one) / of_sequence + SMALL[0]
    sequences = math.ceil(1.15 * fits)
    without, moved = trained("as_written", 1, sequences), trained("auto", 8, sequences)
    print(f"{sequences} sequences, {fits:.1f} fit: {without}, {moved}")
    assert without["out_of_memory"]
    assert not moved["out_of_memory"] and moved["peaks"][0] <= LIMIT
    assert 0 < moved["activations"]["move"] <= BLOCKS - 2
    assert all(math.isfinite(loss) for loss in moved["losses"]) and moved["losses"][-1] < moved["losses"][0]
