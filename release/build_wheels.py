"""Build the wheels of a release: one for x86_64 and one for aarch64, for every Python, on any Linux machine.

    make wheels            or: python release/build_wheels.py [--out dist] [--only x86_64]

The compiler is the clang of the package `ziglang`. It has the headers of old versions of glibc and those of the other
architecture, so no container is needed. Each wheel is checked by auditwheel: its library may need no symbol newer than
glibc 2.28. The dates in a wheel are those of the commit, so a second build of it gives the same bytes.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ARCHITECTURES = ("x86_64", "aarch64")
GLIBC = (2, 28)
POLICY = f"manylinux_{GLIBC[0]}_{GLIBC[1]}"


def main() -> None:
    parser = argparse.ArgumentParser(description="builds and checks the wheels of a release")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="the folder of the wheels (dist by default)")
    parser.add_argument("--only", choices=ARCHITECTURES, help="build one of the two wheels")
    options = parser.parse_args()

    options.out.mkdir(parents=True, exist_ok=True)
    made = [build(each, options.out) for each in ARCHITECTURES if options.only in (None, each)]
    for wheel in made:
        print(f"{wheel.name}: {wheel.stat().st_size:,} bytes; {check(wheel)}")
    sums = [f"{hashlib.sha256(each.read_bytes()).hexdigest()}  {each.name}\n" for each in sorted(made)]
    (options.out / "SHA256SUMS").write_text("".join(sums))
    print(f"{options.out / 'SHA256SUMS'} lists {len(made)} wheels")


def build(architecture: str, out: Path) -> Path:
    """Return the wheel of one architecture. Its sources are those of the working tree."""
    folder = ROOT / "build" / "wheels" / architecture
    shutil.rmtree(folder / "lib", ignore_errors=True)  # modules that were renamed since would be packed
    target = f"{architecture}-linux-gnu.{GLIBC[0]}.{GLIBC[1]}"
    environment = {
        **os.environ,
        "CXX": f"{sys.executable} -m ziglang c++ -target {target}",
        "SOURCE_DATE_EPOCH": git("log", "-1", "--format=%ct"),
    }
    command = [sys.executable, "setup.py", "-q", "build", "--build-base", str(folder)]
    command += ["--build-lib", str(folder / "lib")]
    command += ["bdist_wheel", "--plat-name", f"{POLICY}_{architecture}", "--dist-dir", str(folder)]
    for old in folder.glob("*.whl"):
        old.unlink()
    print(f"building for {target}", flush=True)
    subprocess.run(command, cwd=ROOT, env=environment, check=True)
    (wheel,) = folder.glob("*.whl")
    return Path(shutil.copy2(wheel, out / wheel.name))


def git(*arguments: str) -> str:
    done = subprocess.run(("git", *arguments), cwd=ROOT, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def check(wheel: Path) -> str:
    """Return auditwheel's verdict. SystemExit where the wheel is not what its name says, or has files beside the
    package."""
    command = [sys.executable, "-m", "auditwheel", "show", str(wheel)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    said = " ".join(done.stdout.split())
    found = re.search(r'following platform tag: "(manylinux_(\d+)_(\d+)_\w+)"', said)
    if done.returncode or found is None:
        raise SystemExit(f"{wheel.name}: auditwheel does not accept it:\n{done.stdout}{done.stderr}")
    if (int(found[2]), int(found[3])) > GLIBC or not found[1].endswith(wheel.stem.split(f"{POLICY}_")[1]):
        raise SystemExit(f"{wheel.name}: auditwheel finds that it is {found[1]}:\n{done.stdout}")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    strange = [name for name in names if not name.startswith(("ds_slide/", "ds_slide-"))]
    libraries = [name for name in names if name.endswith(".so")]
    if strange or libraries != ["ds_slide/_native/libds_slide.so"]:
        raise SystemExit(f"{wheel.name}: it has the libraries {libraries}, and beside the package {strange}")
    return f"auditwheel: consistent with {found[1]}"


if __name__ == "__main__":
    if platform.system() != "Linux":
        raise SystemExit("the wheels are built on Linux only: the library uses its system calls")
    main()
