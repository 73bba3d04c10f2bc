"""Inputs on their way to SSD and back: no buffer and no place has two owners, whatever is late."""

from __future__ import annotations

import gc
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from contexts import context_of

from ds_slide.runtime.activations.input_disk import InputDisk, InputPlace
from ds_slide.runtime.core.device import Device
from ds_slide.runtime.core.futures import Failures, Future
from ds_slide.runtime.core.lanes import StreamWorker
from ds_slide.runtime.core.pool import BufferLease
from ds_slide.runtime.ssd.space import SpaceOnSsd
from ds_slide.store.ssd.files import TransferPart
from ds_slide.store.ssd.store import SsdStore

ONE = 5 * 4096
"""Bytes of an input: three pieces, of which the last one is not full."""


class LateStore(SsdStore):
    """Gives writes to the disk when it is told to."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.asked: deque[Callable[[], None]] = deque()
        self.asks = threading.Semaphore(0)
        self.reads = 0

    def write(self, parts: Sequence[TransferPart], then: Callable[[], None], *, urgent: bool = False) -> None:
        self.asked.append(lambda: super(LateStore, self).write(parts, then, urgent=urgent))
        self.asks.release()

    def read(self, parts: Sequence[TransferPart], then: Callable[[], None], *, urgent: bool = False) -> None:
        self.reads += 1
        super().read(parts, then, urgent=urgent)


class LateStoreMaker:
    """A `StoreMaker` of late stores without sums."""

    def __init__(self, folder: Path, failures: Failures) -> None:
        self.stores: list[SsdStore] = []
        self.directories = [folder]
        self._failures = failures

    def open_for_inputs(self, name: str, nbytes: int, _table: torch.Tensor | None) -> SsdStore:
        store = LateStore([("ds_slide.nvme_path", self.directories[0])], nbytes, self._failures, name=name)
        self.stores.append(store)
        return store

    def table(self, _nbytes: int) -> None:
        return None


class Setup:
    def __init__(
        self, folder: Path, device: Device, failures: Failures, make_worker: Callable[[str], StreamWorker]
    ) -> None:
        self.lane, self.thread, self.failures = make_worker("inputs"), make_worker("inputs on SSD"), failures
        maker: Any = LateStoreMaker(folder, failures)
        self.stores: list[SsdStore] = maker.stores
        space = SpaceOnSsd(maker, 1)
        self.disk = InputDisk(context_of(device, failures=failures), space)
        self.disk._made, self.buffers = self.thread, self.disk._buffers

    @property
    def store(self) -> Any:
        return self.stores[0]

    def provide(self, places: int) -> int:
        """-> how many inputs there are buffers for."""
        assert self.disk.provide_buffers(ONE, 0.0)
        self.disk.provide_places(ONE, places)
        return self.buffers.nbytes // (3 * self.buffers.piece)

    def put(self, order: int) -> InputPlace:
        """An input of bytes that tell whose it is, to be written."""
        place = self.disk.place(order, ONE)
        assert place is not None
        leases = self.disk.buffers_of(place)
        fill(leases, order)
        self.disk.write(place, leases, Future.completed(self.failures))
        return place

    def write_all(self) -> None:
        self.thread.drain()
        while self.store.asked:
            self.store.asked.popleft()()


def fill(leases: Sequence[BufferLease], value: int) -> None:
    for lease in leases:
        lease.buffer.fill_(value)


def values(leases: Sequence[BufferLease]) -> set[int]:
    flat = torch.cat([lease.buffer for lease in leases])[:ONE]
    return set(flat.unique().tolist())


@pytest.fixture
def setup(
    tmp_path: Path, device: Device, failures: Failures, make_worker: Callable[[str], StreamWorker]
) -> Iterator[Setup]:
    made = Setup(tmp_path, device, failures, make_worker)
    yield made
    made.disk.close()
    assert not list(tmp_path.iterdir())


def test_a_buffer_is_the_disks_until_it_is_written(setup: Setup) -> None:
    count = setup.provide(8)
    places = [setup.put(order) for order in range(1, count + 1)]
    setup.thread.drain()
    assert len(setup.store.asked) == count and setup.buffers.lease(ONE) is None
    setup.write_all()
    for place in places:
        place.written.wait()
    assert all(pool.statistics()["free"] == pool.statistics()["buffers"] for pool in setup.buffers._own)


def test_an_input_is_read_behind_its_write_and_again(setup: Setup) -> None:
    setup.provide(8)
    places = [setup.put(order) for order in (1, 2)]
    setup.disk.read_ahead(reversed(places), setup.lane)
    arriving = setup.disk.read(places[1], setup.lane)
    setup.lane.drain()
    assert all(setup.store.asks.acquire(timeout=60) for _ in places)
    assert setup.store.reads == 0 and not arriving.here.is_complete
    while setup.store.asked:
        setup.store.asked.popleft()()
    for _ in range(2):
        assert values(arriving.wait()) == {2}
        arriving.release()
        arriving = setup.disk.read(places[1], setup.lane)
    arriving.wait()
    arriving.release()
    again = setup.disk.read(places[0], setup.lane)
    assert values(again.wait()) == {1}
    again.release()


def test_what_is_read_ahead_gives_way_to_what_is_needed(setup: Setup) -> None:
    count = setup.provide(8)
    places = [setup.put(order) for order in (1, 2, 3)]
    setup.write_all()
    for place in places:
        place.written.wait()
    setup.disk.read_ahead(places[:2], setup.lane)
    held = [setup.disk.buffers_of(places[2]) for _ in range(count - 2)]
    needed = setup.disk.read(places[2], setup.lane)  # of the two, the second is given up
    assert values(needed.wait()) == {3} and list(setup.disk._reading) == [places[0]]
    setup.disk.give_up()
    needed.release()
    for lease in (lease for leases in held for lease in leases):
        lease.release()


def test_a_place_is_free_when_its_input_is_gone_and_written(setup: Setup) -> None:
    setup.provide(2)
    places = [setup.put(order) for order in (1, 2)]
    assert setup.disk.place(3, ONE) is None
    places.pop()
    setup.thread.drain()
    assert setup.disk.place(3, ONE) is None  # the write has not begun
    setup.write_all()
    setup.store.close()  # the writes have been answered
    gc.collect()
    assert setup.disk.place(3, ONE) is not None


def test_an_input_longer_than_all_first_buffers_gets_those_that_came_later(setup: Setup) -> None:
    """It waits for a buffer of others, and not for one that it has itself."""
    setup.provide(1)
    first = setup.buffers.nbytes
    assert setup.buffers.hold(2 * first, 1)
    held = setup.buffers.lease(2 * first)
    assert held is not None
    last = held.pop()
    for lease in held:
        lease.release()
    timer = threading.Timer(0.2, last.release)
    timer.start()
    found: list[Sequence[BufferLease]] = []
    waiting = threading.Thread(target=lambda: found.append(setup.buffers.lease_when_free(2 * first)), daemon=True)
    waiting.start()
    waiting.join(timeout=10)
    assert found, "it waits for a buffer that it has itself"
    for lease in found[0]:
        lease.release()
