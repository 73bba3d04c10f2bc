"""Lanes and units as the runtime makes them, on the CPU, without a model and without DeepSpeed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from ds_slide.compression.codec import Identity
from ds_slide.model.layout import ParameterInfo, build_layout
from ds_slide.model.structure import Precision, UnitSpec
from ds_slide.optim.adamw import ADAMW
from ds_slide.optim.low_precision import STATE_FORMATS
from ds_slide.report.statistics import LaneMeter
from ds_slide.runtime.core.device import Device
from ds_slide.runtime.core.futures import Failures, Future
from ds_slide.runtime.core.lanes import Delay, StreamWorker, UpdateWorker
from ds_slide.runtime.core.pool import BufferPool
from ds_slide.runtime.core.settings import UnitPlan
from ds_slide.runtime.core.unit import Unit
from ds_slide.store.host_memory import HostMemory
from ds_slide.store.in_memory import InMemory, NotHeld, StatesInMemory, WeightsInMemory
from ds_slide.store.state import UnitState
from ds_slide.store.state_buffers import optimizer_buffers

# The test files of this folder import `markers` by this name.
sys.path.insert(0, str(Path(__file__).resolve().parent))

NUMEL = 64

MakeWorker = Callable[[str], StreamWorker]
MakePool = Callable[[int], BufferPool]
MakeUnits = Callable[[int], list[Unit]]


@pytest.fixture
def device() -> Device:
    return Device(torch.device("cpu"))


@pytest.fixture
def failures() -> Failures:
    return Failures()


@pytest.fixture
def make_pool(failures: Failures) -> MakePool:
    """So many buffers of one byte."""
    memory = HostMemory(page_lock=False, huge_pages=False)
    return lambda count: BufferPool(memory.pool(1, count, transfers=False), failures, "buffers")


@pytest.fixture
def make_worker(device: Device, failures: Failures) -> Iterator[MakeWorker]:
    lanes: list[StreamWorker] = []

    def make(name: str) -> StreamWorker:
        lanes.append(StreamWorker(name, device, failures, LaneMeter(), Delay(0.0, 0)))
        return lanes[-1]

    yield make
    for lane in lanes:
        lane.close()


@pytest.fixture
def updates(device: Device, failures: Failures) -> Iterator[UpdateWorker]:
    lane = UpdateWorker(device, failures, LaneMeter(), Delay(0.0, 0))
    yield lane
    lane.close()


def make_unit(order: int, failures: Failures) -> Unit:
    """A block of one parameter; every weight holds `100 * order`, and an update adds one."""
    layout = build_layout([ParameterInfo("weight", (NUMEL,), NUMEL, 0)], 1)
    parameter = nn.Parameter(torch.empty(0))
    spec = UnitSpec(
        f"blocks.{order}", "block", order, None, (("weight", parameter),), NUMEL, Precision.declared(parameter)
    )
    weight = torch.full((NUMEL,), 100.0 * order)
    specs = optimizer_buffers(torch.float32, ADAMW, STATE_FORMATS["fp32"])
    states = {spec.name: InMemory(torch.zeros(NUMEL)) for spec in specs}
    state = UnitState(specs, WeightsInMemory(InMemory(weight)), StatesInMemory(specs, states), NotHeld())
    plan = UnitPlan(spec, layout, [parameter], Identity(layout, torch.float32))
    return Unit(plan, order, state, Future.completed(failures))


@pytest.fixture
def make_units(failures: Failures) -> MakeUnits:
    return lambda count: [make_unit(order, failures) for order in range(count)]


@pytest.fixture(scope="session")
def unit_of() -> Callable[[int, Failures], Unit]:
    return make_unit
