"""The interface of an update rule: its states, its hyper-parameters, and its step on the CPU, on the GPU and in torch.

A rule is one module beside this one (hyper-parameters, reference step, GPU step) and one header in csrc/update (CPU
step). `ds_slide.integration.update_rules` has the rule of each optimizer. Code that stores, moves, updates or saves
states asks the rule for them and knows none of their names.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import nn

from ds_slide.errors import SlideConfigError

Part = Literal["whole", "weights", "states", "with_log", "back", "rest", "out_of_place"]
"""The part of a CPU step that one call does. "whole": all of it. "weights": the new weights. "states": later the new
states, from the same gradient and the old states. "with_log": the part that a log has room for. "back": undo it by the
log. "rest": the part that it left. "out_of_place": all of it, in other state buffers."""


@dataclass(frozen=True)
class StateSpec:
    """One number that a rule keeps for each parameter. ``name`` is the optimizer's name in DeepSpeed's checkpoints.
    ``signed``: whether it may be negative (its 8-bit codes then have a sign bit)."""

    name: str
    signed: bool = True


class Hyper(Protocol):
    """Hyper-parameters of one update of one parameter group."""

    @property
    def rule(self) -> UpdateRule: ...

    @property
    def step(self) -> int:
        """The number of this update, 1 at the first."""
        ...

    @property
    def kernel(self) -> str:
        """The name of the CPU kernels in csrc/update/types.hpp."""
        ...

    @property
    def two_passes(self) -> bool:
        """Whether its kernels can do weights and states apart, because new states do not depend on the old weight."""
        ...

    def constants(self, grad_scale: float = 1.0) -> tuple[float, ...]:
        """Return the numbers for the kernels in their order, computed in double and rounded once by `fp32`. The first
        is ``grad_scale``, the factor on the gradient (clip factor / loss scale)."""
        ...


def at_step(hyper: Hyper, step: int) -> Hyper:
    """Return `hyper` as it is in update number `step`."""
    return hyper if hyper.step == step else _replaced(hyper, step)  # type: ignore[arg-type]


# Units that were frozen together ask for the same few hyper-parameters in each step.
@functools.lru_cache(maxsize=64)
def _replaced(hyper: Hyper, step: int) -> Hyper:
    return dataclasses.replace(hyper, step=step)  # type: ignore[type-var]


class Elements(NamedTuple):
    """Elements of one unit that one step reads and writes. All tensors but the scales are contiguous and of one size.

    ``weight`` bf16 with ``remainder`` int16 is the split master. fp32 with None is a plain weight. fp16 with
    ``remainder`` fp32 is an fp16 copy (written only) of the fp32 master. ``grad`` is bf16, fp16 or fp32.

    The ``states`` of the rule, in its order, are all fp32, all bf16, or all uint8 codes with their ``scales``, fp32
    [ceil(numel / 64)] (ds_slide.optim.low_precision). bf16 and codes are rounded stochastically by random bits of
    (``seed``, step, element). ``seed`` is the unit's. ``first``, a multiple of 64, is the number of element 0 within
    the unit, so chunks of a unit give the bits of the whole. An infinity or NaN in a state makes its group of codes
    NaN.
    """

    weight: torch.Tensor
    remainder: torch.Tensor | None
    states: Sequence[torch.Tensor]
    grad: torch.Tensor
    scales: Sequence[torch.Tensor | None] = ()
    seed: int = 0
    first: int = 0


HyperOf = Callable[[Mapping[str, Any], int, Any], Hyper]
"""(element of ``optimizer.param_groups``, number of the update, the optimizer) -> hyper-parameters."""

ReferenceStep = Callable[
    [Any, Any, torch.Tensor, torch.Tensor, Sequence[torch.Tensor]], tuple[torch.Tensor, Sequence[torch.Tensor]]
]
"""(hyper, its constants, fp32 weight, fp32 gradient after its factor, fp32 states) -> (new weight, new states), with
the arithmetic of `ds_slide.optim.rounding`. All are [n]."""

GpuStep = Callable[[Elements, Any, float], None]
"""(elements, hyper, grad_scale): one step in place on flat CUDA tensors, without waiting. The weight is bf16 with an
int16 remainder, and the states are fp32."""


class Member(NamedTuple):
    """A parameter of a unit. ``shape``: what a rule that updates whole units sees of it."""

    name: str
    parameter: nn.Parameter
    group: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class UpdateRule:
    """An update rule. ``state_dtypes``: the values of ``ds_slide.state_dtype`` that it has kernels for. ``problems``:
    yields a sentence with the way out for each option of an optimizer that the rule lacks. CPU, GPU and reference step
    give the same bits."""

    name: str
    states: tuple[StateSpec, ...]
    state_dtypes: tuple[str, ...]
    hyper_of: HyperOf
    reference_step: ReferenceStep
    gpu_step: GpuStep
    problems: Callable[[Any], Iterator[str]]
    two_passes: bool = False
    """Whether a step can do weights and states apart, for some of the rule's hyper-parameters (`Hyper.two_passes`)."""
    whole_units: bool = False
    """Whether a step takes all parameters of a unit at once, on the CPU (`ds_slide.optim.client`)."""

    def of_group(self, group: int) -> UpdateRule:  # noqa: ARG002
        """Return the rule of a parameter group: this one, or another one beside it."""
        return self

    def largest_matrix(self, shapes: Sequence[tuple[nn.Parameter, tuple[int, ...]]]) -> int:  # noqa: ARG002
        """Return the elements of the largest matrix that a step takes as a whole; 0 for a rule over single elements.
        `shapes`: of trained parameters."""
        return 0

    def batch_bytes(self, shapes: Sequence[tuple[nn.Parameter, tuple[int, ...]]]) -> int:  # noqa: ARG002
        """Return the accelerator's bytes of a step that takes such matrices together, where their states are there; 0
        if it takes them one by one. `shapes`: as before."""
        return 0

    def product_flop(self, shapes: Sequence[tuple[nn.Parameter, tuple[int, ...]]]) -> int:  # noqa: ARG002
        """Return the FLOP of the products of a step over such matrices, on the accelerator. `shapes`: as before."""
        return 0

    def beside(self, members: Sequence[Member]) -> int:  # noqa: ARG002
        """Return the bytes that the rule keeps for parameters outside of its state buffers."""
        return 0

    @property
    def state_names(self) -> tuple[str, ...]:
        return tuple(state.name for state in self.states)


def fp32(value: float) -> float:
    """Return ``value`` rounded to fp32. A subnormal becomes zero with its sign."""
    rounded = ctypes.c_float(value).value
    return math.copysign(0.0, rounded) if abs(rounded) < 2.0**-126 else rounded


def require_ranges(expected: str, *numbers: tuple[str, Any, bool]) -> None:
    """Raise SlideConfigError for the first of `numbers` (name, value, whether it is valid) outside its range."""
    for name, value, is_valid in numbers:
        if not is_valid:
            raise SlideConfigError(f"optimizer parameter {name!r} is {value}, which is outside its range; {expected}.")


def options_on(names: Sequence[str], group: Mapping[str, Any], index: int) -> Iterator[str]:
    """Yield a sentence for each option of `names` that is on in parameter group `index`."""
    for name in names:
        if group.get(name):
            yield f"{name} is true in parameter group {index}, but DS-Slide does not support it; set it to false"


def range_problems(hyper_of: HyperOf, optimizer: Any) -> Iterator[str]:
    """Yield a sentence for each parameter group with hyper-parameters that `hyper_of` refuses."""
    for index, group in enumerate(optimizer.param_groups):
        try:
            hyper_of(group, 1, optimizer)
        except (SlideConfigError, KeyError, TypeError, ValueError) as error:
            yield f"parameter group {index} of {type(optimizer).__name__} cannot be used: {error}"
