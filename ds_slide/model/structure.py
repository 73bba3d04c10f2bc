"""What a model is made of: blocks (elements of its repeated layer lists) and outer modules (everything else).

A unit has one precision. A block of several (adapters in fp32 beside frozen weights in bf16) keeps the one that most of
its elements have; the others are its parts. So are those of its parameters whose gradients are compressed.

Found from the module tree alone: no forward, no trace. Parameters may be ZeRO-3 partitions (empty data, the real size
in `ds_numel` and `ds_shape`).
"""

from __future__ import annotations

import difflib
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from torch import nn

from ds_slide.errors import SlideConfigError
from ds_slide.model.precision import Precision

# Below this share of the model's parameters a list is not worth streaming: it is a classification head or a projector.
MIN_LIST_SHARE = 0.10
# An outer module with at least this many parameters of its own (a vocabulary matrix) is a unit by itself; the norms and
# biases that remain travel together in one.
LARGE_OUTER_NUMEL = 1_000_000

LIST_TYPES = (nn.ModuleList, nn.Sequential)

_Kind = tuple[type[nn.Module], tuple[tuple[int, ...], ...]]
_Named = list[tuple[str, nn.Parameter]]
PrecisionOf = Callable[[nn.Parameter], Precision]
IsCompressed = Callable[[nn.Parameter], bool]


def _never(_parameter: nn.Parameter) -> bool:
    return False


@dataclass(frozen=True, eq=False)
class UnitSpec:
    """What is moved and updated as one."""

    name: str
    """Module path of a block; "outer:<module path>" or "outer" for an outer module. Parts, and outer modules in another
    precision than the model's, have that in parentheses behind it."""
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
    compressed: bool = False
    """It is a part whose gradients leave the GPU compressed."""


@dataclass(frozen=True, eq=False)
class ModelStructure:
    """The units of a model; each Parameter object is in exactly one of them."""

    blocks: tuple[UnitSpec, ...]
    """Blocks of all layer lists in registration order (T5: encoder, then decoder)."""
    parts: tuple[UnitSpec, ...]
    """What blocks have in other precisions, one for each of these, and compressed."""
    outer_units: tuple[UnitSpec, ...]
    lists: tuple[str, ...]
    """Module paths of the layer lists; "" is the model itself."""

    @property
    def units(self) -> tuple[UnitSpec, ...]:
        """Outer modules, then blocks, then their parts."""
        return self.outer_units + self.blocks + self.parts


def parameter_numel(parameter: nn.Parameter) -> int:
    """Elements of the whole parameter, whether or not ZeRO-3 has partitioned it."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def parameter_shape(parameter: nn.Parameter) -> tuple[int, ...]:
    """Shape of the whole parameter, whether or not ZeRO-3 has partitioned it."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def find_structure(
    module: nn.Module,
    blocks: Literal["auto"] | Sequence[str] = "auto",
    apart: Collection[str] = (),
    undivided: Collection[nn.Module] = (),
    precision_of: PrecisionOf = Precision.declared,
    is_compressed: IsCompressed = _never,
) -> ModelStructure:
    """Split `module` into blocks and outer modules.

    A layer list is an nn.ModuleList or nn.Sequential with at least two layers of one kind that hold a substantial share
    of the model; of nested lists the outermost counts. A parameter that only one block can reach is that block's; one
    that is shared (between blocks, or with the rest of the model) is an outer module. A model without a layer list is
    one outer module.

    `blocks` names the layer lists by module path instead. Raises SlideConfigError when such a path is not one. `apart`:
    module paths whose own parameters, where they belong to an outer module, are a unit by themselves however few they
    are. `undivided`: modules whose lists are no layer lists: which of their layers run, and when, may differ between
    ranks. `is_compressed`: of a parameter of a block, in the precision of the block; the block keeps one at least.
    """
    ownership = _Ownership(module)
    lists = _find_lists(module, ownership, undivided) if blocks == "auto" else _named_lists(module, blocks, ownership)
    return _split(module, lists, ownership, apart, precision_of, is_compressed)


@dataclass(frozen=True)
class _LayerList:
    path: str
    layers: tuple[tuple[str, nn.Module], ...]
    """(module path, module) of every block."""


class _Ownership:
    """Which parameters can be reached through one module only.

    Counted over every path of the module tree, shared modules once per path: a parameter belongs to a module alone when
    all paths that lead to the parameter pass through that module. That covers tied parameters, submodules that are used
    in two places, and a second name for a whole block (which does not make the block shared).
    """

    def __init__(self, root: nn.Module) -> None:
        self.paths_to_parameter = _parameter_paths(root)
        self.paths_to_module = Counter(id(module) for _, module in root.named_modules(remove_duplicate=False))
        self.model_numel = sum(parameter_numel(parameter) for parameter in root.parameters())

    def exclusive(self, module: nn.Module) -> list[nn.Parameter]:
        """Parameters that can be reached through `module` only, each once, in registration order."""
        inside = _parameter_paths(module)
        times = self.paths_to_module[id(module)]
        return [p for p in module.parameters() if inside[id(p)] * times == self.paths_to_parameter[id(p)]]

    def share(self, modules: Sequence[nn.Module]) -> float:
        """Share of the model's parameters that belong to `modules` alone."""
        numel = sum(parameter_numel(parameter) for module in modules for parameter in self.exclusive(module))
        return numel / max(self.model_numel, 1)


def _parameter_paths(root: nn.Module) -> Counter[int]:
    """Number of paths from `root` to each parameter, by id."""
    return Counter(id(parameter) for _, parameter in root.named_parameters(remove_duplicate=False))


# Automatic discovery -------------------------------------------------------------------------------------------------


def _find_lists(root: nn.Module, ownership: _Ownership, undivided: Collection[nn.Module]) -> list[_LayerList]:
    """Layer lists of `root` in registration order, which reaches the outermost of nested lists first."""
    found: list[_LayerList] = []
    inside_blocks: set[int] = set()
    within = {id(inside) for module in undivided for layer in module.children() for inside in layer.modules()}
    for path, module in root.named_modules():
        layers = _repeated_layers(path, module, ownership) if isinstance(module, LIST_TYPES) else ()
        # Lists inside a block (experts, adapters) move with it, and a list that collects parts of known blocks a second
        # time is a view of them.
        inside = _module_ids(layers)
        if layers and inside_blocks.isdisjoint(inside) and within.isdisjoint(id(layer) for _, layer in layers):
            found.append(_LayerList(path, layers))
            inside_blocks.update(inside)
    return found


def _repeated_layers(path: str, module: nn.Module, ownership: _Ownership) -> tuple[tuple[str, nn.Module], ...]:
    """Children of a list that are blocks; empty when it is no layer list.

    Layers that occur once (an embedding or a head in one Sequential with the blocks) are not repeated and stay outer
    modules.
    """
    candidates = [(child_path, child) for child_path, child in _children(path, module) if _can_be_block(child)]
    # The same layer run several times (ALBERT style): its weights are needed all through the model.
    if len({id(child) for _, child in candidates}) < len(candidates):
        return ()
    kinds: dict[_Kind, list[nn.Module]] = defaultdict(list)
    for _, child in candidates:
        kinds[_kind(child)].append(child)
    repeated: set[int] = set()
    for members in kinds.values():
        # A composite layer seen twice is a repeated layer. A bare Linear or BatchNorm seen twice says little: it counts
        # only when it makes up a good part of the model.
        if len(members) >= 2 and (_is_composite(members[0]) or ownership.share(members) >= MIN_LIST_SHARE):
            repeated.update(id(member) for member in members)
    layers = tuple((child_path, child) for child_path, child in candidates if id(child) in repeated)
    return layers if ownership.share([child for _, child in layers]) >= MIN_LIST_SHARE else ()


def _kind(layer: nn.Module) -> _Kind:
    """Layers of one kind are repetitions of each other: the same class and, for a bare torch layer, the same shapes.

    Composite layers may differ in shapes (a dense first layer before the MoE ones).
    """
    if _is_composite(layer):
        return type(layer), ()
    return type(layer), tuple(parameter_shape(parameter) for parameter in layer.parameters())


def _is_composite(layer: nn.Module) -> bool:
    return any(True for _ in layer.children())


def _can_be_block(module: nn.Module) -> bool:
    """A block has parameters and is called as a module; ModuleList, ModuleDict and ParameterList cannot be called."""
    return type(module).forward is not nn.Module.forward and any(True for _ in module.parameters())


# Lists named in the configuration ------------------------------------------------------------------------------------


def _named_lists(root: nn.Module, paths: Sequence[str], ownership: _Ownership) -> list[_LayerList]:
    """Layer lists that `ds_slide.blocks` names, in registration order."""
    modules = dict(root.named_modules(remove_duplicate=False))
    found: list[_LayerList] = []
    inside_blocks: set[int] = set()
    for index, path in enumerate(paths):
        where = f'ds_slide.blocks[{index}]: "{path}"'
        module = modules.get(path)
        if not isinstance(module, LIST_TYPES):
            raise SlideConfigError(f"{where} {_not_a_list(path, modules)}")
        with_parameters = [(p, child) for p, child in _children(path, module) if any(True for _ in child.parameters())]
        layers = tuple((p, child) for p, child in with_parameters if ownership.exclusive(child))
        if not layers:
            raise SlideConfigError(f"{where} has no element with parameters of its own; name a list of layers")
        for child_path, child in with_parameters:
            if not _can_be_block(child):
                kind = type(child).__name__
                raise SlideConfigError(
                    f'{where} holds "{child_path}", a {kind} without forward; name that list instead'
                )
        if len({id(child) for _, child in with_parameters}) < len(with_parameters):
            raise SlideConfigError(f"{where} holds the same layer more than once; such a list cannot be streamed")
        if not inside_blocks.isdisjoint(_module_ids(layers)):
            raise SlideConfigError(f"{where} overlaps with a list named before it; name each layer once")
        found.append(_LayerList(path, layers))
        inside_blocks.update(_module_ids(layers))
    order = {path: position for position, path in enumerate(modules)}
    return sorted(found, key=lambda layer_list: order[layer_list.path])


def _not_a_list(path: str, modules: dict[str, nn.Module]) -> str:
    """The rest of the sentence: what `path` is, and the layer list that was probably meant."""
    lists = [candidate for candidate, module in modules.items() if isinstance(module, LIST_TYPES)]
    nearest = difflib.get_close_matches(path, lists, n=1, cutoff=0.0)
    meant = f'; did you mean "{nearest[0]}"?' if nearest else "; this model has none, leave ds_slide.blocks out"
    if path in modules:
        return f"is a {type(modules[path]).__name__}, not an nn.ModuleList or nn.Sequential{meant}"
    return f"is no module of this model{meant}"


# Units ---------------------------------------------------------------------------------------------------------------


def _split(
    root: nn.Module,
    lists: Sequence[_LayerList],
    ownership: _Ownership,
    apart: Collection[str],
    precision_of: PrecisionOf,
    is_compressed: IsCompressed,
) -> ModelStructure:
    """Hand every parameter to its block, to a part of that, or to an outer module."""
    layers = [layer for layer_list in lists for layer in layer_list.layers]
    block_of = {id(p): path for path, layer in layers for p in ownership.exclusive(layer)}
    of_block: dict[str, _Named] = defaultdict(list)
    of_outer: dict[str, _Named] = defaultdict(list)
    for name, parameter in root.named_parameters():
        if id(parameter) in block_of:
            of_block[block_of[id(parameter)]].append((name, parameter))
        else:
            of_outer[name.rpartition(".")[0]].append((name, parameter))

    model_precision = _main(_by_precision(list(root.named_parameters()), precision_of))
    outer_units: dict[str, _Named] = defaultdict(list)
    for path, parameters in of_outer.items():
        large = bool(layers) and bool(path) and _numel(parameters) >= LARGE_OUTER_NUMEL
        name = f"outer:{path}" if large or path in apart else "outer"
        for precision, same in _by_precision(parameters, precision_of).items():
            outer_units[name if precision == model_precision else _with(name, precision)].extend(same)

    # A block whose parameters are all shared has nothing to move.
    blocks: list[tuple[str, nn.Module, _Named]] = []
    parts: list[tuple[str, nn.Module, _Named]] = []
    compressed: list[tuple[str, nn.Module, _Named]] = []
    for path, layer in layers:
        if path in of_block:
            found = _by_precision(of_block[path], precision_of)
            main = _main(found)
            for precision, same in found.items():
                if precision == main:
                    matrices = {name: p for name, p in same if is_compressed(p)}
                    if len(matrices) == len(same):
                        del matrices[same[0][0]]  # a unit without parameters would have no place in the model
                    blocks.append((path, layer, [(name, p) for name, p in same if name not in matrices]))
                    if matrices:
                        compressed.append((f"{path} (compressed)", layer, list(matrices.items())))
                else:
                    parts.append((_with(path, precision), layer, same))
    return ModelStructure(
        blocks=_specs("block", blocks, precision_of),
        parts=tuple(
            replace(spec, compressed=spec.index >= len(parts))
            for spec in _specs("part", parts + compressed, precision_of)
        ),
        outer_units=_specs(
            "outer", [(name, None, parameters) for name, parameters in outer_units.items()], precision_of
        ),
        lists=tuple(layer_list.path for layer_list in lists),
    )


def _specs(
    kind: Literal["block", "part", "outer"],
    units: Sequence[tuple[str, nn.Module | None, _Named]],
    precision_of: PrecisionOf,
) -> tuple[UnitSpec, ...]:
    return tuple(
        UnitSpec(name, kind, index, module, tuple(parameters), _numel(parameters), precision_of(parameters[0][1]))
        for index, (name, module, parameters) in enumerate(units)
    )


def _by_precision(parameters: _Named, precision_of: PrecisionOf) -> dict[Precision, _Named]:
    found: dict[Precision, _Named] = defaultdict(list)
    for name, parameter in parameters:
        found[precision_of(parameter)].append((name, parameter))
    return found


def _main(found: dict[Precision, _Named]) -> Precision | None:
    """What most elements have, of two with as many the one that comes first; None without parameters."""
    return max(found, key=lambda precision: _numel(found[precision]), default=None)


def _with(name: str, precision: Precision) -> str:
    return f"{name} ({precision.label})"


def _numel(parameters: Sequence[tuple[str, nn.Parameter]]) -> int:
    return sum(parameter_numel(parameter) for _, parameter in parameters)


def _children(path: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """(module path, module) of the direct children; unlike named_children(), a child that occurs twice comes twice."""
    for name, child in module._modules.items():
        if child is not None:
            yield f"{path}.{name}" if path else name, child


def _module_ids(layers: Sequence[tuple[str, nn.Module]]) -> set[int]:
    return {id(module) for _, layer in layers for module in layer.modules()}
