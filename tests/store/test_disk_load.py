"""The load that measures disks: which bytes it asks for, how many, and what it does when the disk fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from ds_slide import _native
from ds_slide.store.ssd.bandwidth import Load, OpenFile, put_load

REQUEST, COUNT = 1 << 16, 8
FILE_BYTES = 20 * REQUEST


def test_reads_and_writes_have_a_half_each_and_go_round() -> None:
    load = Load("mixed", REQUEST, 4)
    places = [load.place(number, FILE_BYTES) for number in range(40)]
    reads = [offset // REQUEST for write, offset in places if not write]
    writes = [offset // REQUEST for write, offset in places if write]
    assert reads == [*range(10)] * 2 and writes == [*range(10, 20)] * 2
    later = Load("mixed", REQUEST, 4, begin_bytes=3 * REQUEST)
    assert later.place(0, FILE_BYTES) == (False, 3 * REQUEST)
    assert later.place(1, FILE_BYTES) == (True, 13 * REQUEST)


@pytest.mark.parametrize("pattern", ["read", "write"])
def test_one_way_goes_through_the_whole_file(pattern: str) -> None:
    places = [Load(pattern, REQUEST, 4).place(number, FILE_BYTES) for number in range(21)]
    assert [offset // REQUEST for _, offset in places] == [*range(20), 0]
    assert {write for write, _ in places} == {pattern == "write"}


@pytest.mark.parametrize("requests", [1, 3, 20])
def test_so_many_requests_and_no_more(tmp_path: Path, requests: int) -> None:
    slab = _native.Slab(COUNT * REQUEST, False, False)
    engine = _native.IoEngine("threads", COUNT, REQUEST)
    try:
        number = engine.open(str(tmp_path / "file"), FILE_BYTES)
        file = OpenFile(engine, number, FILE_BYTES, slab.ptr, COUNT)
        sample = put_load(file, Load("write", REQUEST, COUNT), requests=requests)
        assert (sample.read_bytes, sample.written_bytes) == (0, requests * REQUEST)
        mixed = put_load(file, Load("mixed", REQUEST, COUNT), seconds=0.0)
        assert mixed.read_bytes == mixed.written_bytes == COUNT // 2 * REQUEST  # what was handed over at once
        assert engine.stats()["written_bytes"] == sample.written_bytes + mixed.written_bytes
    finally:
        engine.close()


def test_a_disk_that_fails_is_an_error_and_no_figure(tmp_path: Path) -> None:
    slab = _native.Slab(COUNT * REQUEST, False, False)
    engine = _native.IoEngine("threads", COUNT, REQUEST)
    try:
        number = engine.open(str(tmp_path / "file"), FILE_BYTES)
        file = OpenFile(engine, number, FILE_BYTES, slab.ptr, COUNT)
        (tmp_path / "file").open("r+").truncate(0)
        with pytest.raises(OSError, match=r"file.*"):
            put_load(file, Load("read", REQUEST, COUNT), requests=20)
    finally:
        engine.close()
