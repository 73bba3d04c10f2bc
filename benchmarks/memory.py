"""Host and GPU memory of this process, as the kernel, the driver and torch's allocators count it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

_STATUS_FIELDS = {
    "VmRSS": "rss_bytes",
    "VmHWM": "rss_peak_bytes",
    "RssAnon": "rss_anonymous_bytes",
    "RssFile": "rss_file_bytes",
    "RssShmem": "rss_shared_bytes",
    "VmPin": "pinned_by_kernel_bytes",
}
_PROBE_BYTES = 64 << 20


def _kilobyte_fields(path: str, names: dict[str, str]) -> dict[str, int]:
    values = {}
    for line in Path(path).read_text().splitlines():
        name, _, rest = line.partition(":")
        if name in names and rest.split()[-1] == "kB":
            values[names[name]] = int(rest.split()[0]) * 1024
    return values


def host_memory() -> dict[str, int]:
    """Bytes of this process by kind, and what the whole machine uses. Page cache is in neither."""
    values = _kilobyte_fields("/proc/self/status", _STATUS_FIELDS)
    machine = _kilobyte_fields("/proc/meminfo", {"MemTotal": "total", "MemAvailable": "available"})
    # A cross-check that does not depend on how the driver accounts for page-locked memory.
    values["machine_used_bytes"] = machine["total"] - machine["available"]
    return values


def restart_host_peak() -> bool:
    """Let VmHWM count from now on; False where the kernel does not allow that (the peak then includes the set-up)."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def pinned_by_torch() -> dict[str, int]:
    """Bytes of torch's own pinned allocator (rounded up to powers of two), now and at most; empty without CUDA."""
    if not torch.cuda.is_available() or not hasattr(torch.cuda, "host_memory_stats"):
        return {}
    stats = torch.cuda.host_memory_stats()
    return {
        "pinned_torch_bytes": int(stats.get("allocated_bytes.current", 0)),
        "pinned_torch_peak_bytes": int(stats.get("allocated_bytes.peak", 0)),
    }


def pinned_counts_in_rss() -> bool | None:
    """Whether cudaHostAlloc'ed memory shows in VmRSS here (drivers and kernels differ); None without CUDA.

    Otherwise the pinned bytes must be added to the resident ones.
    """
    if not torch.cuda.is_available():
        return None
    before = host_memory()["rss_bytes"]
    probe = torch.empty(_PROBE_BYTES, dtype=torch.uint8, pin_memory=True).fill_(1)
    grown = host_memory()["rss_bytes"] - before
    del probe
    return grown > _PROBE_BYTES // 2


def gpu_memory() -> dict[str, int]:
    """Peak and current bytes of torch's GPU allocator and of the whole device; empty without CUDA."""
    if not torch.cuda.is_available():
        return {}
    free, total = torch.cuda.mem_get_info()
    return {
        "gpu_peak_allocated_bytes": torch.cuda.max_memory_allocated(),
        "gpu_peak_reserved_bytes": torch.cuda.max_memory_reserved(),
        "gpu_allocated_bytes": torch.cuda.memory_allocated(),
        "gpu_device_used_bytes": total - free,
    }


def restart_gpu_peak() -> None:
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def snapshot() -> dict[str, Any]:
    """Everything above in one dict of bytes."""
    return {**host_memory(), **pinned_by_torch(), **gpu_memory()}
