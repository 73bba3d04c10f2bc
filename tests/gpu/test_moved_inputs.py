"""A batch that does not fit into 8 GiB when all inputs of blocks stay there fits when those of the first ones move."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from small_gpu import BLOCKS, trained

LIMIT = 8 << 30
SMALL = (2, 4)
"""Sequences of two batches that fit anyway."""


def limited(activations: str, steps: int, *sequences: int, disk: str = "") -> dict[str, Any]:
    return trained(limit=LIMIT, steps=steps, batches=sequences, slide={"activations": activations}, disk=disk)


@pytest.mark.needs_cuda
@pytest.mark.timeout(450)
def test_a_batch_that_does_not_fit_without(tmp_path: Path) -> None:
    """In host memory, and, where the states fill that, on SSD."""
    # The engine begins to count anew after steps 1 and 4, which are no last ones of three.
    one, two = limited("as_written", 3, *SMALL)["peaks"]
    of_sequence = (two - one) / (SMALL[1] - SMALL[0])
    fits = (LIMIT - one) / of_sequence + SMALL[0]
    sequences = math.ceil(1.15 * fits)
    without, moved = limited("as_written", 1, sequences), limited("auto", 8, sequences)
    on_ssd = limited("auto", 8, sequences, disk=str(tmp_path))
    print(f"{sequences} sequences, {fits:.1f} fit: {without}, {moved}, {on_ssd}")
    assert without["out_of_memory"]
    for result in (moved, on_ssd):
        assert not result["out_of_memory"] and result["peaks"][0] <= LIMIT
        assert 0 < result["activations"]["move"] <= BLOCKS - 2
        assert all(math.isfinite(loss) for loss in result["losses"]) and result["losses"][-1] < result["losses"][0]
    assert "moved_to_ssd_bytes" not in moved["activations"]
    assert on_ssd["activations"]["moved_to_ssd_bytes"] == on_ssd["activations"]["moved_bytes"]
    assert on_ssd["losses"] == pytest.approx(moved["losses"], rel=1e-2) and not list(tmp_path.iterdir())
