"""A build from source that cannot work ends in one sentence, which names the wheel."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
WHEEL = "ds_slide-*-py3-none-manylinux_2_28_*.whl"


def refused(folder: Path, **environment: str) -> str:
    """What `setup.py build_ext` prints where it fails. `environment`: beside the variables of a compiler."""
    kept = {name: value for name, value in os.environ.items() if name not in ("CXX", "CXXFLAGS", "LDFLAGS")}
    command = [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", str(folder), "--build-temp", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=kept | environment, capture_output=True, text=True)
    assert done.returncode == 1 and not list(folder.glob("**/*.so"))
    return done.stderr


@pytest.mark.parametrize("environment", [{"PATH": ""}, {"CXX": "no-such-compiler -m64"}], ids=["PATH", "CXX"])
def test_a_missing_compiler(environment: dict[str, str], tmp_path: Path) -> None:
    (line,) = refused(tmp_path, **environment).splitlines()
    name = environment.get("CXX", "c++").split()[0]
    assert line.startswith(f"ds-slide: the C++ compiler {name!r} was not found, and a build from source needs one;")
    assert f"install the wheel of a release instead ({WHEEL}, needs no compiler)" in line


@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("environment", [{"CXX": "false"}, {"CXXFLAGS": "-no-such-option"}], ids=["CXX", "CXXFLAGS"])
def test_a_compiler_that_fails(environment: dict[str, str], tmp_path: Path) -> None:
    said = refused(tmp_path, MAX_JOBS="1", **environment)
    last = said.splitlines()[-1]
    assert last.startswith("ds-slide: `") and "failed with exit code 1; the compiler's messages are above" in last
    assert last.endswith(f"the wheel of a release ({WHEEL}) needs no compiler.")
    assert "Traceback" not in said
