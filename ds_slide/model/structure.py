"""The units of a model: blocks (its repeated layers) and outer modules (everything else).

A unit has one precision. A block with several (adapters in fp32 beside frozen weights in bf16) keeps the precision of
most of its elements. Parameters in the others are its parts, and so are parameters whose gradients are compressed.
Frozen parameters of a data type that is never trained (packed 4-bit weights, int8, fp8, ...) are no part: they move
with their block as bytes.

The module tree alone tells the units: no forward, no trace. Parameters may be ZeRO-3 partitions (empty data, the real
size in `ds_numel` and `ds_shape`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

import torch
from torch import nn

from ds_slide.model.carried import TRAINED_DTYPES, Carried, find_carried
from ds_slide.model.layer_lists import LayerList, Ownership, find_lists, named_lists
from ds_slide.model.layer_lists import parameter_numel as parameter_numel
from ds_slide.model.layer_lists import parameter_shape as parameter_shape


@dataclass(frozen=True)
class Precision:
    """The data types and the update rule of all parameters of a unit."""

    parameter: torch.dtype
    """The data type that the model declares, and that a script sees outside of a forward."""
    weight: torch.dtype
    """The data type of the weights that the GPU computes with."""
    gradient: torch.dtype | None = None
    """The data type of gradients when they are reduced and go to host memory; None: the run's data type."""
    rule: str = ""
    """The name of the update rule, where it is another one than most parameters of the model have."""

    @classmethod
    def declared(cls, parameter: torch.Tensor) -> Precision:
        """Return the precision of weights that keep the model's own data type."""
        return cls(parameter.dtype, parameter.dtype)

    @property
    def narrowed(self) -> bool:
        """Whether the weights are shorter than the parameters. The master then begins as the parameter's exact value,
        and a script reads and writes the master."""
        return self.weight is not self.parameter

    @property
    def label(self) -> str:
        """A part of the names of units."""
        kept = f" in {_name(self.weight)}" if self.narrowed else ""
        reduced = f", gradients in {_name(self.gradient)}" if self.gradient not in (None, self.weight) else ""
        updated = f", updated by {self.rule}" if self.rule else ""
        return f"{_name(self.parameter)}{kept}{reduced}{updated}"


def _name(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")


# An outer module with at least this many parameters of its own (a vocabulary matrix) is a unit by itself; the norms and
# biases that remain travel together in one.
LARGE_OUTER_NUMEL = 1_000_000

BYTES = Precision(torch.uint8, torch.uint8)
"""The precision of frozen parameters of other data types. A unit in this precision is an array of bytes."""

_Named = list[tuple[str, nn.Parameter]]
_Unit = tuple[str, nn.Module | None, _Named, Precision]
"""Name, module, parameters and precision of a unit."""
Precisions = Mapping[nn.Parameter, Precision]
"""The precisions of parameters that do not keep the data type which they declare."""


@dataclass(frozen=True, eq=False)
class UnitSpec:
    """Parameters that are moved and updated together."""

    name: str
    """Module path of a block; "outer:<module path>" or "outer" for an outer module. Parts, and outer modules in another
    precision than the model's, add the precision in parentheses."""
    kind: Literal["block", "part", "outer"]
    index: int
    """Position among the units of the same kind, in registration order."""
    module: nn.Module | None
    """The module of the block, or of the block that it is a part of; None for outer modules."""
    parameters: tuple[tuple[str, nn.Parameter], ...]
    """(name in `named_parameters()`, parameter) in registration order."""
    numel: int
    """Elements of the whole (unpartitioned) parameters."""

    precision: Precision
    """The data types of all its parameters."""
    as_bytes: frozenset[str] = frozenset()
    """Names of the frozen parameters that it keeps as bytes, in data types of their own."""
    carried: tuple[Carried, ...] = ()
    """Other frozen tensors that move with a block."""
    compressed: bool = False
    """Whether it is a part whose gradients leave the GPU compressed."""


@dataclass(frozen=True, eq=False)
class ModelStructure:
    """The units of a model; each Parameter object is in exactly one unit."""

    blocks: tuple[UnitSpec, ...]
    """Blocks of all layer lists in registration order (T5: encoder, then decoder)."""
    parts: tuple[UnitSpec, ...]
    """Parts of blocks: one for each further precision of a block, then the compressed parts."""
    outer_units: tuple[UnitSpec, ...]
    lists: tuple[str, ...]
    """Module paths of the modules that hold the blocks, mostly layer lists; "" is the model itself."""

    @property
    def units(self) -> tuple[UnitSpec, ...]:
        """Outer modules, then blocks, then their parts."""
        return self.outer_units + self.blocks + self.parts


def find_structure(
    module: nn.Module,
    blocks: Literal["auto"] | Sequence[str] = "auto",
    apart: Collection[str] = (),
    undivided: Collection[nn.Module] = (),
    precisions: Precisions = MappingProxyType({}),
    compressed: Collection[nn.Parameter] = (),
    *,
    carries_buffers: bool = True,
) -> ModelStructure:
    """Split `module` into blocks and outer modules.

    Blocks are layers that repeat and hold a substantial share of the model, wherever they are (`layer_lists`). A
    parameter that only one block can reach belongs to that block. A parameter that is shared (between blocks, or with
    the rest of the model) belongs to an outer module. A model without such layers is one outer module.

    `blocks`: module paths that name the blocks instead. Raises SlideConfigError for a path that names none. `apart`:
    module paths of outer modules whose own parameters are a unit by themselves, even if they are few. `undivided`:
    modules whose lists are no layer lists: ranks may run different layers of them, at different times. `compressed`:
    parameters whose gradients are compressed, where they are in a block and in its precision. The block keeps at least
    one parameter. `carries_buffers`: whether packed weights in buffers move with their blocks.
    """
    ownership = Ownership(module)
    lists = find_lists(module, ownership, undivided) if blocks == "auto" else named_lists(module, blocks, ownership)
    return _Split(ownership, frozenset(apart), precisions, frozenset(compressed), carries_buffers).of(module, lists)


# Units ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Split:
    """Hands every parameter to its block, to a part of the block, or to an outer module."""

    ownership: Ownership
    apart: frozenset[str]
    precisions: Precisions
    compressed: frozenset[nn.Parameter]
    carries_buffers: bool

    def of(self, root: nn.Module, lists: Sequence[LayerList]) -> ModelStructure:
        layers = [layer for layer_list in lists for layer in layer_list.layers]
        block_of = {id(p): path for path, layer in layers for p in self.ownership.exclusive(layer)}
        of_block: dict[str, _Named] = defaultdict(list)
        of_outer: dict[str, _Named] = defaultdict(list)
        for name, parameter in root.named_parameters():
            if id(parameter) in block_of:
                of_block[block_of[id(parameter)]].append((name, parameter))
            else:
                of_outer[name.rpartition(".")[0]].append((name, parameter))

        by_precision = self._by_precision(list(root.named_parameters()))
        by_precision.pop(BYTES, None)
        model_precision = _main(by_precision)
        outer_units: dict[tuple[str, Precision], _Named] = defaultdict(list)
        for path, parameters in of_outer.items():
            large = bool(layers) and bool(path) and _numel(parameters) >= LARGE_OUTER_NUMEL
            name = f"outer:{path}" if large or path in self.apart else "outer"
            for precision, same in self._by_precision(parameters).items():
                full_name = name if precision == model_precision else _with(name, precision)
                outer_units[full_name, precision].extend(same)

        # A block whose parameters are all shared has nothing to move.
        blocks: list[_Unit] = []
        parts: list[_Unit] = []
        compressed: list[_Unit] = []
        carried = self._carried(root, layers)
        for path, layer in layers:
            found, main = self._of_block(of_block.get(path, []), sum(each.nbytes for each in carried[path]))
            for precision, same in found.items():
                if precision != main:
                    parts.append((_with(path, precision), layer, same, precision))
                    continue
                matrices = {name: p for name, p in same if p in self.compressed}
                if len(matrices) == len(same):
                    del matrices[same[0][0]]  # a unit without parameters would have no place in the model
                blocks.append((path, layer, [(name, p) for name, p in same if name not in matrices], precision))
                if matrices:
                    compressed.append((f"{path} (compressed)", layer, list(matrices.items()), precision))
        return ModelStructure(
            blocks=tuple(replace(spec, carried=carried[spec.name]) for spec in self._specs("block", blocks)),
            parts=tuple(
                replace(spec, compressed=spec.index >= len(parts)) for spec in self._specs("part", parts + compressed)
            ),
            outer_units=self._specs(
                "outer", [(name, None, parameters, precision) for (name, precision), parameters in outer_units.items()]
            ),
            lists=tuple(layer_list.path for layer_list in lists),
        )

    def _of_block(self, parameters: _Named, carried_bytes: int) -> tuple[dict[Precision, _Named], Precision | None]:
        """Return the parameters of a block by precision, and the precision of the block. What moves as bytes is with
        the parameters of the block's own precision. `carried_bytes`: of the tensors that are no parameters."""
        found = self._by_precision(parameters)
        packed = found.pop(BYTES, [])
        main = _main(found)
        if not packed and not carried_bytes:
            return found, main
        joining = {id(p) for _, p in parameters if not p.requires_grad and (not packed or _is_large(p))}
        joining |= {id(p) for _, p in packed}
        if main is None or (joining and _nbytes(packed) + carried_bytes >= _nbytes(found[main])):
            main = BYTES
        divided: dict[Precision, _Named] = defaultdict(list)
        for name, parameter in parameters:
            joins = id(parameter) in joining
            divided[main if joins else self._precision_of(parameter)].append((name, parameter))
        return divided, main

    def _carried(self, root: nn.Module, layers: Sequence[tuple[str, nn.Module]]) -> dict[str, tuple[Carried, ...]]:
        """Return the tensors that move with each block, by its path."""
        found = find_carried(root)
        return {
            path: tuple(
                each
                for child in layer.modules()
                for each in found.get(child, ())
                if (each.of is not None or self.carries_buffers) and self.ownership.paths_to_module[id(child)] == 1
            )
            for path, layer in layers
        }

    def _specs(self, kind: Literal["block", "part", "outer"], units: Sequence[_Unit]) -> tuple[UnitSpec, ...]:
        return tuple(
            UnitSpec(
                name,
                kind,
                index,
                module,
                tuple(parameters),
                _numel(parameters),
                precision,
                as_bytes=frozenset(
                    each for each, p in parameters if precision == BYTES or self._precision_of(p) != precision
                ),
            )
            for index, (name, module, parameters, precision) in enumerate(units)
        )

    def _by_precision(self, parameters: _Named) -> dict[Precision, _Named]:
        found: dict[Precision, _Named] = defaultdict(list)
        for name, parameter in parameters:
            found[self._precision_of(parameter)].append((name, parameter))
        return found

    def _precision_of(self, parameter: nn.Parameter) -> Precision:
        if parameter.dtype not in TRAINED_DTYPES and not parameter.requires_grad:
            return BYTES
        return self.precisions.get(parameter) or Precision.declared(parameter)


def _main(found: dict[Precision, _Named]) -> Precision | None:
    """Return the precision of most elements, the first one where two are equal; None without parameters."""
    return max(found, key=lambda precision: _numel(found[precision]), default=None)


def _nbytes(parameters: _Named) -> int:
    return sum(parameter_numel(parameter) * parameter.dtype.itemsize for _, parameter in parameters)


def _is_large(parameter: nn.Parameter) -> bool:
    """Whether a frozen floating-point parameter moves with the packed weights of its block, as bytes. Smaller ones
    (norms, biases, scales) are parts and stay on the GPU, so that they can be unfrozen."""
    return parameter_numel(parameter) >= 1 << 16


def _with(name: str, precision: Precision) -> str:
    return f"{name} ({precision.label})"


def _numel(parameters: Sequence[tuple[str, nn.Parameter]]) -> int:
    return sum(parameter_numel(parameter) for _, parameter in parameters)
