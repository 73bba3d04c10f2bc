"""Update threads, and what they compute: steps of the update rules, sums, checksums."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from struct import Struct
from typing import Literal, NamedTuple

from ds_slide._native.library import checked, function, new_handle

Dtype = Literal["bf16", "fp16", "fp32"]
Isa = Literal["auto", "avx512", "avx2", "portable"]
SumIsa = Literal["auto", "sse42", "portable"]

_workers_new = function("workers_new", "q:pqpq")
_workers_num_threads = function("workers_num_threads", "q:p", keeps_gil=True)
_update = function("update", "q:ppqpq")
_copy = function("copy", "q:pqqq")
_accumulate = function("accumulate", "q:pqqqqqq")
_join = function("join", "q:pqqqqq")
_split = function("split", "q:pqqqqq")
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
_NUMBERS = {
    "rule": _RULES,
    "weight_format": _WEIGHT_FORMATS,
    "grad_dtype": _DTYPES,
    "state_format": _STATE_FORMATS,
    "part": _PARTS,
    "isa": _ISAS,
}
"""The numbers of the names in each field of an `UpdateCall`."""
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


class UpdateCall(NamedTuple):
    """One step of a rule over the elements of a unit. Addresses are of contiguous arrays; 0 means no array."""

    rule: str
    """The name of the rule's kernels in csrc/update/types.hpp."""
    weight_format: Literal["bf16_split", "fp32", "fp16_master"]
    """"bf16_split": the weight is bf16 and the remainder int16. "fp32": there is no remainder. "fp16_master": the
    weight is an fp16 copy that is only written, and the remainder is the master in fp32."""
    weight_ptr: int
    remainder_ptr: int
    state_ptrs: Sequence[int]
    grad_ptr: int
    grad_dtype: Dtype
    numel: int
    numbers: Sequence[float]
    """The rule's numbers of this step, in their order in types.hpp. The first is the factor on the gradient."""
    isa: Isa = "auto"
    state_format: Literal["fp32", "bf16", "8bit"] = "fp32"
    """Format of all states. "8bit" has a float scale for every 64 elements. Formats other than fp32 are rounded by
    random bits of (`seed`, `step`, `first` + index)."""
    scale_ptrs: Sequence[int] = ()
    seed: int = 0
    step: int = 1
    """Number of the update, from 1."""
    first: int = 0
    """Index of the first element in its unit, a multiple of 64."""
    part: Literal["whole", "weights", "states", "with_log", "back", "rest", "out_of_place"] = "whole"
    """"whole": the step in place. "weights", then "states": the same bits in two passes with one gradient.

    "with_log": the whole step, with a log of the overwritten bytes in `low_ptrs` and `slices_ptr`, as far as they have
    room. "rest": the elements that had no room. "back": the old bits again, from the same call; it overwrites
    `new_weight_ptr`. These three need states in fp32, and not "fp16_master".

    "out_of_place": the whole step, with its results in `new_weight_ptr`, `new_remainder_ptr` (0 for "fp32") and
    `new_state_ptrs`. Each begins at a multiple of 64 bytes, and is written past the caches. States are in fp32."""
    new_weight_ptr: int = 0
    """Gets the new weight. The array at `weight_ptr` then stays as it is."""
    old_ptrs: Sequence[int] = ()
    """Get the old bytes of weight, remainder, states and scales, each 0 or an array."""
    low_ptrs: Sequence[int] = ()
    """A byte an element, for the weight and each state."""
    slices_ptr: int = 0
    """`SLICE_LOG_BYTES` for every `UPDATE_SLICE` elements."""
    new_remainder_ptr: int = 0
    new_state_ptrs: Sequence[int] = ()


def update(workers: Workers, call: UpdateCall) -> None:
    """Do the step of `call` in one pass over memory.

    ValueError for a name or a count that the kernels do not have, an array that is not aligned, and the parts
    "weights" and "states" of a rule whose new states depend on the old weight.
    """
    try:
        # csrc/bindings/update.cpp reads them in this order.
        words = (
            _RULES[call.rule],
            _WEIGHT_FORMATS[call.weight_format],
            _DTYPES[call.grad_dtype],
            _STATE_FORMATS[call.state_format],
            _PARTS[call.part],
            _ISAS[call.isa],
            call.numel,
            call.step,
            call.seed,
            call.first,
            call.weight_ptr,
            call.remainder_ptr,
            call.grad_ptr,
            call.new_weight_ptr,
            call.new_remainder_ptr,
            call.slices_ptr,
            len(call.state_ptrs),
            *call.state_ptrs,
            len(call.scale_ptrs),
            *call.scale_ptrs,
            len(call.old_ptrs),
            *call.old_ptrs,
            len(call.low_ptrs),
            *call.low_ptrs,
            len(call.new_state_ptrs),
            *call.new_state_ptrs,
        )
    except KeyError:
        for kind, numbers in _NUMBERS.items():
            _number_of(kind, numbers, getattr(call, kind))
        raise
    packed, floats = _WORDS[len(words)].pack(*words), _FLOATS[len(call.numbers)].pack(*call.numbers)
    checked(_update(workers._handle, packed, len(words), floats, len(call.numbers)))


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


class SplitMasters(NamedTuple):
    """Addresses of fp32 masters, and of their bf16 weights and int16 remainders."""

    masters_ptr: int
    weight_ptr: int
    remainder_ptr: int


def join(workers: Workers, arrays: SplitMasters, numel: int, isa: Isa = "auto") -> None:
    """Write the masters."""
    checked(_join(workers._handle, *arrays, numel, _number_of("isa", _ISAS, isa)))


def split(workers: Workers, arrays: SplitMasters, numel: int, isa: Isa = "auto") -> None:
    """Write the weights, rounded half up, and the remainders. `join` is the way back."""
    checked(_split(workers._handle, *arrays, numel, _number_of("isa", _ISAS, isa)))


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
    """The first page whose CRC32C is not that at ``sums_ptr``. A sum of 0 is not known: it agrees with
    any page."""
    isa_ = _number_of("isa", _SUM_ISAS, isa)
    found = checked(_first_wrong_page(workers._handle, address, nbytes, sums_ptr, isa_))
    return found - 1 if found else None
