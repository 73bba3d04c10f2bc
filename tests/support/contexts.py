"""Contexts of engines without lanes, for tests of single parts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from ds_slide.config.schema import SlideConfig
from ds_slide.report.statistics import StepRecorder
from ds_slide.report.waits import Waits
from ds_slide.runtime.core.device import Device
from ds_slide.runtime.core.futures import Failures
from ds_slide.runtime.core.ranks.collectives import Ranks
from ds_slide.store.host_memory import HostMemory


def context_of(device: Device, **others: Any) -> Any:
    """Of one rank with the default settings, if `others` has no others."""
    found: dict[str, Any] = {
        "device": device,
        "settings": SimpleNamespace(slide=SlideConfig()),
        "ranks": Ranks(),
        "failures": Failures(),
        "recorder": StepRecorder(device, Waits(device)),
        "memory": HostMemory(page_lock=False, huge_pages=False),
        "allocator": SimpleNamespace(pools={}),
    }
    return SimpleNamespace(**{**found, **others})
