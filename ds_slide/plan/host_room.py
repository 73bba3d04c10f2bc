"""How much host memory this process may still take, and what limits it: the machine, a container, the shell."""

from __future__ import annotations

import bisect
import os
import resource
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from ds_slide.plan.cgroups import MemoryLimit, memory_limits
from ds_slide.report.log import size

# Address space for the stacks (8 MiB) and malloc's arenas (64 MiB) of the threads that an engine starts. 14 threads
# take it on a small machine; update threads need only a stack.
THREADS_ADDRESS_SPACE = 1 << 30
_BOOT = Path("/proc/sys/kernel/random/boot_id")


def local_ranks() -> int:
    """Ranks on this machine, as launchers announce them."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("LOCAL_SIZE", "1")))


@dataclass(frozen=True)
class HostRoom:
    """Host memory that is left. `nbytes`: for this process. `source`: what limits it, as part of a sentence."""

    nbytes: int
    source: str


_ranks_in: Counter[str] = Counter()


def groups() -> list[str]:
    """Return the memory control groups with a limit that this process is in. A group has the same name in all its
    processes."""
    return [_name(limit) for limit in memory_limits()]


def share_with(groups_of_ranks: Iterable[Iterable[str]]) -> None:
    """Remember the `groups` of every rank: a group's memory is divided evenly between the ranks in it. The groups of a
    rank do not change."""
    _ranks_in.clear()
    for names in groups_of_ranks:
        _ranks_in.update(set(names))


def host_room(local_ranks: int, untouched: int = 0) -> HostRoom:
    """Return the least room that the machine, each control group and the limit of the address space leave.

    `local_ranks`: ranks on this machine, which share what is free. `untouched`: bytes that this process has set aside
    and not written yet, so that the kernel still counts them as free.
    """
    machine = psutil.virtual_memory().available // local_ranks
    rooms = [HostRoom(machine - untouched, f"MemAvailable of /proc/meminfo{_for_each(local_ranks)}")]
    for limit in memory_limits():
        ranks = max(1, _ranks_in[_name(limit)])
        source = f"{limit.file} is {size(limit.limit)} and has {size(limit.room)} left{_for_each(ranks)}"
        rooms.append(HostRoom(limit.room // ranks - untouched, source))
    soft = resource.getrlimit(resource.RLIMIT_AS)[0]
    if soft != resource.RLIM_INFINITY:
        used = psutil.Process().memory_info().vms
        source = f"the limit of address space (ulimit -v) is {size(soft)}, and {size(used)} are in use"
        rooms.append(HostRoom(soft - used - THREADS_ADDRESS_SPACE, source))
    least = min(rooms, key=lambda room: room.nbytes)
    return HostRoom(max(0, least.nbytes), least.source)


def _name(limit: MemoryLimit) -> str:
    """Return a group's name, which is unique among all machines."""
    try:
        return f"{_BOOT.read_text().strip()} {limit.group}"
    except OSError:
        return limit.group


def _for_each(ranks: int) -> str:
    return "" if ranks == 1 else f", for {ranks} ranks"


# ----------------------------------------------------------------------------------------------------------------------
# Which addresses of this process are pages of files, like weights that `from_pretrained` loads, until written to. The
# kernel counts such pages as available memory already, so that unmapping them frees nothing more.

# Files in memory: their pages are not available.
_IN_MEMORY = ("/dev/shm/", "/memfd:", "/SYSV", "/dev/zero")


@dataclass(frozen=True)
class FileMappings:
    """Ranges [start, end) of addresses, ascending."""

    starts: Sequence[int]
    ends: Sequence[int]

    @staticmethod
    def now(maps: Path = Path("/proc/self/maps")) -> FileMappings:
        """Read the mappings that the kernel lists: address range, permissions, offset, device, inode, path."""
        ranges = []
        for line in maps.read_text().splitlines():
            fields = line.split(maxsplit=5)
            if len(fields) == 6 and fields[4] != "0" and not fields[5].startswith(_IN_MEMORY):
                start, end = (int(address, 16) for address in fields[0].split("-"))
                ranges.append((start, end))
        return FileMappings([start for start, _ in ranges], [end for _, end in ranges])

    def holds(self, address: int) -> bool:
        place = bisect.bisect_right(self.starts, address) - 1
        return place >= 0 and address < self.ends[place]
