"""Two ranks over gloo: one reads small parameters alone, both write them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_parameters_worker import CLIPPING, RUNS, STEPS, plain

WORKER = "small_parameters_worker.py"
clippings = pytest.mark.parametrize("clip", CLIPPING)


@clippings
@pytest.mark.parametrize("name", RUNS)
def test_what_all_ranks_write_reaches_the_masters(name: str, clip: float, seen: list[dict[str, Any]]) -> None:
    _, expected = plain(clip)
    for results in seen:
        for parameter, master in results[f"{name} {clip}"]["masters"].items():
            torch.testing.assert_close(master, expected[parameter], rtol=1e-3, atol=1e-4, msg=parameter)


@clippings
@pytest.mark.parametrize("name", [name for name in RUNS if name.startswith("shared")])
def test_one_rank_alone_reads_the_updated_values(name: str, clip: float, seen: list[dict[str, Any]]) -> None:
    expected, _ = plain(clip)
    torch.testing.assert_close(
        torch.tensor(seen[0][f"{name} {clip}"]["read"]), torch.tensor(expected), rtol=1e-4, atol=1e-5
    )
    assert seen[1][f"{name} {clip}"]["read"] == []


@clippings
@pytest.mark.parametrize("name", [name for name in RUNS if name.startswith("gathered")])
def test_one_rank_alone_is_told_to_gather(name: str, clip: float, seen: list[dict[str, Any]]) -> None:
    refusals = seen[0][f"{name} {clip}"]["refusals"]
    assert len(refusals) == STEPS
    assert all("GatheredParameters([parameter]):` on all ranks" in refusal for refusal in refusals)
