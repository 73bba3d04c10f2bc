"""What Triton compiles is told once, and a second process reads it from the folder of the first."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from ds_slide.report.compilations import Compilations

ROOT = Path(__file__).resolve().parents[2]


def compiled(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Output of triton_worker.py, a rank that comes to one kernel."""
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    search = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, str(ROOT / "tests" / "support" / "triton_worker.py")],
        env={**kept, "PYTHONPATH": search, "TRITON_CACHE_DIR": str(folder), **environment},
        capture_output=True,
        text=True,
        check=True,
    )


def test_ranks_share_what_one_has_compiled(tmp_path: Path) -> None:
    first, second = compiled(tmp_path), compiled(tmp_path, RANK="1")
    (line,) = (line for line in first.stderr.splitlines() if "[ds_slide]" in line)
    told = re.search(r"Triton has compiled 1 kernel in (\d+\.\d) s; other ranks and later runs find them in (.*)", line)
    assert told is not None, line
    assert Path(told[2]) == tmp_path and list(tmp_path.glob("**/combine_kernel.cubin"))
    assert "[ds_slide]" not in second.stderr
    # Whoever was told of compilations before still is.
    assert (first.stdout, second.stdout) == ("told False\n", "told True\n")


def test_a_triton_that_tells_nothing_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    Compilations(None).tell()
    assert not caplog.records
