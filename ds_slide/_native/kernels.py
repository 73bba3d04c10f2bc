"""Update threads, and what they compute: steps of the update rules, sums, checksums."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from struct import Struct
from typing import Literal

from ds_slide._native.library import checked, function, new_handle

Dtype = Literal["bf16", "fp16", "fp32"]
Isa = Literal["auto", "avx512", "avx2", "portable"]
SumIsa = Literal["auto", "sse42", "portable"]

_workers_new = function("workers_new", "q:pqpq")
_workers_num_threads = function("workers_num_threads", "q:p", keeps_gil=True)
_update = function("update", "q:ppqpq")
_copy = function("copy", "q:pqqq")
_accumulate = function("accumulate", "q:pqqqqqq")
_sum_of_squares = function("sum_of_squares", "q:pqqqqp")
_page_sums = function("page_sums", "q:ppqpq")
_first_wrong_page = function("first_wrong_page", "q:ppqpq")
_isa = function("isa", "q:", keeps_gil=True)
_sum_isa = function("sum_isa", "q:", keeps_gil=True)

UPDATE_SLICE: int = function("update_slice", "q:", keeps_gil=True)()
SLICE_LOG_BYTES: int = function("slice_log_bytes", "q:", keeps_gil=True)()


def _read_names() -> dict[str, dict[str, int]]:
    """Return the numbers of the names of each enumeration in csrc/update/types.hpp."""
    text = ctypes.string_at(function("names", "p:", keeps_gil=True)()).decode()
    lines = (line.split() for line in text.splitlines())
    return {kind: {name: number for number, name in enumerate(names)} for kind, *names in lines}


_NAMES = _read_names()
_RULES, _WEIGHT_FORMATS, _DTYPES = _NAMES["rule"], _NAMES["weight_format"], _NAMES["dtype"]
_STATE_FORMATS, _PARTS = _NAMES["state_format"], _NAMES["part"]
_ISAS = {"auto": 0, **{name: 1 + number for name, number in _NAMES["isa"].items()}}
_SUM_ISAS = {"auto": 0, "portable": 1, "sse42": 2}


class Workers:
    """Persistent threads, asleep between calls; calls on one object run one after the other.

    Thread ``i`` is pinned to ``cores[i % len(cores)]`` unless ``cores`` is empty. The threads end with the object.
    RuntimeError when a thread cannot be started or pinned, and when used in a child forked after the threads were made.
    """

    def __init__(self, num_threads: int, cores: list[int]) -> None:
        self._handle = new_handle("workers")
        checked(
            _workers_new(ctypes.byref(self._handle), num_threads, (ctypes.c_int64 * len(cores))(*cores), len(cores))
        )

    @property
    def num_threads(self) -> int:
        return int(_workers_num_threads(self._handle))


def isa() -> Literal["avx512", "avx2", "portable"]:
    """Return the best instruction set of this processor. All three give the same bits."""
    return list(_NAMES["isa"])[_isa()]


def update(
    workers: Workers,
    rule: str,
    weight_format: Literal["bf16_split", "fp32", "fp16_master"],
    weight_ptr: int,
    remainder_ptr: int,
    state_ptrs: Sequence[int],
    grad_ptr: int,
    grad_dtype: Dtype,
    numel: int,
    numbers: Sequence[float],
    isa: Isa = "auto",
    state_format: Literal["fp32", "bf16", "8bit"] = "fp32",
    scale_ptrs: Sequence[int] = (),
    seed: int = 0,
    step: int = 1,
    first: int = 0,
    part: Literal["whole", "weights", "states", "with_log", "back", "rest", "out_of_place"] = "whole",
    new_weight_ptr: int = 0,
    old_ptrs: Sequence[int] = (),
    low_ptrs: Sequence[int] = (),
    slices_ptr: int = 0,
    new_remainder_ptr: int = 0,
    new_state_ptrs: Sequence[int] = (),
) -> None:
    """One step of ``rule`` in place, in one pass over memory; ``step`` is 1 at the first update.

    ``part``: the "weights" alone, and then, from the same gradient, the "states" alone, which leaves the same bits;
    ValueError for a rule whose new states depend on the old weight.

    ``rule`` is the name of its kernels in csrc/update/types.hpp, ``numbers`` its numbers of this step in their order
    there, the factor on the gradient first.

    ``bf16_split``: weight bf16, remainder int16. ``fp32``: weight float, remainder unused (0). ``fp16_master``: weight
    an fp16 copy that is written only, remainder the float master.

    The states are all float, all bf16, or all bytes with a float scale for every 64 of them. Those that are not float
    are rounded by random bits of (``seed``, ``step``, ``first`` + index); ``first`` is a multiple of 64.

    ``new_weight_ptr``, where it is not 0, gets the new weight, and ``weight_ptr`` stays as it is. ``old_ptrs``:
    nothing, or where the old bytes of weight, remainder, states and scales go, 0 for those that are not wanted.

    "with_log" is the whole step with a log, of ``low_ptrs`` (a byte an element, for the weight and each state) and
    ``slices_ptr`` (`SLICE_LOG_BYTES` for every `UPDATE_SLICE` elements), as far as that has room; "back" with the same
    arguments gives the old bits back, and uses ``new_weight_ptr`` up; "rest" does what there was no room for. For
    states in float, and not for ``fp16_master``.

    "out_of_place" is the whole step with what it writes in ``new_weight_ptr``, ``new_remainder_ptr`` (0 for ``fp32``)
    and ``new_state_ptrs``, each at a multiple of 64 bytes, past the caches. For states in float.
    """
    try:
        # In the order in which csrc/bindings/update.cpp reads them.
        words = (
            _RULES[rule],
            _WEIGHT_FORMATS[weight_format],
            _DTYPES[grad_dtype],
            _STATE_FORMATS[state_format],
            _PARTS[part],
            _ISAS[isa],
            numel,
            step,
            seed,
            first,
            weight_ptr,
            remainder_ptr,
            grad_ptr,
            new_weight_ptr,
            new_remainder_ptr,
            slices_ptr,
            len(state_ptrs),
            *state_ptrs,
            len(scale_ptrs),
            *scale_ptrs,
            len(old_ptrs),
            *old_ptrs,
            len(low_ptrs),
            *low_ptrs,
            len(new_state_ptrs),
            *new_state_ptrs,
        )
    except KeyError:
        _number_of("rule", _RULES, rule)
        _number_of("weight_format", _WEIGHT_FORMATS, weight_format)
        _number_of("grad_dtype", _DTYPES, grad_dtype)
        _number_of("state_format", _STATE_FORMATS, state_format)
        _number_of("part", _PARTS, part)
        _number_of("isa", _ISAS, isa)
        raise
    packed, floats = _WORDS[len(words)].pack(*words), _FLOATS[len(numbers)].pack(*numbers)
    checked(_update(workers._handle, packed, len(words), floats, len(numbers)))


_WORDS = [Struct(f"{count}Q") for count in range(64)]
_FLOATS = [Struct(f"{count}f") for count in range(64)]


def _number_of(argument: str, numbers: dict[str, int], name: str) -> int:
    number = numbers.get(name)
    if number is None:
        raise ValueError(f'{argument} is "{name}" but must be one of {", ".join(numbers)}')
    return number


def copy(workers: Workers, to_ptr: int, from_ptr: int, nbytes: int) -> None:
    """Copy bytes to memory that is not read soon."""
    checked(_copy(workers._handle, to_ptr, from_ptr, nbytes))


def accumulate(
    workers: Workers, dst_ptr: int, dst_dtype: Dtype, src_ptr: int, src_dtype: Dtype, numel: int, isa: Isa = "auto"
) -> None:
    """``dst = round(float(dst) + float(src))``, to nearest even."""
    dst, src = _number_of("dst_dtype", _DTYPES, dst_dtype), _number_of("src_dtype", _DTYPES, src_dtype)
    checked(_accumulate(workers._handle, dst_ptr, dst, src_ptr, src, numel, _number_of("isa", _ISAS, isa)))


def sum_of_squares(workers: Workers, ptr: int, dtype: Dtype, numel: int, isa: Isa = "auto") -> float:
    """Sum of squares in fp64; the same bits for any thread count. Infinities and NaN propagate."""
    total = ctypes.c_double()
    type_, isa_ = _number_of("dtype", _DTYPES, dtype), _number_of("isa", _ISAS, isa)
    checked(_sum_of_squares(workers._handle, ptr, type_, numel, isa_, ctypes.byref(total)))
    return total.value


def sum_isa() -> Literal["sse42", "portable"]:
    """Return how CRC32C is computed on this processor; both give the same values."""
    return list(_SUM_ISAS)[_sum_isa()]


def page_sums(workers: Workers, address: int, nbytes: int, sums_ptr: int, isa: SumIsa = "auto") -> None:
    """CRC32C (RFC 3720) of every 4096 of ``nbytes`` bytes, into the uint32 at ``sums_ptr``. ``address`` may be any."""
    checked(_page_sums(workers._handle, address, nbytes, sums_ptr, _number_of("isa", _SUM_ISAS, isa)))


def first_wrong_page(workers: Workers, address: int, nbytes: int, sums_ptr: int, isa: SumIsa = "auto") -> int | None:
    """The first page whose CRC32C is not that at ``sums_ptr``. A sum of 0 is one that is not known: it agrees with any
    page."""
    isa_ = _number_of("isa", _SUM_ISAS, isa)
    found = checked(_first_wrong_page(workers._handle, address, nbytes, sums_ptr, isa_))
    return found - 1 if found else None
