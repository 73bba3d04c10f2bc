"""IoEngine when the kernel refuses, interrupts, moves less than asked, or fails; each scenario in its own process."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ds_slide._native import IoEngine

from .io_tools import BACKENDS

HERE = Path(__file__).resolve().parent
EVERY_BACKEND = (
    "short",
    "short_inside_a_block",
    "short_buffered",
    "interrupted",
    "no_progress",
    "failing",
    "all_failing",
    "file_size_limit",
)
CASES = [
    *((scenario, backend) for scenario in EVERY_BACKEND for backend in BACKENDS),
    *((scenario, "threads") for scenario in ("no_direct", "no_fallocate", "failing_sync")),
    ("refused_backend", "io_uring"),
    ("refused_backend", "libaio"),
    ("little_lockable_memory", "io_uring"),
]


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler for the shim")
    path = tmp_path_factory.mktemp("shim") / "fault_shim.so"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-O1", str(HERE / "fault_shim.c"), "-o", str(path), "-ldl"], check=True
    )
    return path


# Each scenario once, by the backends in turn.
QUICK_CASES = [
    *((scenario, BACKENDS[number % len(BACKENDS)]) for number, scenario in enumerate(EVERY_BACKEND)),
    *CASES[len(EVERY_BACKEND) * len(BACKENDS) :],
]


@pytest.mark.parametrize(
    ("scenario", "backend"),
    [pytest.param(*case, marks=() if case in QUICK_CASES else pytest.mark.slow) for case in CASES],
)
def test_fault(scenario: str, backend: str, shim: Path, tmp_path: Path) -> None:
    try:
        IoEngine(backend, 1, 4096).close()  # type: ignore[arg-type]
    except RuntimeError as error:
        pytest.skip(str(error))
    path = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(
        [sys.executable, str(HERE / "io_fault_worker.py"), scenario, backend, str(tmp_path)],
        env=os.environ | {"LD_PRELOAD": str(shim), "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )
    if "SKIP: " in done.stderr:
        pytest.skip(done.stderr.split("SKIP: ")[1].strip())
    assert done.returncode == 0, done.stderr[-3000:]
