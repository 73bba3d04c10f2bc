"""What a results page must say about the machine and the software it ran on."""

from __future__ import annotations

import platform
import shutil
import subprocess
from importlib import metadata
from pathlib import Path

PACKAGES = ("torch", "triton", "deepspeed", "transformers", "peft", "bitsandbytes", "liger-kernel", "ds_slide")


def _output(*command: str) -> str:
    if shutil.which(command[0]) is None:
        return ""
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60).stdout.strip()


def gpus() -> list[tuple[str, int, str]]:
    """Name, memory in MiB and driver version of every GPU; empty without nvidia-smi."""
    text = _output("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits")
    rows = [[word.strip() for word in line.split(",")] for line in text.splitlines()]
    return [(row[0], int(row[1]), row[2]) for row in rows if len(row) == 3 and row[1].isdigit()]


def cpu() -> str:
    fields = dict(line.split(":", 1) for line in _output("lscpu").splitlines() if ":" in line)
    name = fields.get("Model name", platform.processor()).strip()
    return f"{name}, {fields.get('CPU(s)', '?').strip()} cores"


def total_memory_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) * 1024
    return 0


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def versions() -> dict[str, str]:
    """Versions of the packages that decide how a model is computed."""
    return {package: _version(package) for package in PACKAGES}


def describe() -> dict[str, str]:
    """Lines for a results page, in reading order."""
    cards = gpus()
    return {
        "GPU": ", ".join(f"{name} ({mib} MiB)" for name, mib, _ in cards) or "none",
        "driver": cards[0][2] if cards else "none",
        "CPU": cpu(),
        "host memory": f"{total_memory_bytes() / 2**30:.0f} GiB",
        "kernel": platform.release(),
        "python": platform.python_version(),
        **versions(),
    }


def short_name() -> str:
    """Word for file names: the first GPU, or `cpu`."""
    cards = gpus()
    return cards[0][0].lower().replace(" ", "-") if cards else "cpu"
