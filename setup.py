"""Builds ``ds_slide._native`` from csrc/: C++17 and pybind11 only, so neither torch, CUDA nor a GPU is needed to build.

Everything static is in pyproject.toml. This file exists because kernels are compiled once per instruction set
(``*_sse42.cpp``, ``*_avx2.cpp``, ``*_avx512.cpp``) and setuptools has no per-source flags.
"""

from __future__ import annotations

import os
import platform
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pybind11.setup_helpers import Pybind11Extension
from setuptools import setup
from setuptools.command.build_ext import build_ext

# -ffp-contract=off: the update rule rounds every operation separately; a fused multiply-add would make the bits depend
# on the instruction set. -fno-math-errno lets sqrt be one instruction and -fno-trapping-math lets the portable loops be
# vectorised; neither changes a value. Never -ffast-math.
COMMON_FLAGS = ["-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-Wall", "-Wextra", "-pthread"]
IS_X86 = platform.machine().lower() in ("x86_64", "amd64")
ISA_FLAGS = {
    "_sse42.cpp": ["-msse4.2"],
    "_avx2.cpp": ["-mavx2", "-mf16c"],
    # The warning is a false one inside gcc 12's own AVX-512 headers (its bug 105593).
    "_avx512.cpp": ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mf16c", "-Wno-maybe-uninitialized"],
}


def flags_of(source: str) -> list[str]:
    isa = next((flags for suffix, flags in ISA_FLAGS.items() if source.endswith(suffix)), [])
    return COMMON_FLAGS + (isa if IS_X86 else [])


class BuildNative(build_ext):
    """Compiles each source with its own flags, a few at a time, then links them into one module."""

    def build_extension(self, ext: Pybind11Extension) -> None:
        compiler = self.compiler.compiler_so_cxx[0] if hasattr(self.compiler, "compiler_so_cxx") else "c++"
        if shutil.which(compiler) is None:
            raise SystemExit(
                f"ds-slide: the C++ compiler {compiler!r} was not found, and the extension ds_slide._native needs one; "
                "install g++ 9 or newer (Debian: apt-get install g++) or name one in the environment variable CXX."
            )

        def compile_one(source: str) -> list[str]:
            return self.compiler.compile(
                [source],
                output_dir=self.build_temp,
                include_dirs=[*ext.include_dirs, "csrc"],
                macros=ext.define_macros,
                extra_postargs=[*ext.extra_compile_args, *flags_of(source)],
                depends=ext.depends,
            )

        sources = sorted(ext.sources)
        with ThreadPoolExecutor(int(os.environ.get("MAX_JOBS", min(8, os.cpu_count() or 1)))) as pool:
            objects = [obj for objs in pool.map(compile_one, sources) for obj in objs]
        self.compiler.link_shared_object(
            objects,
            self.get_ext_fullpath(ext.name),
            libraries=["dl", "pthread"],
            extra_postargs=ext.extra_link_args,
            build_temp=self.build_temp,
            target_lang="c++",
        )


root = Path(__file__).parent
native = Pybind11Extension(
    "ds_slide._native",
    sources=[str(path.relative_to(root)) for path in root.glob("csrc/*/*.cpp") if path.parent.name != "tests"],
    depends=[str(path.relative_to(root)) for path in root.glob("csrc/**/*.hpp")],
    cxx_std=17,
)
setup(ext_modules=[native], cmdclass={"build_ext": BuildNative})
