"""The ceilings of this machine that `ds-slide doctor` has measured: one file in the user's cache folder."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
from pathlib import Path
from typing import Any

import psutil
import torch

from ds_slide.errors import SlideError
from ds_slide.plan.ceilings import Ceilings, checked
from ds_slide.report.tested import installed_version


def folder() -> Path:
    """Return the folder of the kept measurements."""
    root = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(root) / "ds_slide" / "ceilings"


def cpu_name() -> str:
    """Return the processor's name as the kernel tells it. Packages that find it out take a second."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def gpu_computes() -> bool:
    """Whether a GPU computes, by the rule of DeepSpeed's accelerator."""
    return torch.cuda.is_available() and os.environ.get("DS_ACCELERATOR") != "cpu"


def machine_key() -> dict[str, Any]:
    """Return what a measurement depends on, without the disks."""
    return {
        # A change of what is measured, or of how, takes another number: older figures are then not used.
        "measured_as": 2,
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


def kept_ceilings() -> Ceilings | None:
    """Return the kept ceilings; None where the file is missing, is from another machine, or is damaged. Then they are
    measured again."""
    key = machine_key()
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, SlideError):
        file = _file(key)
        found = json.loads(file.read_text(encoding="utf-8"))
        if found["key"] == key:
            return checked(found["ceilings"], str(file))
    return None


def keep(ceilings: Ceilings) -> None:
    """Write the file. Where the folder cannot be written, the next command only measures again."""
    key = machine_key()
    with contextlib.suppress(OSError):
        file = _file(key)
        file.parent.mkdir(parents=True, exist_ok=True)
        new = file.with_suffix(f".{os.getpid()}")
        new.write_text(json.dumps({"key": key, "ceilings": ceilings.model_dump()}, indent=2) + "\n", encoding="utf-8")
        new.replace(file)


def _file(key: dict[str, Any]) -> Path:
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    return folder() / f"{digest}.json"
