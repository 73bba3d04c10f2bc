"""The C++ kernels for CPU tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch

from ds_slide.errors import SlideError
from ds_slide.optim.low_precision import STATE_FORMATS, StateFormat
from ds_slide.optim.rounding import check_first
from ds_slide.optim.rule import Elements, Hyper, Part

try:
    from ds_slide import _native
except ImportError as error:
    raise SlideError(
        f"the C++ extension ds_slide._native cannot be loaded ({error}); install the wheel of a release, "
        "or build it in the source tree with `pip install .`, which needs a C++17 compiler."
    ) from error

_DtypeName = Literal["bf16", "fp16", "fp32"]
_WeightFormat = Literal["bf16_split", "fp32", "fp16_master"]

_DTYPE_NAMES: dict[torch.dtype, _DtypeName] = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
# (dtype of the weight, dtype of the remainder) -> weight format of the kernels
_WEIGHT_FORMATS: dict[tuple[torch.dtype, torch.dtype | None], _WeightFormat] = {
    (torch.bfloat16, torch.int16): "bf16_split",
    (torch.float32, None): "fp32",
    (torch.float16, torch.float32): "fp16_master",
}


class Beside(NamedTuple):
    """What a step writes beside its elements, or in their place.

    ``new_weight`` gets the new weight, and the weight stays as it is. "out_of_place" writes ``new_remainder`` and
    ``new_states``, too. Each of them then begins at a multiple of 64 bytes. ``old`` is empty, or has a tensor or None
    for each of weight, remainder, states and scales (of codes only), which gets the old bytes. For the parts with a
    log, ``low`` has a uint8 tensor for the weight and each state, and ``slices`` has 4 KiB for every 16 Ki elements.
    """

    new_weight: torch.Tensor | None = None
    new_remainder: torch.Tensor | None = None
    new_states: Sequence[torch.Tensor] = ()
    old: Sequence[torch.Tensor | None] = ()
    low: Sequence[torch.Tensor] = ()
    slices: torch.Tensor | None = None

    def pointers(self, of: Elements, *, logs_scales: bool) -> dict[str, Any]:
        """Return fields of an `UpdateCall`, checked against the elements. ``logs_scales``: states have scales."""
        if self is NOTHING_BESIDE:
            return {}
        numel = of.weight.numel()
        logged = [of.weight, of.remainder, *of.states, *(of.scales if logs_scales else ())]
        return {
            "new_weight_ptr": _beside("new_weight", self.new_weight, of.weight),
            "old_ptrs": [_beside("old", *pair) for pair in zip(self.old, logged if self.old else (), strict=True)],
            "low_ptrs": [_pointer("update_", "low", each, numel, torch.uint8) for each in self.low],
            "slices_ptr": 0 if self.slices is None else self.slices.data_ptr(),
            "new_remainder_ptr": _beside("new_remainder", self.new_remainder, of.remainder),
            "new_state_ptrs": [
                _pointer("update_", "new_states", each, numel, torch.float32) for each in self.new_states
            ],
        }


NOTHING_BESIDE = Beside()


class CpuUpdater:
    """Updates, accumulation and norms on ``num_threads`` persistent threads.

    Thread ``i`` is pinned to ``cores[i % len(cores)]`` unless ``cores`` is empty. Calls release the GIL, may come from
    any thread and run one after the other. No result depends on the number of threads. All tensors are contiguous and
    on the CPU, others raise SlideError. ``idle``: the object is never called, and has no threads.
    """

    def __init__(self, num_threads: int, cores: Sequence[int] = (), *, idle: bool = False) -> None:
        if idle:
            return
        try:
            self._workers = _native.Workers(num_threads, list(cores))
        except (RuntimeError, ValueError) as error:
            raise SlideError(
                f"ds_slide.cpu_threads: the threads of the CPU update cannot be started: {error}"
            ) from error

    def end_threads(self) -> None:
        """End the threads at once, even while other objects refer to this one, which cannot be used afterwards."""
        if hasattr(self, "_workers"):
            del self._workers

    @property
    def num_threads(self) -> int:
        return self._workers.num_threads

    def update_(
        self,
        elements: Elements,
        hyper: Hyper,
        grad_scale: float = 1.0,
        *,
        part: Part = "whole",
        beside: Beside = NOTHING_BESIDE,
    ) -> None:
        """Do one step of ``hyper.rule`` in one pass over memory: in place, or as ``part`` and ``beside`` say. The
        gradient is multiplied by ``grad_scale`` first.

        ``part``: "weights" and then "states", for hyper-parameters with ``two_passes``, give the same bits. The parts
        with a log need states in fp32 and weights other than fp16. "back" takes the arguments of the step.
        "out_of_place", for states in fp32, writes only to the new tensors of ``beside``.
        """
        weight, remainder, states, grad, scales, seed, first = elements
        weight_format = _WEIGHT_FORMATS.get((weight.dtype, None if remainder is None else remainder.dtype))
        if weight_format is None:
            raise SlideError(
                f"update_: weight {weight.dtype} with remainder {None if remainder is None else remainder.dtype} is no "
                "weight format; use bfloat16 with int16, float32 with None, or float16 with float32."
            )
        numel, names = weight.numel(), hyper.rule.state_names
        check_first(first)
        state = _state_format(names, states)
        scale_ptrs = [
            _scale_pointer(f"{name}_scale", scale, numel, state)
            for name, scale in zip(names, scales or [None] * len(names), strict=True)
        ]
        call = _native.UpdateCall(
            hyper.kernel,
            weight_format,
            _pointer("update_", "weight", weight, numel),
            0 if remainder is None else _pointer("update_", "remainder", remainder, numel),
            [_pointer("update_", name, each, numel, state.dtype) for name, each in zip(names, states, strict=True)],
            _pointer("update_", "grad", grad, numel),
            _dtype_name("update_", "grad", grad),
            numel,
            hyper.constants(grad_scale),
            state_format=state.name,
            scale_ptrs=scale_ptrs if state.has_scales else (),
            seed=seed & 0xFFFFFFFFFFFFFFFF,
            step=hyper.step,
            first=first,
            part=part,
            **beside.pointers(elements, logs_scales=state.has_scales),
        )
        _native.update(self._workers, call)

    def copy_(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        """Copy the bytes of ``src`` to ``dst``, of the same data type and size."""
        numel, dtype = src.numel(), src.dtype
        to_ptr, from_ptr = _pointer("copy_", "dst", dst, numel, dtype), _pointer("copy_", "src", src, numel)
        _native.copy(self._workers, to_ptr, from_ptr, src.nbytes)

    def accumulate_(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        """Do ``dst += src`` in fp32, rounded to the dtype of ``dst``. bf16, fp16 and fp32 in any combination."""
        numel = dst.numel()
        _native.accumulate(
            self._workers,
            _pointer("accumulate_", "dst", dst, numel),
            _dtype_name("accumulate_", "dst", dst),
            _pointer("accumulate_", "src", src, numel),
            _dtype_name("accumulate_", "src", src),
            numel,
        )

    def join_(self, masters: torch.Tensor, weight: torch.Tensor, remainder: torch.Tensor) -> None:
        """Write the fp32 ``masters`` of bf16 weights and int16 remainders (`ds_slide.optim.reference.join_split`)."""
        _native.join(self._workers, _split_masters("join_", masters, weight, remainder), masters.numel())

    def split_(self, masters: torch.Tensor, weight: torch.Tensor, remainder: torch.Tensor) -> None:
        """Write the bf16 ``weight`` and int16 ``remainder`` of fp32 ``masters``, as `encode_split` does."""
        _native.split(self._workers, _split_masters("split_", masters, weight, remainder), masters.numel())

    def sum_of_squares(self, tensor: torch.Tensor) -> float:
        """Return the sum of squares of a bf16, fp16 or fp32 tensor, added in fp64. Infinities and NaN propagate."""
        numel = tensor.numel()
        pointer = _pointer("sum_of_squares", "tensor", tensor, numel)
        return _native.sum_of_squares(self._workers, pointer, _dtype_name("sum_of_squares", "tensor", tensor), numel)


def _split_masters(
    function: str, masters: torch.Tensor, weight: torch.Tensor, remainder: torch.Tensor
) -> _native.SplitMasters:
    numel = masters.numel()
    return _native.SplitMasters(
        _pointer(function, "masters", masters, numel, torch.float32),
        _pointer(function, "weight", weight, numel, torch.bfloat16),
        _pointer(function, "remainder", remainder, numel, torch.int16),
    )


def _dtype_name(function: str, argument: str, tensor: torch.Tensor) -> _DtypeName:
    name = _DTYPE_NAMES.get(tensor.dtype)
    if name is None:
        raise SlideError(f"{function}: {argument} is {tensor.dtype}; use bfloat16, float16 or float32.")
    return name


def _state_format(names: Sequence[str], states: Sequence[torch.Tensor]) -> StateFormat:
    """Return the format of the last state. The others are checked against it. A rule without states counts as fp32."""
    if not states:
        return STATE_FORMATS["fp32"]
    found = next((known for known in STATE_FORMATS.values() if known.dtype == states[-1].dtype), None)
    if found is None:
        raise SlideError(f"update_: {names[-1]} is {states[-1].dtype}; use float32, bfloat16 or uint8 for all states.")
    return found


def _scale_pointer(argument: str, scale: torch.Tensor | None, numel: int, state: StateFormat) -> int:
    if (scale is not None) != state.has_scales:
        needed = f"an fp32 tensor of {state.scale_numel(numel)} elements" if state.has_scales else "None"
        raise SlideError(f"update_: {argument} must be {needed} when the states are {state.dtype}.")
    if scale is None:
        return 0
    if scale.numel() != state.scale_numel(numel):
        raise SlideError(
            f"update_: {argument} has {scale.numel()} elements but {numel} elements need {state.scale_numel(numel)}."
        )
    return _pointer("update_", argument, scale, scale.numel(), torch.float32)


def _beside(argument: str, tensor: torch.Tensor | None, own: torch.Tensor | None) -> int:
    """Return the address of a tensor that is written beside ``own``; 0 without one of them."""
    return 0 if tensor is None or own is None else _pointer("update_", argument, tensor, own.numel(), own.dtype)


def _pointer(function: str, argument: str, tensor: torch.Tensor, numel: int, dtype: torch.dtype | None = None) -> int:
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise SlideError(f"{function}: {argument} is not a contiguous CPU tensor; copy it to one first.")
    if tensor.numel() != numel:
        raise SlideError(f"{function}: {argument} has {tensor.numel()} elements but the others have {numel}.")
    if dtype is not None and tensor.dtype != dtype:
        raise SlideError(f"{function}: {argument} is {tensor.dtype} but must be {dtype}.")
    return tensor.data_ptr()
