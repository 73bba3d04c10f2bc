"""The weights of all ranks at their places in a slot, beside slices that torch copies."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from ds_slide.kernels.offload.lay_out import BLOCK, CHUNK, Pieces, lay_out
from ds_slide.model.layout import ParameterInfo, build_layout
from ds_slide.runtime.weights.uploads import LayOut

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.by_turns(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8, torch.float8_e4m3fn])
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize(
    "numels",
    [[2 * BLOCK, 128, 64 * 9], [3 * CHUNK, 24 * 16, 48], [3 * CHUNK, 5, BLOCK - 1, 2 * BLOCK + 77, 1]],
    ids=["places of 64", "places of 8", "any place"],
)
def test_pieces_come_to_their_places(numels: list[int], ranks: int, dtype: torch.dtype) -> None:
    layout = build_layout([ParameterInfo(f"p{index}", (numel,), numel, 0) for index, numel in enumerate(numels)], ranks)
    spans = LayOut.spans(layout)
    generator = torch.Generator().manual_seed(ranks)
    flat = torch.randint(0, 250, (ranks * layout.local_numel + 8,), generator=generator).to(DEVICE, dtype)
    found, expected = (torch.full((layout.slot_numel,), 251.0, device=DEVICE).to(dtype) for _ in "ab")
    lay_out(Pieces(spans), flat, found)
    for source, target, numel in spans:
        expected[target : target + numel] = flat[source : source + numel]
    assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))  # nothing else was written
