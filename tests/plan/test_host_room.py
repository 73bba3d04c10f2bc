"""Which limit counts, and how ranks share it."""

import resource
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from ds_slide.plan import host_room as module
from ds_slide.plan.cgroups import MemoryLimit
from ds_slide.plan.host_room import THREADS_ADDRESS_SPACE, host_room, share_with
from ds_slide.report.log import size

GIB = 1 << 30


@pytest.fixture
def limits(monkeypatch):
    """Of the control groups; the machine has 100 GiB free, and this process 3 GiB of address space."""
    found = []
    monkeypatch.setattr(module, "memory_limits", lambda: found)
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=100 * GIB))
    monkeypatch.setattr("psutil.Process", lambda: SimpleNamespace(memory_info=lambda: SimpleNamespace(vms=3 * GIB)))
    monkeypatch.setattr(module, "_ranks_in", Counter())
    return found


def limit(path, room, group):
    return MemoryLimit(Path(path), 2 * room, room, group)


@pytest.mark.usefixtures("limits")
def test_the_machine_alone():
    room = host_room(local_ranks=4, untouched=GIB)
    assert (room.nbytes, room.source) == (24 * GIB, "MemAvailable of /proc/meminfo, for 4 ranks")


def test_the_least_counts(limits):
    limits += [limit("/a/b/memory.max", 60 * GIB, "1"), limit("/a/memory.max", 20 * GIB, "2")]
    room = host_room(local_ranks=1, untouched=GIB)
    assert room.nbytes == 19 * GIB
    assert room.source == f"/a/memory.max is {size(40 * GIB)} and has {size(20 * GIB)} left"


def test_ranks_share_the_groups_that_they_are_in(limits):
    """Two ranks of a job, each in a group of its own: the job's memory is halved, that of the ranks is not."""
    limits += [limit("/job/rank0/memory.max", 10 * GIB, "rank0"), limit("/job/memory.max", 30 * GIB, "job")]
    own = module.groups()
    share_with([own, [own[0].replace("rank0", "rank1"), own[1]]])
    assert host_room(local_ranks=2).nbytes == 10 * GIB
    limits[1] = limit("/job/memory.max", 18 * GIB, "job")
    room = host_room(local_ranks=2)
    assert room.nbytes == 9 * GIB
    assert room.source.endswith(f"has {size(18 * GIB)} left, for 2 ranks")


@pytest.mark.usefixtures("limits")
def test_the_address_space_is_no_ranks_but_this_ones(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (8 * GIB, resource.RLIM_INFINITY))
    room = host_room(local_ranks=2, untouched=GIB)  # what is set aside is counted as used there
    assert room.nbytes == 5 * GIB - THREADS_ADDRESS_SPACE
    assert room.source == f"the limit of address space (ulimit -v) is {size(8 * GIB)}, and {size(3 * GIB)} are in use"


def test_no_room_at_all_is_zero(limits):
    limits.append(limit("/a/memory.max", 0, "1"))
    assert host_room(local_ranks=1, untouched=GIB).nbytes == 0
