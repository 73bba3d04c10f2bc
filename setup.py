"""Builds ``ds_slide/_native/libds_slide.so`` from csrc/: C++17 only, so neither Python's headers, torch, CUDA nor a GPU
is needed to build, and the file serves every version of Python.

Everything static is in pyproject.toml. This file exists because kernels are compiled once per instruction set
(``*_sse42.cpp``, ``*_avx2.cpp``, ``*_avx512.cpp``) and setuptools has no per-source flags.

The environment: ``CXX`` names the compiler, with options that every call gets (as a target), ``CXXFLAGS`` and
``LDFLAGS`` add options, ``MAX_JOBS`` limits the compilers at a time. ``bdist_wheel --plat-name`` names the platform.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

# -ffp-contract=off: the update rule rounds every operation separately; a fused multiply-add would make the bits depend
# on the instruction set. -fno-math-errno lets sqrt be one instruction and -fno-trapping-math lets the portable loops be
# vectorised; neither changes a value. Never -ffast-math.
COMMON_FLAGS = ["-std=c++17", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fno-fast-math"]
COMMON_FLAGS += ["-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-pthread", "-Icsrc"]
# clang says of loops that are written in vectors already that it has not vectorised them; gcc's warning is a false one
# inside its own AVX-512 headers (its bug 105593).
CLANG_FLAGS, GCC_FLAGS = ["-Wno-pass-failed"], ["-Wno-maybe-uninitialized"]
ISA_FLAGS = {
    "_sse42.cpp": ["-msse4.2"],
    "_avx2.cpp": ["-mavx2", "-mf16c"],
    "_avx512.cpp": ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mf16c"],
}
WHEEL = "ds_slide-*-py3-none-manylinux_2_28_*.whl"


class Compiler:
    """The C++ compiler of the environment."""

    def __init__(self) -> None:
        self.command = shlex.split(os.environ.get("CXX", "c++"))
        if shutil.which(self.command[0]) is None:
            raise SystemExit(
                f"ds-slide: the C++ compiler {self.command[0]!r} was not found, and a build from source needs one; "
                f"install the wheel of a release instead ({WHEEL}, needs no compiler), or g++ 9 or newer (Debian: "
                "apt-get install g++), or name a compiler in the environment variable CXX."
            )
        self._is_x86 = self._defines("__x86_64__")
        self._own_flags = CLANG_FLAGS if self._defines("__clang__") else GCC_FLAGS

    def compile(self, source: str, target: str) -> None:
        isa = next((flags for suffix, flags in ISA_FLAGS.items() if source.endswith(suffix)), [])
        flags = [*shlex.split(os.environ.get("CXXFLAGS", "")), *COMMON_FLAGS, *self._own_flags]
        self._run(*flags, *(isa if self._is_x86 else []), "-c", source, "-o", target)

    def link(self, objects: list[str], target: str) -> None:
        flags = shlex.split(os.environ.get("LDFLAGS", ""))
        # Nothing of C++ is seen from outside: torch brings a C++ library of its own into the process.
        exports = "-Wl,--version-script=csrc/bindings/exports.map"
        self._run("-shared", "-pthread", exports, "-s", *objects, *flags, "-ldl", "-o", target)

    def _run(self, *arguments: str, stdout: int | None = None) -> subprocess.CompletedProcess[str]:
        command = [*self.command, *arguments]
        done = subprocess.run(command, check=False, stdout=stdout, text=True)
        if done.returncode:
            raise SystemExit(
                f"ds-slide: `{shlex.join(command)}` failed with exit code {done.returncode}; the compiler's messages "
                f"are above, and the wheel of a release ({WHEEL}) needs no compiler."
            )
        return done

    def _defines(self, macro: str) -> bool:
        done = self._run("-dM", "-E", "-x", "c++", os.devnull, stdout=subprocess.PIPE)
        return f"#define {macro} " in done.stdout


class BuildNative(build_ext):
    """Compiles each source with its own flags, a few at a time, then links them into one library. What is newer than
    all its sources is left as it is."""

    def get_ext_filename(self, fullname: str) -> str:
        return f"{fullname.replace('.', '/')}.so"  # without the name of a version of Python

    def build_extension(self, ext: Extension) -> None:
        compiler = Compiler()
        target, folder = Path(self.get_ext_fullpath(ext.name)), Path(self.build_temp)
        headers = max(Path(each).stat().st_mtime for each in [*ext.depends, "setup.py"])

        def compile_one(source: str) -> str:
            made = folder / f"{source.replace('/', '-')}.o"
            if self.force or not made.exists() or made.stat().st_mtime < max(headers, Path(source).stat().st_mtime):
                compiler.compile(source, str(made))
            return str(made)

        folder.mkdir(parents=True, exist_ok=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(int(os.environ.get("MAX_JOBS", min(8, os.cpu_count() or 1)))) as pool:
            objects = list(pool.map(compile_one, sorted(ext.sources)))
        compiler.link(objects, str(target))


class Wheel(bdist_wheel):
    """Of one platform and every Python 3: the library knows nothing of Python."""

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", super().get_tag()[2])


root = Path(__file__).parent
native = Extension(
    "ds_slide._native.libds_slide",
    sources=[str(path.relative_to(root)) for path in root.glob("csrc/*/*.cpp") if path.parent.name != "tests"],
    depends=[str(path.relative_to(root)) for kind in ("hpp", "map") for path in root.glob(f"csrc/**/*.{kind}")],
)
setup(ext_modules=[native], cmdclass={"build_ext": BuildNative, "bdist_wheel": Wheel})
