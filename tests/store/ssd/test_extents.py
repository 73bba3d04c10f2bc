"""Extents of a unit on SSD: whole pages, nothing twice, and every state buffer of a chunk where the chunk says."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from ds_slide.optim.adamw import ADAMW
from ds_slide.optim.low_precision import STATE_FORMATS
from ds_slide.store.ssd.extents import PAGE, chunk_bytes, unit_extents, whole_pages
from ds_slide.store.state_buffers import optimizer_buffers

CHUNK_NUMEL = 2048


@given(
    start=st.integers(0, 100).map(lambda pages: pages * PAGE),
    trainable=st.integers(0, 200).map(lambda groups: groups * 64),
    frozen=st.integers(0, 50).map(lambda groups: groups * 64),
    weight=st.booleans(),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    moments=st.sampled_from(sorted(STATE_FORMATS)),
    held_bytes=st.sampled_from([0, 2, 4]),
)
def test_places_are_whole_pages_side_by_side(
    start: int, trainable: int, frozen: int, weight: bool, dtype: torch.dtype, moments: str, held_bytes: int
) -> None:
    specs = optimizer_buffers(dtype, ADAMW, STATE_FORMATS[moments])
    weight_bytes = (trainable + frozen) * dtype.itemsize if weight else 0
    extents = unit_extents(
        start,
        specs,
        weight_bytes=weight_bytes,
        chunks_of=trainable,
        chunk_numel=CHUNK_NUMEL,
        gradient_bytes=trainable * held_bytes,
    )
    at = start
    if weight_bytes:
        assert extents.weight_offset == start
        at += whole_pages(weight_bytes)
    else:
        assert extents.weight_offset is None
    covered = 0
    for chunk in extents.chunks:
        assert chunk.offset == at and at % PAGE == 0
        numel = chunk.span.stop - chunk.span.start
        assert chunk.span.start == covered and chunk.nbytes == chunk_bytes(specs, numel)
        inside = 0
        for spec in specs:
            assert chunk.starts[spec.name] >= inside and chunk.starts[spec.name] % PAGE == 0
            inside = chunk.starts[spec.name] + spec.nbytes(numel)
        assert inside <= chunk.nbytes
        at, covered = at + chunk.nbytes, chunk.span.stop
    assert covered == trainable
    if trainable * held_bytes:
        assert extents.gradient_offset == at and at % PAGE == 0
        at += whole_pages(trainable * held_bytes)
    else:
        assert extents.gradient_offset is None
    assert extents.end == at
