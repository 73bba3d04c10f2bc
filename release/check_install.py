"""Install the wheel as a user does, and use it: in an empty environment for each Python of this machine.

    make test-wheels       or: python release/check_install.py [--wheel FILE] [--python FILE ...] [--quick]
    make test-install      or: python release/check_install.py --in-place --quick

No compiler is on the PATH of these environments. The wheel is installed alone (`--no-deps`). Torch, DeepSpeed and
pytest come from the environment of the Python that makes the new one, whose folder of packages is put on the path
there. A Python that has them gets everything: doctor, a training through the launcher, tests. The others get what needs
no torch: the version report, and tests of the library by a pytest that pip downloads.

`--in-place` takes no wheel of a release. It makes one with the library that `make install` has compiled.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIBRARY = "ds_slide/_native/libds_slide.so"
OLDEST, NEWEST = 10, 15
TOOLS = "cat env getconf hostname ldconfig ls lscpu mount umount nm rm sh bash sed uname".split()
"""Programs that torch, DeepSpeed and their launcher call. There is no compiler among them."""
COMPILERS = ("cc", "c++", "gcc", "g++", "clang", "clang++", "nvcc")
COLLECTIVES = "deepspeed_shm_comm"
"""DeepSpeed's op for collectives, which it loads through ninja on the CPU accelerator alone."""
WITHOUT_TORCH = ("tests/test_native.py",)
QUICK = (*WITHOUT_TORCH, "tests/store/test_pool.py")
WITH_TORCH = (
    *(*QUICK, "tests/optim/test_bits.py", "tests/optim/test_slab.py", "tests/store/test_io_engine.py"),
    *("tests/cli/test_command.py", "tests/cli/test_json_files.py", "tests/end_to_end/states/test_update_rules.py"),
)
PATIENCE_S = 1800


@dataclass(frozen=True)
class Python:
    """An interpreter of this machine. `packages`: its folder of packages. `prefix`: the folder of its environment."""

    executable: str
    version: str
    packages: str
    prefix: Path
    has_torch: bool


def main() -> None:
    parser = argparse.ArgumentParser(description="installs and uses the wheel in empty environments")
    parser.add_argument("--wheel", type=Path, help="the wheel; by default that of this machine in dist")
    parser.add_argument("--in-place", action="store_true", help="make a wheel with the library compiled in place")
    parser.add_argument("--python", action="append", help="a Python to install for; by default this and those on PATH")
    parser.add_argument("--quick", action="store_true", help="fewer tests, and by default this Python alone")
    options = parser.parse_args()
    candidates = options.python or [sys.executable, *(() if options.quick else on_path())]
    with tempfile.TemporaryDirectory(prefix="check-install-") as name:
        folder = Path(name)
        wheel = wheel_in_place(folder / "build") if options.in_place else options.wheel or newest_wheel()
        sources = sources_without_package(folder / "checkout")
        pythons = {each.version: each for each in reversed([asked(candidate) for candidate in candidates])}
        good = True
        for python in sorted(pythons.values(), key=lambda each: int(each.version.split(".")[1])):
            tests = WITHOUT_TORCH if not python.has_torch else QUICK if options.quick else WITH_TORCH
            good &= Environment(folder / python.version, python).check(wheel, sources, tests)
    sys.exit(0 if good else 1)


def on_path() -> Iterator[str]:
    for minor in range(OLDEST, NEWEST):
        if found := shutil.which(f"python3.{minor}"):
            yield found


def asked(executable: str) -> Python:
    """Return what an interpreter says of itself. SystemExit where it cannot make environments."""
    script = (
        "import importlib.util as u, sys, sysconfig, venv, ensurepip; print(*sys.version_info[:2], sep='.');"
        "print(sysconfig.get_path('purelib')); print(sys.prefix); print(all(map(u.find_spec, ('torch', 'deepspeed'))))"
    )
    done = subprocess.run([executable, "-c", script], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{executable} cannot make an environment:\n{done.stderr}")
    version, packages, prefix, has_torch = done.stdout.splitlines()
    return Python(executable, version, packages, Path(prefix), has_torch == "True")


def wheel_in_place(folder: Path) -> Path:
    """Return a wheel of this checkout whose library is the one that is compiled in place. Nothing is compiled."""
    built = folder / "lib" / LIBRARY
    built.parent.mkdir(parents=True)
    shutil.copy2(ROOT / LIBRARY, built)
    settings = folder / "build.cfg"
    settings.write_text(f"[build]\nbuild-base = {folder}\nbuild-lib = {folder / 'lib'}\n")
    command = [sys.executable, "setup.py", "-q", "build_py", "bdist_wheel", "--skip-build", "--dist-dir", str(folder)]
    environment = {**os.environ, "DIST_EXTRA_CONFIG": str(settings), "PYTHONWARNINGS": "ignore"}
    subprocess.run(command, cwd=ROOT, env=environment, check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def newest_wheel() -> Path:
    found = sorted((ROOT / "dist").glob(f"*_{platform.machine()}.whl"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise SystemExit(f"there is no wheel for {platform.machine()} in {ROOT / 'dist'}; run make wheels first")
    return found[-1]


def sources_without_package(folder: Path) -> Path:
    """Return a copy of the tracked files that has no package, so that what is imported is what was installed."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        source = ROOT / name
        if name.startswith(("ds_slide", "csrc/")) or name == "setup.py" or not source.is_file():
            continue
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, folder / name)
    return folder


class Environment:
    """An empty virtual environment without a compiler."""

    def __init__(self, folder: Path, python: Python) -> None:
        self.has_torch = python.has_torch
        self.python = folder / "bin" / "python"
        self.extensions = folder / "torch_extensions"
        subprocess.run([python.executable, "-m", "venv", str(folder)], check=True)
        tools = folder / "tools"
        tools.mkdir()
        for name in TOOLS:
            if there := shutil.which(name):
                (tools / name).symlink_to(os.path.realpath(there))
        self.environment = {
            **{name: os.environ[name] for name in ("HOME", "LANG", "TMPDIR") if name in os.environ},
            "PATH": f"{folder / 'bin'}:{tools}",
            "DS_ACCELERATOR": "cpu",
            "OMP_NUM_THREADS": "1",
            "XDG_CACHE_HOME": str(folder / "cache"),  # doctor's figures of a busy machine are for nobody else
            "TORCH_EXTENSIONS_DIR": str(self.extensions),
        }
        if present := [name for name in COMPILERS if shutil.which(name, path=self.environment["PATH"])]:
            raise SystemExit(f"the environment of {python.executable} has compilers: {present}")
        if not python.has_torch:
            subprocess.run([str(self.python), "-m", "pip", "install", "--quiet", "pytest"], check=True)
            self.environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
            return
        # A plain path: the .pth files in that folder, an editable installation's among them, do not count.
        (site,) = folder.glob("lib/python3*/site-packages")
        (site / "beside.pth").write_text(python.packages + "\n")
        collectives = python.prefix / "torch_extensions" / COLLECTIVES
        if not collectives.is_dir():
            raise SystemExit(f"{collectives} is not there; make install compiles it for this checkout's environment")
        shutil.copytree(collectives, self.extensions / COLLECTIVES)
        (tools / "ninja").symlink_to(python.prefix / "bin" / "ninja")

    def check(self, wheel: Path, sources: Path, tests: tuple[str, ...]) -> bool:
        """Print what was run and how it ended. Return whether all of it did what it should."""
        before, began = self._compiled(), time.monotonic()
        install = "-m pip install --quiet --no-deps --no-index --disable-pip-version-check".split()
        good = self._run("pip install", sources, *install, str(wheel))
        print(f"  installed in {time.monotonic() - began:.1f} s", flush=True)
        where = "import ds_slide, os, sys; sys.exit(not os.path.realpath(ds_slide.__file__).startswith(sys.prefix))"
        good &= self._run("the wheel is what is imported", sources, "-c", where)
        good &= self._run("ds-slide --version", sources, "-m", "ds_slide", shown=True)
        if self.has_torch:
            good &= self._run("ds-slide check", sources, "-m", "ds_slide", "check", "configs/slide_cpu.json")
            good &= self._run("ds-slide doctor", sources, "-m", "ds_slide.cli", "doctor")
            demo = "configs/slide_cpu.json --model tiny --batch 8 --seq 128 --steps 5".split()
            launcher = "-m deepspeed.launcher.runner --num_gpus 1 --master_port 0 examples/finetune.py".split()
            good &= self._run("a training", sources, *launcher, "--deepspeed_config", *demo)
        options = ["-q", "-p", "no:cacheprovider", "-m", "not slow and not gpu and not clients"]
        options += [] if self.has_torch else ["--noconftest"]
        good &= self._run(f"pytest {' '.join(tests)}", sources, "-m", "pytest", *options, *tests, shown=True)
        compiled = sorted(self._compiled() - before)
        print(f"  compiled at run time: {compiled or 'nothing'}", flush=True)
        return good and not compiled

    def _compiled(self) -> set[str]:
        return {path.name for path in self.extensions.glob("**/*.so")}

    def _run(self, what: str, folder: Path, *arguments: str, shown: bool = False) -> bool:
        began = time.monotonic()
        done = subprocess.run(
            [str(self.python), *arguments],
            cwd=folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        verdict = "ok" if done.returncode == 0 else f"FAILED with {done.returncode}"
        print(f"Python {self.python.parents[1].name}: {what}: {verdict}, {time.monotonic() - began:.1f} s", flush=True)
        lines = done.stdout.splitlines()
        for line in lines if done.returncode else lines[-12:] if shown else ():
            print(f"    {line}", flush=True)
        return done.returncode == 0


if __name__ == "__main__":
    main()
