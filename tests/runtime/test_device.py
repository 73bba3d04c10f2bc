"""The bytes that recordings hold count as allocated, now and in peaks."""

from __future__ import annotations

import pytest
import torch

from ds_slide.runtime.core import device as module
from ds_slide.runtime.core.device import Device


class Allocator:
    """What torch says of a GPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.allocated = self.peak = 0
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: self.allocated)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: self.peak)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: self.become(self.allocated, reset=True))
        monkeypatch.setattr(module, "_held", module.Counter())

    def become(self, allocated: int, *, reset: bool = False) -> None:
        self.allocated = allocated
        self.peak = allocated if reset else max(self.peak, allocated)


def test_held_bytes_count_from_then_on(monkeypatch: pytest.MonkeyPatch) -> None:
    torch_has, gpu = Allocator(monkeypatch), Device(torch.device("cuda", 0))
    for allocated in (900, 500):
        torch_has.become(allocated)
    gpu.hold(300)
    assert (gpu.allocated(), gpu.peak()) == (800, 900)  # not 1,200: these bytes were not held at the peak
    torch_has.become(700)
    assert (gpu.allocated(), gpu.peak()) == (1000, 1000)
    torch_has.become(200)
    gpu.hold(-300)
    assert (gpu.allocated(), gpu.peak()) == (200, 1000)
    gpu.reset_peak()
    assert gpu.peak() == 200


def test_all_engines_count_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    Allocator(monkeypatch)
    one, other = Device(torch.device("cuda", 0)), Device(torch.device("cuda", 0))
    one.hold(300)
    assert other.allocated() == 300
    assert Device(torch.device("cuda", 1)).allocated() == 0
