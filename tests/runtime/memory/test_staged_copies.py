"""What is copied through a page-locked buffer, in pieces, is what was there."""

from __future__ import annotations

import pytest
import torch
from contexts import context_of
from hypothesis import given, settings
from hypothesis import strategies as st
from tqdm import tqdm

from ds_slide.optim.cpu import CpuUpdater
from ds_slide.runtime.core.device import Device
from ds_slide.runtime.memory import staged_copies
from ds_slide.runtime.memory.staged_copies import StagedCopies

UPDATER = CpuUpdater(2)


@settings(deadline=None)  # a busy machine takes longer now and then
@given(
    st.sampled_from([None, 1, 2, 7, 64, 1000]),
    st.lists(st.tuples(st.booleans(), st.integers(0, 300)), min_size=1, max_size=8),
    st.sampled_from([torch.int16, torch.float32]),
)
def test_all_bytes_arrive(room: int | None, copies: list[tuple[bool, int]], dtype: torch.dtype) -> None:
    buffer = None if room is None else torch.zeros(room, dtype=torch.uint8)
    staged = StagedCopies(buffer, context_of(Device(torch.device("cpu")), updater=UPDATER), tqdm(disable=True))
    pairs = []
    for to_gpu, numel in copies:
        source, target = torch.randint(-999, 999, (numel,)).to(dtype), torch.zeros(numel, dtype=dtype)
        (staged.to_gpu if to_gpu else staged.to_host)(target, source)
        pairs.append((target, source))
    staged.finish()
    assert all(torch.equal(*pair) for pair in pairs)


def test_a_half_is_at_most_a_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staged_copies, "PIECE_BYTES", 16)
    buffer = torch.zeros(100, dtype=torch.uint8)
    staged = StagedCopies(buffer, context_of(Device(torch.device("cpu")), updater=UPDATER), tqdm(disable=True))
    source, target = torch.ones(100, dtype=torch.uint8), torch.zeros(100, dtype=torch.uint8)
    staged.to_gpu(target, source)
    staged.finish()
    assert torch.equal(target, source) and int(buffer.sum()) == 32
