"""Compiles a kernel of DS-Slide for a GPU, which needs none, and tells of it as an engine does after its first step.

Not a test module.
"""

from __future__ import annotations

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ds_slide.kernels.offload.square_sum import combine_kernel
from ds_slide.report.compilations import watch
from ds_slide.report.log import show


def told(**event: object) -> None:
    print("told", event["cache_hit"])


if __name__ == "__main__":
    triton.knobs.compilation.listener = told
    show()
    for _ in range(2):  # the second call changes nothing
        compilations = watch()
    compilations.tell()
    signature = {"partial": "*fp64", "square_sum": "*fp64", "count": "i32", "BLOCK": "constexpr"}
    source = ASTSource(combine_kernel, signature, {"BLOCK": 1024})
    triton.compile(source, target=GPUTarget("cuda", 90, 32))
    compilations.tell()
    compilations.tell()
