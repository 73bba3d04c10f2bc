"""Blocks that keep what attention and products have made take less time than recomputed ones."""

from __future__ import annotations

from typing import Any

import pytest
from small_gpu import trained

LIMIT = 8 << 30
SEQUENCES = 6


def limited(**slide: Any) -> dict[str, Any]:
    return trained(limit=LIMIT, steps=8, batches=[SEQUENCES], slide=slide)


@pytest.mark.needs_cuda
@pytest.mark.timeout(250)
def test_mixed_blocks_save_time() -> None:
    """40 blocks of 6 x 4096 tokens, 1,024 wide, save some 17 GB, of which a part fits."""
    without, mixed = limited(activations="as_written"), limited(debug={"mix": True})
    print(without, mixed)
    assert mixed["activations"]["mix"] > 0 and mixed["peaks"][0] <= LIMIT
    assert mixed["losses"] == pytest.approx(without["losses"], rel=1e-2)
    assert min(mixed["seconds"]) < min(without["seconds"])
