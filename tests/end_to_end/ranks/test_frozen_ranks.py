"""Two ranks that freeze and unfreeze the same parameters have plain torch's numbers; others are told."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest
import torch
import two_ranks
from frozen_ranks_worker import KEYS, LOOPS, batches_of
from loops import Run, assert_right, run_loop

WORKER = "frozen_ranks_worker.py"


@pytest.fixture(scope="module")
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    rows = two_ranks.asked_for(request, "test_the_numbers_are_those_of_plain_torch_on_all_data")
    cases = json.dumps([(row["loop"], row["keys"], row["clip"]) for row in rows])
    return two_ranks.seen_by(two_ranks.run(WORKER, tmp_path_factory.mktemp("ranks"), cases))


@pytest.mark.by_turns(2)
@pytest.mark.parametrize("clip", [1.0, 0.0])
@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize("loop", LOOPS)
def test_the_numbers_are_those_of_plain_torch_on_all_data(loop, keys, clip, seen):
    both = [torch.cat(pair) for pair in zip(batches_of(0), batches_of(1), strict=True)]
    expected = run_loop(functools.partial(LOOPS[loop], batches=both), "plain", clip=clip)
    for rank in range(2):
        found = Run("slide", clip, {}, masters=seen[rank][loop, keys, clip])
        assert_right(found, expected)


@pytest.mark.parametrize("clip", [1.0, 0.0])
def test_ranks_with_different_flags_are_told(clip, seen):
    for rank in range(2):
        assert "they have requires_grad on for different parameters" in seen[rank]["different", clip]
