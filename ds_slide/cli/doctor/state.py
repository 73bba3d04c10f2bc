"""The state of this machine: what DS-Slide finds here, and what to do about each missing thing."""

from __future__ import annotations

import os
import platform
import resource
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from ds_slide.config import format_bytes
from ds_slide.report.tested import TESTED, Tested


@dataclass(frozen=True)
class Finding:
    """`state`: what is there. `advice`: what to do about it; "" for nothing. `fatal`: DS-Slide cannot run."""

    name: str
    state: str
    advice: str = ""
    fatal: bool = False

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def findings() -> list[Finding]:
    """Return all findings, the packages last."""
    looks: tuple[Callable[[], Finding], ...] = (
        _system,
        _instructions,
        _native_module,
        _gpu,
        _host_memory,
        _page_locks,
        _huge_pages,
        _nodes,
        _io,
    )
    return [*(look() for look in looks), *_packages()]


def _system() -> Finding:
    state = f"{platform.system()} {platform.release()}, Python {platform.python_version()}"
    if platform.system() != "Linux":
        return Finding("system", state, "run it on Linux", fatal=True)
    if "microsoft" in platform.release().lower():
        advice = (
            "under WSL the driver page-locks no more than half of the memory, and disks below /mnt are slow: keep "
            "states on the disk of WSL itself, and set memory= in .wslconfig"
        )
        return Finding("system", f"{state}, Windows Subsystem for Linux", advice)
    return Finding("system", state)


def _instructions() -> Finding:
    import cpuinfo

    found = cpuinfo.get_cpu_info()
    flags = set(found.get("flags", ()))
    known = [name for name in ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "sve", "asimd") if name in flags]
    name = found.get("brand_raw") or platform.processor()
    state = f"{name}, {len(os.sched_getaffinity(0))} cores, {' '.join(known) or 'no vector instructions known'}"
    if platform.machine() == "x86_64" and "avx512f" not in flags:
        advice = "updates run in AVX2" if "avx2" in flags else "updates run in portable code"
        return Finding("processor", state, f"{advice}, with the same bits; a processor with AVX-512 is faster")
    return Finding("processor", state)


def _native_module() -> Finding:
    try:
        from ds_slide import _native
    except ImportError as error:
        return Finding("C++ extension", f"cannot be loaded ({error})", "install the package with pip", fatal=True)
    return Finding("C++ extension", f"updates in {_native.isa()}, checksums in {_native.sum_isa()}")


def _gpu() -> Finding:
    try:
        import torch
    except ImportError as error:
        return Finding("accelerator", f"torch cannot be loaded ({error})", "install torch", fatal=True)
    if os.environ.get("DS_ACCELERATOR") == "cpu":
        return Finding("accelerator", "the processor, as DS_ACCELERATOR says")
    if not torch.cuda.is_available():
        advice = "for training install a driver and a torch for CUDA; DS_ACCELERATOR=cpu runs on the processor"
        return Finding("accelerator", "no GPU that torch can use", advice)
    found = torch.cuda.get_device_properties(0)
    state = f"{torch.cuda.device_count()} x {found.name}, {format_bytes(found.total_memory)}"
    if getattr(found, "is_integrated", 0):
        advice = (
            "GPU and processor share one memory, so states that leave the GPU free nothing: set ds_slide.gpu_states as "
            "large as fits"
        )
        return Finding("accelerator", f"{state}, unified memory", advice)
    return Finding("accelerator", state)


def _host_memory() -> Finding:
    from ds_slide.plan.probe.cgroups import memory_limits
    from ds_slide.plan.probe.host_room import host_room

    room = host_room(1)
    limits = [f"{each.file} {format_bytes(each.limit)}" for each in memory_limits()]
    state = f"{format_bytes(room.nbytes)} free ({room.source})"
    return Finding("host memory", state + (f"; limits: {', '.join(limits)}" if limits else "; no control group limits"))


def _page_locks() -> Finding:
    from ds_slide.store.host_memory import page_lock_limit

    limit = page_lock_limit()
    if limit is None:
        return Finding("page-locked memory", "no limit")
    soft, hard = (
        "unlimited" if each == resource.RLIM_INFINITY else format_bytes(each)
        for each in resource.getrlimit(resource.RLIMIT_MEMLOCK)
    )
    advice = "`ulimit -l unlimited`, or --ulimit memlock=-1 for a container, lets io_uring keep its buffers registered"
    return Finding("page-locked memory", f"RLIMIT_MEMLOCK {soft}, at most {hard}", advice)


def _huge_pages() -> Finding:
    text = _text("/sys/kernel/mm/transparent_hugepage/enabled")
    chosen = text.partition("[")[2].partition("]")[0]
    if not chosen:
        return Finding("huge pages", "not known here")
    if chosen == "never":
        advice = "buffers of the disk ask for them: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
        return Finding("huge pages", "never", advice)
    return Finding("huge pages", f"transparent: {chosen}")


def _nodes() -> Finding:
    nodes = sorted(Path("/sys/devices/system/node").glob("node[0-9]*"))
    if len(nodes) < 2:
        return Finding("NUMA", "one node")
    advice = "start each rank on the node of its GPU (numactl --cpunodebind=N --membind=N): memory of another is slower"
    return Finding("NUMA", f"{len(nodes)} nodes", advice)


def _io() -> Finding:
    try:
        from ds_slide import _native
    except ImportError:
        return Finding("disk requests", "not known without the C++ extension")
    works, why = [], {}
    for backend in ("io_uring", "libaio", "threads"):
        try:
            _native.IoEngine(backend, 1, 4096, burst_bytes=0).close()
            works.append(backend)
        except RuntimeError as error:
            why[backend] = " ".join(str(error).split())
    state = f"{', '.join(works)} work" + "".join(f"; {name} does not ({reason})" for name, reason in why.items())
    if "io_uring" in works:
        return Finding("disk requests", state)
    advice = "allow io_uring (kernel 5.6 or newer, kernel.io_uring_disabled=0, a container's seccomp profile)"
    return Finding("disk requests", state, advice)


def _packages() -> Iterator[Finding]:
    for name, tested in TESTED.items():
        yield package(name, tested, installed_version(name))


def package(name: str, tested: Tested, installed: str | None) -> Finding:
    """Return the finding about a package. `installed`: its version here; None where it is missing."""
    if installed is None:
        advice = f'pip install "{name}{tested.accepted}"' if tested.needed or tested.accepted else ""
        return Finding(name, "not installed", advice, fatal=tested.needed)
    state, found = f"{installed} (tested: {tested.version})", Version(installed)
    if found not in SpecifierSet(tested.accepted, prereleases=True):
        return Finding(name, state, f'pip install "{name}{tested.accepted}"', fatal=tested.needed)
    if found.release[:2] > Version(tested.version).release[:2]:
        return Finding(name, state, f"newer than tested; where it fails, pip install {name}=={tested.version}")
    return Finding(name, state)


def installed_version(name: str) -> str | None:
    """Return the version of a package; None where it is missing."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _text(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def versions(found: Mapping[str, Tested] = TESTED) -> dict[str, dict[str, str | None]]:
    """Return the installed, tested and accepted versions by package."""
    return {
        name: {"installed": installed_version(name), "tested": tested.version, "accepted": tested.accepted}
        for name, tested in found.items()
    }
