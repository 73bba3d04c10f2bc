"""C++ core (csrc/).

Every pointer is an address as an int; arrays hold ``numel`` elements and need element alignment only. Long calls
release the GIL. ValueError for an argument outside its range.
"""

from typing import Literal

_Dtype = Literal["bf16", "fp16", "fp32"]
_Isa = Literal["auto", "avx512", "avx2", "portable"]

class Workers:
    """Persistent threads, asleep between calls; calls on one object run one after the other.

    Thread ``i`` is pinned to ``cores[i % len(cores)]`` unless ``cores`` is empty. RuntimeError when a thread cannot be
    started or pinned, and when used in a child forked after the threads were made.
    """

    def __init__(self, num_threads: int, cores: list[int]) -> None: ...
    @property
    def num_threads(self) -> int: ...

class Slab:
    """Zero-filled host memory of ``nbytes`` bytes, page aligned, mapped in whole pages, not inherited by fork.

    ``pin`` page-locks it through the CUDA driver, usable from every context; RuntimeError when that fails. A writable
    buffer of unsigned bytes: ``torch.frombuffer(slab, dtype=torch.uint8)`` shares the memory and keeps the slab alive.
    """

    def __init__(self, nbytes: int, pin: bool, huge_pages: bool) -> None: ...
    @property
    def ptr(self) -> int:
        """Address of the first byte; 0 when closed or when ``nbytes`` is 0."""
    @property
    def nbytes(self) -> int:
        """The size asked for, in bytes."""
    @property
    def pinned(self) -> bool: ...
    def close(self) -> None:
        """Unlock and unmap; tensors that still view the memory must not be used again. A second call does nothing."""
    def __buffer__(self, flags: int, /) -> memoryview: ...

def isa() -> Literal["avx512", "avx2", "portable"]:
    """Best instruction set of this processor. All three give the same bits."""

def adamw(
    workers: Workers,
    weight_format: Literal["bf16_planar", "fp32", "fp16_master"],
    weight_ptr: int,
    remainder_ptr: int,
    exp_avg_ptr: int,
    exp_avg_sq_ptr: int,
    grad_ptr: int,
    grad_dtype: _Dtype,
    numel: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    bias_correction: bool,
    adam_w_mode: bool,
    grad_scale: float,
    isa: _Isa = "auto",
) -> None:
    """One Adam(W) step in place, in one pass over memory; ``step`` is 1 at the first update.

    ``bf16_planar``: weight bf16, remainder int16. ``fp32``: weight float, remainder unused (0). ``fp16_master``: weight
    an fp16 copy that is written only, remainder the float master. Both moments are float.
    """

def accumulate(
    workers: Workers, dst_ptr: int, dst_dtype: _Dtype, src_ptr: int, src_dtype: _Dtype, numel: int, isa: _Isa = "auto"
) -> None:
    """``dst = round(float(dst) + float(src))``, to nearest even."""

def sum_of_squares(workers: Workers, ptr: int, dtype: _Dtype, numel: int, isa: _Isa = "auto") -> float:
    """Sum of squares in fp64; the same bits for any thread count. Infinities and NaN propagate."""
