"""Says what Triton compiles. The first step of a new machine, shape or version waits for that, and later ones do not.

Triton keeps each compiled kernel in files under one folder of the user (`TRITON_CACHE_DIR`, else `~/.triton/cache`).
The other ranks of a host and later runs read them there. Ranks that come to a kernel at the same time compile it at the
same time.
"""

from __future__ import annotations

import functools
import os
import threading
from typing import Any

from tqdm import tqdm

from ds_slide.report.log import log


class Compilations:
    """Counts the kernels that Triton compiles in this process, each as it is done. `knobs`: Triton's settings; None
    where it has none. What was told of compilations before still is."""

    def __init__(self, knobs: Any) -> None:
        self._knobs = knobs
        self._lock = threading.Lock()  # lanes launch kernels, too
        self._bar: Any = None
        self._kernels = self._microseconds = 0
        if knobs is not None:
            self._following, knobs.compilation.listener = knobs.compilation.listener, self._count

    def _count(self, *, times: Any, cache_hit: bool, **others: Any) -> None:
        """Triton calls it for each kernel that it has compiled, or has read from its folder."""
        if self._following is not None:
            self._following(times=times, cache_hit=cache_hit, **others)
        if cache_hit:
            return
        with self._lock:
            if self._bar is None:
                # Only where somebody sees it: tqdm leaves it out where the error stream is no terminal.
                hidden = True if os.environ.get("RANK", "0") != "0" else None
                self._bar = tqdm(desc="ds_slide: compiling Triton kernels", unit="", disable=hidden, leave=False)
            self._bar.update()
            self._kernels += 1
            self._microseconds += times.total

    def tell(self) -> None:
        """Log what was compiled since the last call, if anything was, and end the progress bar."""
        if self._bar is None:
            return
        with self._lock:
            self._bar.close()
            log.info(
                "Triton has compiled %d kernel%s in %.1f s; other ranks and later runs find them in %s",
                self._kernels,
                "" if self._kernels == 1 else "s",
                self._microseconds / 1e6,
                self._knobs.cache.dir,
            )
            self._bar, self._kernels, self._microseconds = None, 0, 0


@functools.cache
def watch() -> Compilations:
    """Return the count of this process, which runs from the first call on. It stays at zero where Triton is missing, or
    is too old to tell (before 3.4)."""
    try:
        import triton
    except ImportError:
        return Compilations(None)
    return Compilations(getattr(triton, "knobs", None))
