"""Install the wheel as a user does, and use it: in an empty environment for each Python of this machine.

    make test-wheels       or: python release/check_install.py [--wheel FILE] [--quick]

No compiler is on the PATH of these environments. The wheel is installed alone (`--no-deps`).
torch, DeepSpeed and pytest come from the environment that runs this script, whose folder is put on the path of the new
one. So the Python of that environment gets everything: doctor, a training through the launcher, tests. The others get
what needs no torch: the version report, and tests of the library by a pytest that pip downloads.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OLDEST, NEWEST = 10, 15
TOOLS = (
    "cat",
    "env",
    "getconf",
    "hostname",
    "ldconfig",
    "ls",
    "lscpu",
    "mount",
    "umount",
    "nm",
    "rm",
    "sh",
    "bash",
    "sed",
    "uname",
)
"""Programs that torch, DeepSpeed and their launcher call. There is no compiler among them."""
COMPILERS = ("cc", "c++", "gcc", "g++", "clang", "clang++", "nvcc")
WITHOUT_TORCH = ("tests/test_native.py",)
WITH_TORCH = (
    *WITHOUT_TORCH,
    *(
        "tests/optim/test_bits.py",
        "tests/optim/test_slab.py",
        "tests/store/test_pool.py",
        "tests/store/test_io_engine.py",
    ),
    *("tests/cli/test_command.py", "tests/end_to_end/states/test_update_rules.py"),
)
QUICK = ("tests/test_native.py", "tests/store/test_pool.py")
PATIENCE_S = 1800


def main() -> None:
    parser = argparse.ArgumentParser(description="installs and uses the wheel in empty environments")
    parser.add_argument("--wheel", type=Path, help="the wheel; by default that of this machine in dist")
    parser.add_argument("--quick", action="store_true", help="fewer tests, and this Python alone")
    options = parser.parse_args()
    wheel = options.wheel or newest_wheel()
    own = f"{sys.version_info.major}.{sys.version_info.minor}"
    failed = 0
    with tempfile.TemporaryDirectory(prefix="check-install-") as folder:
        sources = sources_without_package(Path(folder) / "checkout")
        for version, python in pythons().items():
            if version != own and options.quick:
                continue
            has_torch = version == own
            tests = QUICK if options.quick else WITH_TORCH if has_torch else WITHOUT_TORCH
            failed += not Environment(Path(folder) / version, python, has_torch).check(wheel, sources, tests)
    sys.exit(1 if failed else 0)


def newest_wheel() -> Path:
    found = sorted((ROOT / "dist").glob(f"*_{platform.machine()}.whl"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise SystemExit(f"there is no wheel for {platform.machine()} in {ROOT / 'dist'}; run make wheels first")
    return found[-1]


def pythons() -> dict[str, str]:
    """Return the Pythons of this machine by version: this one, those on the PATH, and those of pyenv and uv."""
    found = {f"{sys.version_info.major}.{sys.version_info.minor}": sys.executable}
    for minor in range(OLDEST, NEWEST):
        for candidate in candidates(f"3.{minor}"):
            script = "import sys, venv, ensurepip; print(*sys.version_info[:2], sep='.')"
            done = subprocess.run([candidate, "-c", script], capture_output=True, text=True, check=False)
            if done.returncode == 0 and done.stdout.strip() == f"3.{minor}":
                found.setdefault(f"3.{minor}", candidate)
    return dict(sorted(found.items(), key=lambda item: int(item[0].split(".")[1])))


def candidates(version: str) -> Iterator[str]:
    if on_path := shutil.which(f"python{version}"):
        yield on_path
    for root in (Path.home() / ".pyenv" / "versions", Path.home() / ".local" / "share" / "uv" / "python"):
        yield from (str(path) for path in sorted(root.glob(f"*{version}*/bin/python{version}")))


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

    def __init__(self, folder: Path, python: str, has_torch: bool) -> None:
        self.has_torch = has_torch
        self.python = folder / "bin" / "python"
        subprocess.run([python, "-m", "venv", str(folder)], check=True)
        tools = folder / "tools"
        tools.mkdir()
        for name in TOOLS:
            if there := shutil.which(name):
                (tools / name).symlink_to(os.path.realpath(there))
        kept = {name: os.environ[name] for name in ("HOME", "LANG", "TMPDIR") if name in os.environ}
        self.environment = {
            **kept,
            "PATH": f"{folder / 'bin'}:{tools}",
            "DS_ACCELERATOR": "cpu",
            "OMP_NUM_THREADS": "1",
        }
        self.extensions = folder / "torch_extensions"
        self.environment["TORCH_EXTENSIONS_DIR"] = str(self.extensions)
        if present := [name for name in COMPILERS if shutil.which(name, path=self.environment["PATH"])]:
            raise SystemExit(f"the environment of {python} has compilers: {present}")
        if not has_torch:
            subprocess.run([str(self.python), "-m", "pip", "install", "--quiet", "pytest"], check=True)
            self.environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
            return
        # A plain path: the .pth files in that folder, an editable installation's among them, do not count.
        (site,) = folder.glob("lib/python3*/site-packages")
        (site / "beside.pth").write_text(sysconfig.get_path("purelib") + "\n")
        # On the CPU accelerator, and there alone, DeepSpeed loads an op of its own for collectives, through ninja.
        built = sorted(Path(os.environ.get("TORCH_EXTENSIONS_DIR", "")).glob("**/deepspeed_shm_comm"))
        if built:
            shutil.copytree(built[0], self.extensions / built[0].name)
            ninja = Path(sys.executable).with_name("ninja")
            (tools / "ninja").symlink_to(shutil.which("ninja") or ninja)

    def check(self, wheel: Path, sources: Path, tests: tuple[str, ...]) -> bool:
        """Print what was run and how it ended. Return whether all of it did what it should."""
        before, began = self._compiled(), time.monotonic()
        install = [
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            "--no-index",
            "--disable-pip-version-check",
            str(wheel),
        ]
        good = self._run("pip install", sources, *install)
        print(f"  installed in {time.monotonic() - began:.1f} s", flush=True)
        where = "import ds_slide, os, sys; sys.exit(not os.path.realpath(ds_slide.__file__).startswith(sys.prefix))"
        good &= self._run("the wheel is what is imported", sources, "-c", where)
        good &= self._run("ds-slide --version", sources, "-m", "ds_slide", shown=True)
        if self.has_torch:
            good &= self._run("ds-slide check", sources, "-m", "ds_slide", "check", "configs/slide_cpu.json")
            good &= self._run("ds-slide doctor", sources, "-m", "ds_slide.cli", "doctor")
            demo = "configs/slide_cpu.json --model tiny --batch 8 --seq 128 --steps 10".split()
            launcher = ["-m", "deepspeed.launcher.runner", "--num_gpus", "1", "examples/finetune.py"]
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
