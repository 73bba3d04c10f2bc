"""`ds-slide doctor`: what DS-Slide finds on this machine, what the machine can do, and what to do about each missing
thing."""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from ds_slide.config import expanded_directory, format_bytes
from ds_slide.errors import SlideError
from ds_slide.plan.ceilings import Ceilings
from ds_slide.report.tested import TESTED, Tested, installed_version, versions

SCHEMA = 1
TRANSFORMERS = "transformers"
NO_DISKS = ("tmpfs", "ramfs", "overlay")


def run(arguments: argparse.Namespace, lines: list[str]) -> int:
    """Append the answer to `lines`. Return 0 where DS-Slide can run here, whatever is missing, and 1 where it
    cannot. Raises SlideError for a path that cannot be measured."""
    found = findings()
    can_run = not any(each.fatal for each in found)
    paths = [expanded_directory(path, "--path") for path in arguments.path] or _usual_paths()
    ceilings = None
    if can_run:
        from ds_slide.cli.doctor.ceilings import gpu_count, of_this_machine

        gpus = gpu_count()
        ranks = arguments.ranks or max(1, gpus)
        if 0 < gpus < ranks:
            raise SlideError(f"--ranks is {ranks}, but this machine has {gpus} GPUs; name at most {gpus}")
        ceilings, why = of_this_machine(paths, refresh=arguments.refresh, again=True)
        found += [*_disks(ceilings, paths), _process(ceilings, why)]
        if ranks > 1:
            ceilings, of_ranks = _with_ranks(ceilings, ranks, refresh=arguments.refresh)
            found += of_ranks
    if arguments.json:
        answer = {
            "schema": SCHEMA,
            "can_run": can_run,
            "findings": [asdict(each) for each in found],
            "versions": versions(),
            "ceilings": None if ceilings is None else ceilings.model_dump(),
        }
        lines.append(json.dumps(answer, indent=2))
    else:
        lines += _text(found, ceilings, can_run=can_run)
    return 0 if can_run else 1


def _usual_paths() -> list[Path]:
    """Return the folder for temporary files, where it is on a disk."""
    folder = Path(tempfile.gettempdir()).resolve()
    parts = {part.mountpoint: part.fstype for part in psutil.disk_partitions(all=True)}
    mount = next((str(parent) for parent in (folder, *folder.parents) if str(parent) in parts), "/")
    return [] if parts.get(mount) in NO_DISKS else [folder]


def _disks(ceilings: Ceilings, paths: Sequence[Path]) -> Iterator[Finding]:
    if not paths:
        yield Finding("disk", "none measured", "name a directory on the disk for states with --path")
    for disk in ceilings.disks:
        advice = "" if disk.direct else "its file system refuses O_DIRECT; name a directory on local ext4 or xfs"
        state = f"read {disk.read_gb_s:.2f}, write {disk.write_gb_s:.2f}, mixed {disk.mixed_gb_s:.2f} GB/s"
        yield Finding(f"disk {disk.path}", f"{state} by {disk.backend}", advice)


def _process(ceilings: Ceilings, why: str) -> Finding:
    """Return the finding about a process's memory. `why`: the reason why it is not measured."""
    if ceilings.process_bytes is None:
        advice = "mend what stops it; until then `ds-slide plan` takes what such a process took elsewhere"
        return Finding("process", f"not measured ({why})", advice)
    state = f"{ceilings.process_bytes / 1e9:.2f} GB of host memory before an engine is built"
    if installed_version(TRANSFORMERS) is None:
        return Finding("process", f"{state}, without transformers, which is not installed")
    return Finding("process", state)


def _with_ranks(ceilings: Ceilings, ranks: int, *, refresh: bool) -> tuple[Ceilings, list[Finding]]:
    """Return the ceilings with what each rank gets, and findings about each rank and what they share."""
    from ds_slide.cli.doctor.ceilings import with_ranks

    try:
        ceilings = with_ranks(ceilings, ranks, refresh=refresh)
    except SlideError as error:
        advice = "mend what stops it; until then `ds-slide plan` divides what one rank gets"
        return ceilings, [Finding(f"{ranks} ranks at once", f"not measured ({error})", advice)]
    measured = ceilings.measured(ranks)
    assert measured is not None
    groups = "; ".join(", ".join(map(str, group)) for group in measured.that_share())
    least = min(each.kept for each in measured.pairs)
    state = f"ranks {groups} slow each other" if groups else "no two ranks slow each other"
    return ceilings, [
        *(Finding(f"rank {rank} of {ranks}", place) for rank, place in enumerate(measured.places)),
        Finding("copies of ranks", f"{state}; beside one other rank the slowest keeps {least:.2f} of its rate"),
    ]


def _text(found: Sequence[Finding], ceilings: Ceilings | None, *, can_run: bool) -> Iterator[str]:
    width = max(len(each.name) for each in found)
    for each in found:
        yield f"{each.name.ljust(width)}  {each.state}"
    if ceilings is not None:
        for name, rate in _rates(ceilings):
            yield f"{name.ljust(width)}  {rate}"
        for name, rate in _rates_of_ranks(ceilings):
            yield f"{name.ljust(width)}  {rate}"
        yield f"{''.ljust(width)}  {ceilings.source}"
    advices = [each for each in found if each.advice]
    if advices:
        yield ""
        yield "What to do:"
        for each in advices:
            yield f"- {each.name}: {each.advice}"
    if not can_run:
        yield "DS-Slide cannot run here."


def _rates(ceilings: Ceilings) -> Iterator[tuple[str, str]]:
    gpu, cpu = ceilings.gpu, ceilings.cpu
    if gpu is not None:
        for shape, rate in gpu.product_tflop_s.items():
            yield f"product {shape}", f"{rate:.0f} TFLOP/s in bf16"
        for tokens, rate in gpu.attention_tflop_s.items():
            backward = gpu.attention_backward_tflop_s[tokens]
            yield f"attention {tokens} tokens", f"{rate:.0f} TFLOP/s in bf16, causal; backward {backward:.0f}"
        link = f"H2D {gpu.h2d_gb_s:.1f}, D2H {gpu.d2h_gb_s:.1f}, both at once {gpu.both_ways_gb_s:.1f} GB/s each way"
        yield "copies", f"{link}; on the GPU {gpu.copy_gb_s:,.0f} GB/s (read and written)"
    elif cpu.product_tflop_s is not None:
        yield "products", f"{cpu.product_tflop_s:.3f} TFLOP/s in bf16 on the processor, which computes here"
    threads = f"{cpu.update_threads} thread{'s' if cpu.update_threads > 1 else ''}"
    updates = f"{cpu.update_gb_s:.1f} GB/s on {threads}"
    yield "updates", f"{updates}, {cpu.update_gb_s / 26:.2f} G parameters a second (AdamW in fp32, 26 B each)"
    yield "host copy", f"{cpu.copy_gb_s:.1f} GB/s (read and written)"


_LANES = {"h2d_gb_s": "H2D", "d2h_gb_s": "D2H", "both_ways_gb_s": "both ways", "copy_gb_s": "host copy"}
_LANES |= {"product_tflop_s": "products", "update_gb_s": "updates"}


def _rates_of_ranks(ceilings: Ceilings) -> Iterator[tuple[str, str]]:
    """Yield the rates of each rank, lane by lane, while all ranks work and while one does."""
    for found in ceilings.of_ranks:
        for name in found.least.named():
            unit = "TFLOP/s" if name.endswith("tflop_s") else "GB/s"
            together, alone = (
                ", ".join(f"{each.named()[name]:.3g}" for each in rates) for rates in (found.together, found.alone)
            )
            lane = _LANES.get(name, f"disk {name}")
            yield f"{found.ranks} ranks at once", f"{lane} {together} {unit} a rank (alone {alone})"


# ----------------------------------------------------------------------------------------------------------------------
# Findings.


@dataclass(frozen=True)
class Finding:
    """`state`: what is there. `advice`: what to do about it; "" for nothing. `fatal`: DS-Slide cannot run."""

    name: str
    state: str
    advice: str = ""
    fatal: bool = False


def findings() -> list[Finding]:
    """Return all findings, the packages last."""
    return [
        _system(),
        _instructions(),
        _native_module(),
        _gpu(),
        _c_compiler(),
        _host_memory(),
        _page_locks(),
        _huge_pages(),
        _nodes(),
        _io(),
        *(package(name, tested, installed_version(name)) for name, tested in TESTED.items()),
    ]


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


def _c_compiler() -> Finding:
    """Return the finding about the compiler that Triton calls for a launcher in C, as it looks for one."""
    found = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if found is None:
        advice = "Triton needs one on a GPU, with Python's headers (Debian: apt-get install gcc python3-dev)"
        return Finding("C compiler", "none on the PATH", advice)
    return Finding("C compiler", found)


def _host_memory() -> Finding:
    from ds_slide.plan.cgroups import memory_limits
    from ds_slide.plan.host_room import host_room

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
    text = _contents("/sys/kernel/mm/transparent_hugepage/enabled")
    chosen = text.partition("[")[2].partition("]")[0]
    if not chosen:
        return Finding("huge pages", "not known here")
    if chosen == "never":
        advice = "buffers of the disk ask for them: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
        return Finding("huge pages", "never", advice)
    return Finding("huge pages", f"transparent: {chosen}")


def _nodes() -> Finding:
    from ds_slide.plan.cores import as_list, memory_nodes

    nodes = [f"{node} with cores {as_list(cores)}" for node, cores in memory_nodes().items()]
    return Finding("NUMA", f"nodes {'; '.join(nodes)}" if len(nodes) > 1 else "one node")


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


def _contents(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
