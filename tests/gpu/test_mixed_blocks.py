"""Blocks that keep what attention and products have made on a small GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_gpu import trained

from ds_slide.runtime.activations.measuring import _sum

LIMIT = 20 << 30
BLOCKS, WIDTH, SEQUENCES = 6, 4096, 12


def limited(**slide: Any) -> dict[str, Any]:
    return trained(limit=LIMIT, steps=8, batches=[SEQUENCES], blocks=BLOCKS, width=WIDTH, slide=slide)


@pytest.mark.needs_cuda
@pytest.mark.timeout(250)
def test_mixed_blocks_take_what_is_left() -> None:
    """6 blocks of 12 x 4096 tokens, 4,096 wide, save some 24 GB, of which a part fits. Each takes the GPU 20 ms, longer
    than the host takes to mix it on any machine; of blocks of 5 ms a slow one, which takes 7, rightly mixes none."""
    without, mixed = limited(activations="as_written"), limited()
    print(without, mixed)
    assert mixed["activations"]["mix"] > 0 and without["peaks"][0] < mixed["peaks"][0] <= LIMIT
    assert mixed["losses"] == pytest.approx(without["losses"], rel=1e-2)


@pytest.mark.needs_cuda
def test_the_sum_of_a_result_takes_no_memory() -> None:
    """A batch that just fitted did not while each result was copied into integers of 8 bytes to be added."""
    result = torch.ones(1 << 27, dtype=torch.bfloat16, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    assert torch.equal(_sum(result), _sum(result[:4].clone()) * (1 << 25))  # modulo 2^64
    assert torch.cuda.max_memory_allocated() - before < 1 << 20
