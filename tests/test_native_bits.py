"""The libraries of the wheels compute the bits of this checkout's: another compiler, and another architecture.

Needs the wheels of `make wheels` of the present C++, the compiler that it installs, and for aarch64 Debian's packages
qemu-user-static and libc6-arm64-cross. No machine with that architecture has run it.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest

from ds_slide._native import library

ROOT = Path(__file__).resolve().parents[1]
COMPILER = ROOT / ".venv-wheels" / "bin" / "python"
SYSROOT = Path("/usr/aarch64-linux-gnu")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]


def needed(condition: object, what: str) -> None:
    if not condition:
        pytest.skip(f"needs {what}")


def program(folder: Path, architecture: str) -> Path:
    """csrc/tests/bits.cpp for an architecture."""
    needed(COMPILER.exists(), "the environment of make wheels")
    made = folder / f"bits-{architecture}"
    command = [
        str(COMPILER),
        "-m",
        "ziglang",
        "c++",
        "-target",
        f"{architecture}-linux-gnu.2.28",
        "-std=c++17",
        "-O3",
        "-s",
    ]
    subprocess.run([*command, str(ROOT / "csrc/tests/bits.cpp"), "-ldl", "-o", str(made)], check=True)
    return made


def library_of_wheel(folder: Path, architecture: str) -> Path:
    found = sorted((ROOT / "dist").glob(f"*_{architecture}.whl"), key=lambda path: path.stat().st_mtime)
    needed(found, f"a wheel for {architecture} in dist")
    with zipfile.ZipFile(found[-1]) as archive:
        return Path(archive.extract("ds_slide/_native/libds_slide.so", folder / architecture))


def results(*command: object) -> list[str]:
    done = subprocess.run([str(each) for each in command], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="compares instruction sets of x86_64")
def test_each_instruction_set_of_both_compilers(tmp_path):
    bits, wheel = program(tmp_path, "x86_64"), library_of_wheel(tmp_path, "x86_64")
    expected = results(bits, library.PATH, 1)  # the portable kernels
    assert len(expected) > 800 and sum("refused" not in line for line in expected) > 200
    for isa in (0, 2, 3):
        found = results(bits, library.PATH, isa)
        if "this processor lacks" not in found[0]:
            assert found == expected, isa
            assert results(bits, wheel, isa) == expected, isa
    assert results(bits, wheel, 1) == expected


def test_aarch64_under_an_emulator(tmp_path):
    emulator = shutil.which("qemu-aarch64-static")
    needed(emulator and SYSROOT.exists(), "qemu-user-static and libc6-arm64-cross")
    native = results(program(tmp_path, platform.machine()), library.PATH)
    bits, wheel = program(tmp_path, "aarch64"), library_of_wheel(tmp_path, "aarch64")
    assert results(emulator, "-L", SYSROOT, bits, wheel) == native
