"""Entries of the plan are given out once, with the bytes and in the tier that they have there."""

from __future__ import annotations

import pytest
import torch

from ds_slide.plan.allocations import Allocation
from ds_slide.runtime.core.allocator import Allocator
from ds_slide.runtime.core.device import Device
from ds_slide.runtime.core.futures import Failures
from ds_slide.store.host_memory import HostMemory

ENTRIES = [
    Allocation("weight", "host", 4096, "states", page_locked=True),
    Allocation("slots", "gpu", 3 * 512, "the window", 3),
    Allocation("chunks", "host", 2 * 8192, "states on their way", 2),
    Allocation("moments", "ssd", 12_288, "states"),
    Allocation("frozen", "host", 0, "states"),
]


@pytest.fixture
def memory() -> HostMemory:
    return HostMemory(page_lock=False, huge_pages=False)


@pytest.fixture
def allocator(memory: HostMemory, device: Device) -> Allocator:
    return Allocator(ENTRIES, memory, device)


def test_each_entry_has_its_bytes(allocator: Allocator, memory: HostMemory, failures: Failures) -> None:
    assert allocator.tier("slots") == "gpu" and allocator.tier("no such") is None
    weight, frozen = allocator.tensor("weight", torch.bfloat16), allocator.tensor("frozen", torch.float32)
    assert (weight.numel(), weight.dtype, frozen.numel()) == (2048, torch.bfloat16, 0)
    assert memory.total_bytes == 4096
    slots = allocator.buffers("slots")
    assert [slot.numel() for slot in slots] == [512] * 3 and memory.total_bytes == 4096
    chunks = allocator.pool("chunks", failures)
    assert (chunks.buffer_bytes, len(chunks.addresses)) == (8192, 2) and memory.total_bytes == 4096 + 2 * 8192
    assert allocator.pools == {"chunks": chunks}
    assert allocator.on_ssd("moments") == 12_288
    allocator.require_all_given()


def test_an_entry_is_given_out_once_and_only_in_its_tier(allocator: Allocator) -> None:
    with pytest.raises(KeyError, match="no such"):
        allocator.tensor("no such", torch.float32)
    for ask in (lambda: allocator.on_ssd("weight"), lambda: allocator.buffers("moments")):
        with pytest.raises(KeyError, match="in the tier"):
            ask()
    allocator.tensor("weight", torch.bfloat16)
    with pytest.raises(KeyError, match="weight"):
        allocator.tensor("weight", torch.bfloat16)
    assert allocator.tier("weight") is None


def test_what_nobody_has_taken_is_named(allocator: Allocator) -> None:
    allocator.tensor("weight", torch.bfloat16)
    with pytest.raises(KeyError, match="not allocated: slots, chunks, moments, frozen"):
        allocator.require_all_given()
