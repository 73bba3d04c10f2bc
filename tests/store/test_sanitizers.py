"""The C++ under ThreadSanitizer, AddressSanitizer and UBSan: minutes of compiling, so not among the fast tests."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "csrc" / "tests" / "run_sanitizers.sh"
PATIENCE_S = 1500


@pytest.mark.slow
@pytest.mark.timeout(PATIENCE_S + 60)
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
def test_no_race_no_stray_access_no_undefined_behaviour(tmp_path: Path) -> None:
    done = subprocess.run(
        ["bash", str(SCRIPT), str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    assert done.stdout.count(": passed") >= 2
    assert done.stdout.count(" ok") >= 2
