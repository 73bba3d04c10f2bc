"""Frozen tensors of a block that are no parameters and move with it: packed weights in buffers, and what libraries keep
beside packed parameters.

    buffers                GPTQ's and AWQ's `qweight`, `qzeros`, `scales`, `g_idx`
    `weight.quant_state`   bitsandbytes, 4 bits: absmax, and with double quantisation the nested absmax; beside a 3-D
                           parameter (`replace_parameter_4bit`) the parametrization has it
    `SCB`, `CB`            bitsandbytes, 8 bits: the scales of the rows, and a second tensor on the weight's memory
    `Rebuilt`              buffers beside the largest tensor of a subclass, as torchao's (`ds_slide.model.subclasses`)

Only large tensors are worth a place in the block (`LEAST_BYTES`). The smaller ones stay on the accelerator.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from ds_slide.model.subclasses import Rebuilt

TRAINED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""The data types that parameters may be trained in."""

# A page. Codes of 16 or 256 numbers and offsets are below it; the absmax of a matrix of 512 x 128 is not.
LEAST_BYTES = 4096


_DIVIDED = "ds_slide_divided"
"""Attribute of a tensor that is empty while its block is not bound, because no memory of this rank has it whole. It
outlives the engine, as `ds_tensor` of a parameter does."""


@dataclass(frozen=True, eq=False)
class Divided:
    """What such a tensor stands for."""

    shape: tuple[int, ...]
    own: torch.Tensor
    """This rank's elements, flat, with its padding. Empty where they are on SSD."""

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Divided | None:
        """Return what the tensor stands for; None for a tensor that has its elements."""
        return getattr(tensor, _DIVIDED, None)

    def note(self, tensor: torch.Tensor) -> None:
        setattr(tensor, _DIVIDED, self)

    @staticmethod
    def forget(tensor: torch.Tensor) -> None:
        """Note that the tensor has its elements again."""
        vars(tensor).pop(_DIVIDED, None)


@dataclass(frozen=True, eq=False)
class Carried:
    """A tensor that moves with a block. The object stays the same, as for parameters: only its memory changes."""

    name: str
    """Module path and attributes; unique in the model."""
    tensor: torch.Tensor
    of: nn.Parameter | None = None
    """The packed parameter that is read together with it; None for a buffer."""
    is_alias: bool = False
    """Whether it is on the memory of that parameter, and so needs no bytes of its own."""

    @property
    def shape(self) -> tuple[int, ...]:
        divided = Divided.of(self.tensor)
        return tuple(self.tensor.shape) if divided is None else divided.shape

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return 0 if self.is_alias else self.numel * self.tensor.element_size()


def find_carried(root: nn.Module) -> dict[nn.Module, list[Carried]]:
    """Return the tensors that may move with the modules of `root` that use them. A tensor in two places stays where it
    is, and so does one that is no contiguous memory of its own."""
    found = {module: list(_of_module(name, module)) for name, module in root.named_modules()}
    times = Counter(id(each.tensor) for several in found.values() for each in several)
    return {
        module: [each for each in several if each.is_alias or (times[id(each.tensor)] == 1 and _can_move(each.tensor))]
        for module, several in found.items()
        if several
    }


def packed_tensors(root: nn.Module) -> Iterator[torch.Tensor]:
    """Yield all packed buffers, and all tensors beside packed parameters. Tensors that do not move with a block have
    to be where the model computes."""
    for module in root.modules():
        for _, buffer in _packed_buffers(module):
            yield buffer
        for parameter in module._parameters.values():
            for _, tensor in _beside(module, parameter):
                yield tensor


def is_packed(module: nn.Module, parameter: nn.Parameter) -> bool:
    """Whether bitsandbytes keeps tensors beside the parameter of `module`."""
    return not parameter.requires_grad and any(True for _ in _beside(module, parameter))


def packed_numel(module: nn.Module) -> int:
    """Return the elements of packed weights in the buffers of `module` and of the modules in it."""
    return sum(buffer.numel() for child in module.modules() for _, buffer in _packed_buffers(child))


def _of_module(path: str, module: nn.Module) -> Iterator[Carried]:
    prefix = f"{path}." if path else ""
    for name, buffer in _packed_buffers(module):
        yield Carried(prefix + name, buffer)
    for name, parameter in module._parameters.items():
        if parameter is None or parameter.requires_grad:
            continue
        for attribute, tensor in _beside(module, parameter):
            if _is_large(tensor):
                yield Carried(f"{prefix}{name}.{attribute}", tensor, parameter)
        for holder in (parameter, getattr(module, "state", None)) if hasattr(parameter, "CB") else ():
            if isinstance(alias := getattr(holder, "CB", None), torch.Tensor) and alias is not parameter:
                yield Carried(f"{prefix}{name}.CB", alias, parameter, is_alias=True)


def _packed_buffers(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the large buffers of a module that keeps its weights in them. It is told by a large saved buffer of a data
    type that is never trained: norm statistics and caches are floating-point, masks are not saved."""
    large = [
        (name, buffer)
        for name, buffer in module._buffers.items()
        if buffer is not None and _is_large(buffer) and name not in module._non_persistent_buffers_set
    ]
    if any(buffer.dtype not in TRAINED_DTYPES for _, buffer in large) and not isinstance(module, Rebuilt):
        yield from large


def _beside(module: nn.Module, parameter: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield names and tensors that bitsandbytes, or a tensor subclass, keeps beside a packed parameter."""
    state = getattr(parameter, "quant_state", None)
    if isinstance(module, ParametrizationList):  # a 3-D parameter of experts: its packed bytes are `original`
        state = next((getattr(each, "quant_state", None) for each in module), None)
        yield from (
            (name, buffer) for each in module if isinstance(each, Rebuilt) for name, buffer in each.named_buffers()
        )
    nested = getattr(state, "state2", None)
    places = [(state, "absmax"), (state, "code"), (state, "offset"), (nested, "absmax"), (nested, "code")]
    if hasattr(parameter, "SCB"):  # the first forward moves them from the parameter to the module
        places.append((parameter if parameter.SCB is not None else getattr(module, "state", None), "SCB"))
    for holder, attribute in places:
        tensor = getattr(holder, attribute, None)
        if isinstance(tensor, torch.Tensor):
            yield f"nested_{attribute}" if holder is nested else attribute, tensor


def _is_large(tensor: torch.Tensor) -> bool:
    return Carried("", tensor).nbytes >= LEAST_BYTES


def _can_move(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.is_contiguous()
