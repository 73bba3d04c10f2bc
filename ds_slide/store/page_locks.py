"""The limit of the shell on page-locked memory (RLIMIT_MEMLOCK, `ulimit -l`), where it is one.

mlock keeps to it. NVIDIA's driver does not: for a user without privileges and with a limit of 64 KiB it registered
1 GiB (driver 580.159, Linux 6.18), while mlock of 64 MiB failed. Most systems set 8 MiB, so that to count it as a
budget would refuse nearly every run that works. Whether this driver keeps to it is therefore asked of the driver,
before a run takes memory.
"""

from __future__ import annotations

import resource
from pathlib import Path

from ds_slide.errors import SlideError
from ds_slide.report.log import size

_STATUS = Path("/proc/self/status")
_CAP_IPC_LOCK = 1 << 14
# The question: so much more than the limit.
_BEYOND = 4 << 20
# Of a higher limit it would take longer than it is worth: 0.35 s a GiB. What the driver refuses then, it refuses while
# the states are placed.
_HIGHEST_ASKED = 1 << 30


def page_lock_limit() -> int | None:
    """Bytes, None where this process has no such limit."""
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return None if soft == resource.RLIM_INFINITY or _is_exempt() else soft


def require_page_locks(nbytes: int) -> None:
    """Raise SlideError where a run with up to `nbytes` of memory that the GPU copies from would exceed a limit that the
    driver keeps to."""
    from ds_slide import _native

    limit = page_lock_limit()
    if limit is None or nbytes <= limit or limit > _HIGHEST_ASKED:
        return
    try:
        _native.Slab(limit + _BEYOND, True, False).close()
    except RuntimeError as error:
        raise SlideError(
            f"host tier: the GPU copies from up to {size(nbytes)} of page-locked memory, but RLIMIT_MEMLOCK "
            f"(ulimit -l) is {size(limit)} and the driver keeps to it ({' '.join(str(error).split())}); "
            "raise that limit, as with `ulimit -l unlimited` or the container's --ulimit memlock=-1"
        ) from error


def _is_exempt() -> bool:
    """Whether this process has the capability CAP_IPC_LOCK, as root has."""
    for line in _STATUS.read_text().splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) & _CAP_IPC_LOCK)
    return False
