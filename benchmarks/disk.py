"""What the disk gave and what a training step asked of it: the rows of `--offload nvme`."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import ssd

CEILING_SECONDS = 1.2
# Each of its halves holds what a disk of 4 GB/s reads or writes in that time.
CEILING_FILE_BYTES = 8 << 30
_SECTOR_BYTES = 512


def ceiling(folder: str) -> dict[str, Any]:
    """Mixed bandwidth of the disk that holds `folder` (see `ssd.mixed_ceiling`), on a file that is gone afterwards."""
    free = shutil.disk_usage(folder).free
    with ssd.full_file(
        Path(folder), min(CEILING_FILE_BYTES, free // 4 // ssd.FILL_BYTES * ssd.FILL_BYTES), False
    ) as path:
        return ssd.mixed_ceiling(path, CEILING_SECONDS)


def empty(folder: str) -> None:
    """Remove all that a system left in its folder."""
    shutil.rmtree(folder)
    Path(folder).mkdir()


def process_bytes() -> dict[str, int]:
    """Bytes that this process, all its threads, had the storage layer read and write since it began."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return {"read": int(fields["read_bytes"]), "written": int(fields["write_bytes"])}


def device_bytes(folder: str) -> dict[str, int]:
    """Bytes read and written by everybody on the block device of `folder`; empty where it has none (tmpfs, overlay)."""
    number = os.stat(folder).st_dev
    stat = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}/stat")
    if not stat.exists():
        return {}
    fields = stat.read_text().split()
    return {"read": int(fields[2]) * _SECTOR_BYTES, "written": int(fields[6]) * _SECTOR_BYTES}


class Traffic:
    """Counts from its construction."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._begin = self._now()

    def _now(self) -> dict[str, int]:
        counters = {"os": process_bytes(), "device": device_bytes(self._folder)}
        return {f"{name}_{way}_bytes": count for name, ways in counters.items() for way, count in ways.items()}

    def since_start(self) -> dict[str, int]:
        """`os_read_bytes`, `os_written_bytes`, and `device_...` where the disk is a block device."""
        now = self._now()
        return {name: now[name] - begin for name, begin in self._begin.items()}


def summarise(
    ceilings: list[dict[str, Any]],
    moved: dict[str, int],
    own: list[dict[str, Any]],
    parameters: int,
    steps: int,
    step_s: float,
) -> dict[str, Any]:
    """Flat figures of a record.

    `ceilings`: before, and after where it is known. `moved`: bytes of all timed steps by the operating system. `own`:
    what the engine counted in every timed step (`slide_stats()["ssd"]`), empty for stock.
    """
    per_step = {name: count / steps for name, count in moved.items()}
    if own:
        for way in ("read", "written"):
            per_step[f"ssd_{way}_bytes"] = sum(step[f"{way}_bytes"] for step in own) / steps
    counter = "ssd" if own else "os"
    rate = sum(found["gb_s"] for found in ceilings) / len(ceilings)
    bound = (per_step[f"{counter}_read_bytes"] + per_step[f"{counter}_written_bytes"]) / (rate * 1e9)
    return {
        **{f"{name}_per_step": count for name, count in per_step.items()},
        **{f"{name}_per_parameter": count / parameters for name, count in per_step.items()},
        "ssd_ceiling": dict(zip(("before", "after"), ceilings, strict=False)),
        "ssd_gb_s": rate,
        "ssd_direct": all(found["direct"] for found in ceilings),
        "ssd_bound_s": bound,
        "step_over_ssd_bound": step_s / bound if bound else None,
    }
