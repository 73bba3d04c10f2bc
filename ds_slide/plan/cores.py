"""The cores of each rank of a host: those of the memory node of its GPU, divided among the ranks there.

Functions that read the kernel's tree take its root, `sysfs`.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

SYSFS = Path("/sys")
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_BINDS = ("OMP_PLACES", "OMP_PROC_BIND", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
"""Variables by which a user binds threads of OpenMP."""
_BINDS_NOTHING = ("", "false", "none", "disabled")

Nodes = Mapping[int, Sequence[int]]
"""The cores of each memory node, in ascending order of nodes."""


@dataclass(frozen=True)
class GpuPlace:
    """Where a GPU is. `node`: its memory node. `port`: the root port of PCIe above it, which is one link for all GPUs
    below it. None: not known, as in most virtual machines."""

    node: int | None = None
    port: str | None = None

    @classmethod
    def of(cls, bus_id: str, sysfs: Path = SYSFS) -> GpuPlace:
        """Return the place of a GPU. `bus_id`: such as "0000:17:00.0", in letters of any case."""
        device = sysfs / "bus" / "pci" / "devices" / bus_id.lower()
        try:
            node = int((device / "numa_node").read_text())
            # /sys/devices/pci0000:15/0000:15:01.0/.../0000:17:00.0: the root complex, the port, switches, the GPU.
            parts = device.resolve().parts
        except (OSError, ValueError):
            return cls()
        root = next((place for place, part in enumerate(parts) if part.startswith("pci")), len(parts))
        below = parts[root + 1 : -1]
        return cls(node if node >= 0 else None, below[0] if below else None)


@dataclass(frozen=True)
class Seat:
    """Where a rank may run. `host`: the same for all ranks of a host. `cores`: as the process was started. `node`: the
    memory node of its GPU; None: not known. `binds`: the user binds threads by variables of OpenMP."""

    host: str
    cores: frozenset[int]
    node: int | None = None
    binds: bool = False

    @classmethod
    def of_this_process(cls, node: int | None = None) -> Seat:
        binds = any(os.environ.get(name, "").lower() not in _BINDS_NOTHING for name in _BINDS)
        host = _BOOT.read_text().strip() if _BOOT.exists() else ""
        return cls(host, frozenset(os.sched_getaffinity(0)), node, binds)


@dataclass(frozen=True)
class Share:
    """`cores`: the cores of one rank. `around`: all cores that its process may use on the memory nodes of `cores`."""

    cores: tuple[int, ...]
    around: frozenset[int]

    @classmethod
    def whole(cls, cores: frozenset[int] | None = None) -> Share:
        """Return a share of all `cores`. None: of all cores that this process may use."""
        cores = frozenset(os.sched_getaffinity(0)) if cores is None else cores
        return cls(tuple(sorted(cores)), cores)


def share_of(rank: int, seats: Sequence[Seat], nodes: Nodes) -> Share:
    """Return the share of `rank`. `seats`: of all ranks. `nodes`: of this rank's host.

    Ranks that were started with the same cores divide them. A rank with cores of its own keeps them: its user has
    chosen them (taskset, numactl, `deepspeed --bind_cores_to_rank`). If each node has a rank, ranks divide the cores of
    their own node. If a node has none, its cores and the bandwidth of its memory would lie idle. Then all cores are
    divided, in the order of the nodes: all ranks have equal work, and the slowest one counts. Shares are equal in size.
    """
    own = seats[rank]
    group = [other for other, seat in enumerate(seats) if (seat.host, seat.cores) == (own.host, own.cores)]
    if len(group) == 1:
        return Share.whole(own.cores)
    if any(seats[other].binds for other in group):
        return Share(_part(sorted(own.cores), group.index(rank), len(group)), own.cores)
    usable = _within(nodes, own.cores)
    homes = {other: seats[other].node for other in group}
    if set(homes.values()) == set(usable) and own.node is not None:
        group = [other for other in group if homes[other] == own.node]
        cores = usable[own.node]
    else:
        group.sort(key=lambda other: _last_if_none(homes[other]))
        cores = list(chain.from_iterable(usable.values()))
    mine = _part(cores, group.index(rank), len(group))
    return Share(mine, frozenset(chain.from_iterable(each for each in usable.values() if set(each) & set(mine))))


def memory_nodes(sysfs: Path = SYSFS) -> Nodes:
    """Return the cores of each node that has some, threads of one physical core side by side. Empty: not known."""
    found = {}
    for folder in (sysfs / "devices" / "system" / "node").glob("node[0-9]*"):
        cores = _listed(folder / "cpulist")
        if cores:
            first = {core: min(_listed(_siblings(sysfs, core)), default=core) for core in cores}
            found[int(folder.name.removeprefix("node"))] = sorted(cores, key=lambda core: (first[core], core))
    return dict(sorted(found.items()))


def gpu_node(index: int | None) -> int | None:
    """Return the memory node of CUDA device `index`; None without a GPU, or where it is not known."""
    bus_id = None if index is None else gpu_bus_id(index)
    return None if bus_id is None else GpuPlace.of(bus_id).node


def gpu_bus_id(index: int) -> str | None:
    """Return where CUDA device `index` of this process is on PCIe, as the driver writes it; None where it cannot be
    asked. Not all accepted versions of torch know it."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    device, name = ctypes.c_int(), ctypes.create_string_buffer(32)
    # Each function returns 0 where it has worked. The first one does nothing when it is called again.
    if driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), index):
        return None
    return None if driver.cuDeviceGetPCIBusId(name, len(name), device) else name.value.decode()


def as_list(cores: Sequence[int]) -> str:
    """Return cores as the kernel writes them: "0-3,8"."""
    ordered = sorted(cores)
    begins = [core for core in ordered if core - 1 not in ordered]
    ends = [core for core in ordered if core + 1 not in ordered]
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(begins, ends, strict=True))


def _part(cores: Sequence[int], place: int, count: int) -> tuple[int, ...]:
    """Return part `place` of `count` equal ones. With fewer cores than parts each part is all cores."""
    size = len(cores) // count
    return tuple(cores[place * size : (place + 1) * size] if size else cores)


def _within(nodes: Nodes, cores: frozenset[int]) -> dict[int, list[int]]:
    """Return the nodes with `cores` only. Cores of no known node are one more node, the last."""
    found = {node: [core for core in there if core in cores] for node, there in nodes.items()}
    others = sorted(cores.difference(*nodes.values()))
    if others:
        found[max(found, default=-1) + 1] = others
    return {node: there for node, there in found.items() if there}


def _last_if_none(node: int | None) -> float:
    return float("inf") if node is None else node


def _siblings(sysfs: Path, core: int) -> Path:
    return sysfs / "devices" / "system" / "cpu" / f"cpu{core}" / "topology" / "thread_siblings_list"


def _listed(file: Path) -> list[int]:
    """Return the numbers of a list such as "0-3,8"; none where the file cannot be read."""
    try:
        text = file.read_text().strip()
    except OSError:
        return []
    ranges = [part.partition("-") for part in text.split(",") if part]
    return [core for first, _, last in ranges for core in range(int(first), int(last or first) + 1)]
