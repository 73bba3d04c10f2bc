"""The ceilings of this machine, measured once and kept in the user's cache folder."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import cpuinfo
import psutil
import torch

from ds_slide.cli.doctor.state import installed_version
from ds_slide.errors import SlideError
from ds_slide.plan.ceilings import measure
from ds_slide.plan.ceilings.figures import Ceilings, DiskCeilings, checked
from ds_slide.plan.ceilings.process import measure_process
from ds_slide.runtime.updates.threads import update_cores

_MEASURED_AS = 2
"""A change of what is measured, or of how, takes another number: older figures are then not used."""


def folder() -> Path:
    """Return the folder of the kept measurements."""
    root = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(root) / "ds_slide" / "ceilings"


def cpu_name() -> str:
    return str(cpuinfo.get_cpu_info().get("brand_raw") or platform.processor() or platform.machine())


def gpu_computes() -> bool:
    """Whether a GPU computes, by the rule of DeepSpeed's accelerator."""
    return torch.cuda.is_available() and os.environ.get("DS_ACCELERATOR") != "cpu"


def machine_key() -> dict[str, Any]:
    """Return what a measurement depends on, without the disks."""
    return {
        "measured_as": _MEASURED_AS,
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory": psutil.virtual_memory().total,
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        if gpu_computes()
        else [],
        "torch": torch.__version__,
        # These libraries take most of a process's memory before an engine is built.
        "transformers": installed_version("transformers"),
        "deepspeed": installed_version("deepspeed"),
        "kernel": platform.release(),
    }


def of_this_machine(
    paths: Sequence[Path] = (), *, refresh: bool = False, failed: Callable[[str], None] | None = None
) -> Ceilings:
    """Return the ceilings; kept measurements are used where the machine is the same. They have the disks below `paths`,
    or without paths all disks that were measured before. `failed`: gets the reason why a process cannot be measured.
    With it a failed measurement is tried again. Raises SlideError where a path cannot be measured."""
    key = machine_key()
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    file = folder() / f"{digest}.json"
    kept = None if refresh else _kept(file, key)
    disks = {disk.path: disk for disk in (kept.disks if kept else ())}
    wanted = [str(path.resolve()) for path in paths]
    missing = [path for path in wanted if path not in disks]
    again = kept is not None and failed is not None and kept.process_bytes is None
    if kept is not None and not missing and not again:
        return kept.model_copy(update={"disks": tuple(disks[path] for path in wanted)}) if wanted else kept
    disks.update({path: _disk(Path(path)) for path in missing})
    if kept is None:
        threads, cores = update_cores("auto", "auto", 0, 1)
        on_gpu = gpu_computes()
        kept = Ceilings(
            source=f"measured on {platform.node()}, {date.today().isoformat()}",
            cpu=measure.cpu_ceilings(str(key["cpu"]), threads, cores, with_products=not on_gpu),
            gpu=measure.gpu_ceilings(torch.device("cuda", 0)) if on_gpu else None,
            process_bytes=_process(failed),
        )
    elif again:
        kept = kept.model_copy(update={"process_bytes": _process(failed)})
    kept = kept.model_copy(update={"disks": tuple(disks.values())})
    _keep(file, key, kept)
    return kept.model_copy(update={"disks": tuple(disks[path] for path in wanted)}) if wanted else kept


def _process(failed: Callable[[str], None] | None) -> int | None:
    """Return the bytes of a process; None where measuring fails. `failed` gets the reason."""
    try:
        return measure_process(on_gpu=gpu_computes())
    except SlideError as error:
        if failed is not None:
            failed(str(error))
        return None


def _disk(path: Path) -> DiskCeilings:
    try:
        return measure.disk_ceilings(path)
    except (OSError, RuntimeError) as error:
        if isinstance(error, SlideError):
            raise
        why = getattr(error, "strerror", None) or error
        raise SlideError(f"--path {path} cannot be measured ({why}); name a directory on a local disk") from error


def _kept(file: Path, key: dict[str, Any]) -> Ceilings | None:
    """Return the kept ceilings; None where the file is missing, is from another machine, or is damaged. Then they are
    measured again."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, SlideError):
        found = json.loads(file.read_text(encoding="utf-8"))
        if found["key"] == key:
            return checked(found["ceilings"], str(file))
    return None


def _keep(file: Path, key: dict[str, Any], ceilings: Ceilings) -> None:
    """Write the file. Where the folder cannot be written, the next command only measures again."""
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        new = file.with_suffix(f".{os.getpid()}")
        new.write_text(json.dumps({"key": key, "ceilings": ceilings.model_dump()}, indent=2) + "\n", encoding="utf-8")
        new.replace(file)
