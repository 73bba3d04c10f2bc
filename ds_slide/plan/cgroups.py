"""Limits that the kernel's control groups set to the memory of this process, in a container or a job of a scheduler.

Each group counts the memory of its processes and of the groups below it. So every group from this process's own up to
the top of what is mounted here limits it. Both versions are read, also where both are mounted: version 2 has memory.max
and memory.high (above it the kernel slows the processes down until they stand still), version 1 memory.limit_in_bytes.

A container may see another tree than /proc/self/cgroup names. `/proc/self/mountinfo` says which group lies at the
mount. Where the named group is not below it, the mount itself is the container's group. A mount that was made outside
of the container has a group above the container's: its root has one ".." for each level between them. Neither file says
which group below is the container's own; it is the group that lists this process.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class MemoryLimit:
    """The limit of one group. `file`: where the limit stands. `room`: bytes that the group's processes may still take;
    page cache that the kernel would drop for them counts as free. `group`: the same for all processes in it."""

    file: Path
    limit: int
    room: int
    group: str


@dataclass(frozen=True)
class _Mount:
    root: str
    """The group that lies at `point`."""
    point: Path


def memory_limits(root: Path = Path("/")) -> list[MemoryLimit]:
    """Return the limits of this process, its own group's first. `root`: where /proc and the mounts are, for tests."""
    paths = _group_paths(root)
    limits = []
    for version, mounts in _mounts(root).items():
        if version in paths and mounts:
            limits += list(_limits_of(version, _directories(paths[version], mounts)))
    return limits


def _group_paths(root: Path) -> dict[int, str]:
    """Return the groups of this process, by the version of the hierarchy that could limit its memory."""
    paths = {}
    for line in _text(root / "proc/self/cgroup").splitlines():
        fields = line.split(":", 2)
        if len(fields) < 3:
            continue
        number, controllers, path = fields
        if number == "0" and not controllers:
            paths[2] = path
        elif "memory" in controllers.split(","):
            paths[1] = path
    return paths


def _mounts(root: Path) -> dict[int, list[_Mount]]:
    mounts: dict[int, list[_Mount]] = {2: [], 1: []}
    for line in _text(root / "proc/self/mountinfo").splitlines():
        before, separator, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if not separator or len(fields) < 5 or len(kind) < 3:
            continue
        version = {"cgroup2": 2, "cgroup": 1}.get(kind[0])
        if version == 2 or (version == 1 and "memory" in kind[2].split(",")):
            point = root / _unescaped(fields[4]).lstrip("/")
            mounts[version].append(_Mount(_unescaped(fields[3]), point))
    return mounts


def _unescaped(text: str) -> str:
    """Return a path of mountinfo with its octal escapes (spaces and the like) as characters."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def _directories(path: str, mounts: list[_Mount]) -> list[Path]:
    """Return the directories from this process's group up to the top of its mount."""
    for mount in sorted(mounts, key=lambda mount: -len(mount.root)):
        top, own = _parts(mount.root), _parts(path)
        below = own[len(top) :]
        if own[: len(top)] == top and ".." not in below and (directory := mount.point.joinpath(*below)).is_dir():
            return [directory, *directory.parents[: len(below)]]
    for mount in mounts:
        if ".." not in _parts(mount.root):
            return [mount.point]
    for mount in mounts:
        if found := _group_of_this_process(mount, path):
            return found
    return [mounts[0].point]


def _parts(path: str) -> list[str]:
    return [part for part in path.split("/") if part]


def _group_of_this_process(mount: _Mount, path: str) -> list[Path]:
    """Return the group and all groups above it up to the top of `mount`; empty where it is not found. `path`: its path
    below the container's group."""
    ups, below = _parts(mount.root), _parts(path)
    if set(ups) != {".."} or ".." in below:
        return []
    # Not Path.glob, which fails where a group ends meanwhile.
    for group in glob.iglob(os.path.join(glob.escape(str(mount.point)), *["*"] * len(ups))):
        own = Path(group, *below)
        if str(os.getpid()) in _text(own / "cgroup.procs").split():
            return [own, *own.parents[: len(ups) + len(below)]]
    return []


def _limits_of(version: int, directories: list[Path]) -> Iterator[MemoryLimit]:
    names = ("memory.max", "memory.high") if version == 2 else ("memory.limit_in_bytes",)
    for directory in directories:
        limits = {name: limit for name in names if (limit := _number(directory / name)) is not None}
        used = _number(directory / ("memory.current" if version == 2 else "memory.usage_in_bytes"))
        if limits and used is not None:
            name = min(limits, key=lambda name: limits[name])
            room = max(0, limits[name] - max(0, used - _reclaimable(directory, version)))
            try:
                status = directory.stat()
            except OSError:  # a group that has just ended
                continue
            yield MemoryLimit(directory / name, limits[name], room, f"{status.st_dev}:{status.st_ino}")
        if version == 1 and _text(directory.parent / "memory.use_hierarchy").strip() == "0":
            return  # the groups above do not count what this one uses


def _reclaimable(directory: Path, version: int) -> int:
    """Return the bytes that the kernel can free: page cache on its lists of files, which do not hold shared memory, and
    its own caches."""
    prefix = "" if version == 2 else "total_"
    kinds = {f"{prefix}active_file", f"{prefix}inactive_file", "slab_reclaimable"}
    lines = (line.split() for line in _text(directory / "memory.stat").splitlines())
    return sum(int(line[1]) for line in lines if len(line) == 2 and line[0] in kinds)


def _number(path: Path) -> int | None:
    """Return the number in a file; None for no limit, and where the file is missing (the topmost group has none)."""
    text = _text(path).strip()
    # Version 1 says "no limit" as the largest number of whole pages; no machine has an exbibyte.
    if not text.isdigit() or int(text) >= 1 << 60:
        return None
    return int(text)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:  # not mounted, not readable, or a group that has just ended
        return ""
