"""A store that keeps sums: bytes that are not those that were written last never reach who reads them."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from damage import KINDS, Extent, state_file_of

from ds_slide import _native
from ds_slide.errors import SlideError
from ds_slide.store.directories import run_files
from ds_slide.store.directories.run_files import RunFiles
from ds_slide.store.ssd import files
from ds_slide.store.ssd.extents import REQUEST_BYTES
from ds_slide.store.ssd.files import IoSettings, TransferPart
from ds_slide.store.ssd.page_sums import PageSums
from ds_slide.store.ssd.store import SsdStore

MIB = 1 << 20
PAGE = 4096
SIZE = 6 * MIB + 3 * PAGE
WAIT_S = 60.0


class Memory:
    """Page-aligned bytes: `array` [nbytes] uint8 at `address`."""

    def __init__(self, nbytes: int, seed: int) -> None:
        self.slab = _native.Slab(nbytes, False, False)
        self.address = self.slab.ptr
        self.array = np.frombuffer(self.slab.memory, np.uint8)
        self.array[:] = np.frombuffer(random.Random(seed).randbytes(nbytes), np.uint8)


class Made:
    """A store with sums, and the errors that it gave to its `failures`, which this object is."""

    def __init__(self, folder: Path, nbytes: int, mounts: int = 1, **options: object) -> None:
        self.errors: list[BaseException] = []
        self.failed = threading.Event()
        self.sums = PageSums(torch.empty(nbytes // PAGE, dtype=torch.int32), threads=2)
        parents = [(f"nvme_path[{index}]", folder / f"disk{index}") for index in range(mounts)]
        self.store = SsdStore(
            parents,
            nbytes,
            self,
            **{"sums": self.sums} | options,  # type: ignore[arg-type]
        )

    def record(self, _lane: str, error: BaseException) -> None:
        self.errors.append(error)
        self.failed.set()

    def waiting(self, _what: str) -> AbstractContextManager[None]:
        return nullcontext()


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Made]]:
    made: list[Made] = []

    def new(nbytes: int = SIZE, mounts: int = 1, **options: object) -> Made:
        made.append(Made(tmp_path, nbytes, mounts, **options))
        return made[-1]

    yield new
    for each in made:
        each.store.close()
    assert not list(tmp_path.glob("disk*/*")), "a closed store left something behind"


@pytest.mark.parametrize("backend", ["io_uring", "libaio", "threads"])
def test_no_transfer_is_mistaken_for_damage(make: Callable[..., Made], backend: str) -> None:
    """Any pages, by several transfers at once, with delays; parts that were never written; sums off for a while."""
    choices = random.Random(11)
    made = make(io=IoSettings(backend, request_bytes=MIB), delay=lambda: time.sleep(choices.uniform(0.0, 0.001)))
    model, memory = np.zeros(SIZE, np.uint8), Memory(SIZE, seed=1)
    for turn in range(12):
        made.sums.is_on = turn not in (4, 5)
        cuts = sorted(choices.sample(range(1, SIZE // PAGE), 5))
        done, expected = threading.Semaphore(0), 0
        target = Memory(SIZE, seed=2)
        for first, last in zip([0, *cuts], [*cuts, SIZE // PAGE], strict=True):
            start, nbytes = first * PAGE, (last - first) * PAGE
            read, waits, urgent = (choices.random() < 0.5 for _ in range(3))
            part = [TransferPart(start, (target if read else memory).address + start, nbytes)]
            if waits:
                (made.store.read_now if read else made.store.write_now)(part)
            else:
                (made.store.read if read else made.store.write)(part, done.release, urgent=urgent)
                expected += 1
            if not read:
                model[start : start + nbytes] = memory.array[start : start + nbytes]
        for _ in range(expected):
            assert done.acquire(timeout=WAIT_S)
        everything = Memory(SIZE, seed=3)
        made.store.read_now([TransferPart(0, everything.address, SIZE)])
        assert np.array_equal(everything.array, model)
        memory.array[:] = np.roll(memory.array, 12345)
    assert not made.errors
    assert made.store.statistics()["checked_bytes"] > 0


def check_sentence(error: BaseException, offset: int, folder: Path) -> None:
    text = str(error)
    assert isinstance(error, SlideError) and "\n" not in text
    assert text.startswith("SSD tier: ") and str(folder / "disk0") in text, text
    assert f"other bytes at offset {offset:,} than were written there (byte {offset:,} of the store)" in text, text
    assert "check the disk and keep other programs out of that directory" in text


@pytest.mark.parametrize("waits", [True, False], ids=["waits", "then"])
@pytest.mark.parametrize("kind", KINDS)
def test_damage_is_an_error_of_the_store(make: Callable[..., Made], tmp_path: Path, kind: str, waits: bool) -> None:
    made = make()
    old, new, target = (Memory(SIZE, seed=seed) for seed in (1, 2, 3))
    made.store.write_now([TransferPart(0, old.address, SIZE)])
    made.store.write_now([TransferPart(0, new.address, SIZE)])
    extent, other = Extent(3 * MIB, MIB), Extent(MIB, MIB)
    with state_file_of(made.store) as file:
        file.damage(kind, extent, other, old.array[3 * MIB : 4 * MIB].tobytes())
    made.store.read_now([TransferPart(0, target.address, MIB)])  # what is whole is read as before
    assert np.array_equal(target.array[:MIB], new.array[:MIB])
    found = 3 * MIB + (MIB // 2 if kind == "byte flipped" else 0)
    followed: list[int] = []
    part = [TransferPart(2 * MIB, target.address, 3 * MIB)]
    if waits:
        with pytest.raises(SlideError) as caught:
            made.store.read_now(part)
        check_sentence(caught.value, found, tmp_path)
    else:
        made.store.read(part, lambda: followed.append(1))
    assert made.failed.wait(WAIT_S)
    (error,) = made.errors
    check_sentence(error, found, tmp_path)
    for call in (made.store.read_now, made.store.write_now):
        with pytest.raises(SlideError, match="stopped by an earlier error"):
            call([TransferPart(0, target.address, PAGE)])
    made.store.close()
    assert not followed and len(made.errors) == 1


def test_the_file_and_its_own_offset_are_named(
    make: Callable[..., Made], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a store over two disks, where neither is the offset in the store."""
    answers = iter((3.0, 1.0))
    monkeypatch.setattr(files, "mixed_bandwidth", lambda *_: next(answers))
    made = make(8 * REQUEST_BYTES, mounts=2)
    memory = Memory(8 * REQUEST_BYTES, seed=1)
    made.store.write_now([TransferPart(0, memory.address, 8 * REQUEST_BYTES)])
    second = [unit for unit in range(8) if made.store.files.striping.pattern[unit % 4] == 1]
    assert len(second) == 2
    place = second[1] * REQUEST_BYTES + 7 * PAGE
    (piece,) = made.store.files.striping.pieces(place, PAGE)
    assert (piece.file, piece.file_offset) == (1, REQUEST_BYTES + 7 * PAGE)
    with state_file_of(made.store, mount=1) as file:
        file.write(Extent(piece.file_offset + 100, 7), b"changed")
    with pytest.raises(SlideError) as caught:
        made.store.read_now([TransferPart(0, memory.address, 8 * REQUEST_BYTES)])
    assert str(tmp_path / "disk1") in str(caught.value)
    assert f"at offset {piece.file_offset:,} " in str(caught.value)
    assert f"(byte {place:,} of the store)" in str(caught.value)


def test_the_completion_thread_checks_nothing(make: Callable[..., Made], monkeypatch: pytest.MonkeyPatch) -> None:
    names: set[str] = set()
    done = threading.Semaphore(0)
    first_wrong = PageSums.first_wrong

    def watched(sums: PageSums, *arguments: int) -> int | None:
        names.add(threading.current_thread().name)
        return first_wrong(sums, *arguments)

    monkeypatch.setattr(PageSums, "first_wrong", watched)
    made, memory = make(), Memory(SIZE, seed=1)
    made.store.write_now([TransferPart(0, memory.address, SIZE)])
    assert not names
    for _ in range(5):
        made.store.read([TransferPart(0, memory.address, SIZE)], done.release)
        assert done.acquire(timeout=WAIT_S)
    assert names == {"ds_slide-ssd-sums"}
    made.store.read_now([TransferPart(0, memory.address, SIZE)])
    assert names == {"ds_slide-ssd-sums", threading.current_thread().name}
    made.store.close()
    assert not any(thread.name.startswith("ds_slide-ssd") for thread in threading.enumerate())
    assert not made.errors


def test_what_is_urgent_is_checked_first(make: Callable[..., Made], monkeypatch: pytest.MonkeyPatch) -> None:
    """While one check lasts, three reads complete; the urgent one of them is the next."""
    made, memory = make(), Memory(SIZE, seed=1)
    made.store.write_now([TransferPart(0, memory.address, SIZE)])
    first_wrong, entered, go_on = PageSums.first_wrong, threading.Event(), threading.Event()

    def held(sums: PageSums, *arguments: int) -> int | None:
        entered.set()
        assert go_on.wait(WAIT_S)
        return first_wrong(sums, *arguments)

    monkeypatch.setattr(PageSums, "first_wrong", held)
    order: list[int] = []
    done = threading.Semaphore(0)

    def read(number: int, *, urgent: bool = False) -> None:
        place = [TransferPart(number * MIB, memory.address + number * MIB, MIB)]
        made.store.read(place, lambda: (order.append(number), done.release()), urgent=urgent)  # type: ignore[func-returns-value]

    read(0)
    assert entered.wait(WAIT_S)
    for number in (1, 2):
        read(number)
    read(3, urgent=True)
    while made.store._to_check.qsize() < 3:
        os.sched_yield()
    go_on.set()
    for _ in range(4):
        assert done.acquire(timeout=WAIT_S)
    assert order[:2] == [0, 3] and sorted(order) == [0, 1, 2, 3]


@pytest.mark.parametrize("of", ["read", "write"])
def test_the_stores_own_threads_cannot_wait_for_it(make: Callable[..., Made], of: str) -> None:
    made, memory = make(), Memory(SIZE, seed=1)
    part = [TransferPart(0, memory.address, MIB)]
    getattr(made.store, of)(part, lambda: made.store.read_now(part))
    assert made.failed.wait(WAIT_S)
    assert "cannot wait for itself" in str(made.errors[0])


def test_what_cannot_come_on_one_disk_is_given_back_on_the_others(
    make: Callable[..., Made], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "mixed_bandwidth", lambda *_: 1.0)
    made = make(mounts=2)
    first, second = made.store.files._mounts
    opened: list[Any] = []
    monkeypatch.setattr(first, "make", lambda name: opened.append(RunFiles.make(first, name)) or opened[-1])

    def refuse(_name: str) -> None:
        opened.append(os.fdopen(os.dup(opened[0].descriptor)))
        raise SlideError("no room")

    monkeypatch.setattr(second, "make", refuse)
    with pytest.raises(SlideError, match="no room"):
        made.store.extend("inputs-1", 4 * REQUEST_BYTES, None)
    with opened[1] as still_open:
        assert os.fstat(still_open.fileno()).st_size == 0
    assert made.store.nbytes == SIZE and len(made.store.files.descriptors) == 2


@pytest.mark.parametrize("mounts", [1, 3])
def test_bytes_that_come_later_are_checked_as_the_first_ones(
    make: Callable[..., Made], monkeypatch: pytest.MonkeyPatch, mounts: int
) -> None:
    """Also when the disk had no room in between; and no file grows beyond what was made."""
    monkeypatch.setattr(files, "mixed_bandwidth", lambda *_: 1.0)
    monkeypatch.setattr(run_files, "unnamed_file", lambda _directory: None)
    made, more = make(mounts=mounts), 2 * REQUEST_BYTES * mounts + PAGE
    memory = Memory(more, seed=5)
    with pytest.raises(SlideError, match="B free and needs"):
        made.store.extend("inputs-1", 1 << 60, None)
    for number in (1, 2):
        table = torch.empty(more // PAGE, dtype=torch.int32)
        assert made.store.extend(f"inputs-{number}", more, table) == SIZE + (number - 1) * more
    assert made.store.nbytes == SIZE + 2 * more
    with pytest.raises(ValueError, match="is not within"):
        made.store.write_now([TransferPart(SIZE - PAGE, memory.address, 2 * PAGE)])
    for offset in (SIZE, SIZE + more):
        made.store.read_now([TransferPart(offset, memory.address, more)])
        assert not memory.array.any()
        memory.array[:] = np.frombuffer(random.Random(offset).randbytes(more), np.uint8)
        made.store.write_now([TransferPart(offset, memory.address, more)])
    memory.array[:] = 0
    made.store.read_now([TransferPart(SIZE + more, memory.address, more)])
    assert memory.array.tobytes() == random.Random(SIZE + more).randbytes(more)
    with open(f"/proc/self/fd/{made.store.files.descriptors[2 * mounts]}", "r+b") as stream:
        stream.seek(REQUEST_BYTES + 5)
        stream.write(bytes([memory.array[REQUEST_BYTES * mounts + 5] ^ 1]))
    with pytest.raises(SlideError, match=rf"disk0/\S+ \(deleted\) holds other bytes at offset {REQUEST_BYTES:,} than"):
        made.store.read_now([TransferPart(SIZE + more, memory.address, more)])
