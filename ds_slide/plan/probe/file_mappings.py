"""Which addresses of this process are pages of files, like weights that `from_pretrained` loads, until written to.

The kernel counts such pages as available memory already, so that unmapping them frees nothing more.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

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
