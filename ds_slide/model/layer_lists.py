"""Finds the layers of a model that repeat, whatever holds them.

Mostly an nn.ModuleList or an nn.Sequential holds them. Other layers of one class in one place are found as well: in an
nn.ModuleDict, as attributes (`layer1`, `layer2`, ...), or in lists inside a list, for instance pairs of attention and
feed-forward. The module tree alone tells them.
"""

from __future__ import annotations

import difflib
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from ds_slide.errors import SlideConfigError
from ds_slide.model.carried import packed_numel

# Below this share of the model's parameters a list is not worth streaming: it is a classification head or a projector.
MIN_LIST_SHARE = 0.10

LIST_TYPES = (nn.ModuleList, nn.Sequential)
EXPERTS = "expert"
"""A list with this in its name never replaces the layers around it: the data decides which of its layers run."""

Named = tuple[tuple[str, nn.Module], ...]
"""(module path, module) of each."""


@dataclass(frozen=True)
class LayerList:
    """Blocks, and the module path of the module that holds them."""

    path: str
    layers: Named


def parameter_numel(parameter: nn.Parameter) -> int:
    """Elements of the whole parameter, whether or not ZeRO-3 has partitioned it."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def parameter_shape(parameter: nn.Parameter) -> tuple[int, ...]:
    """Shape of the whole parameter, whether or not ZeRO-3 has partitioned it."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


class Ownership:
    """Which parameters can be reached through one module only.

    All paths of the module tree count, and shared modules count once per path. A parameter belongs to a module alone
    when all paths that lead to the parameter pass through that module. This covers tied parameters, submodules that are
    used in two places, and a second name for a whole block (which does not make the block shared).
    """

    def __init__(self, root: nn.Module) -> None:
        self.paths_to_parameter = _parameter_paths(root)
        self.paths_to_module = Counter(id(module) for _, module in root.named_modules(remove_duplicate=False))
        self.model_numel = sum(parameter_numel(parameter) for parameter in root.parameters()) + packed_numel(root)

    def exclusive(self, module: nn.Module) -> list[nn.Parameter]:
        """Return the parameters that can be reached through `module` only, each once, in registration order."""
        inside = _parameter_paths(module)
        times = self.paths_to_module[id(module)]
        return [p for p in module.parameters() if inside[id(p)] * times == self.paths_to_parameter[id(p)]]

    def numel(self, module: nn.Module) -> int:
        """Return the elements of the parameters that belong to `module` alone, and of packed weights in its buffers."""
        return sum(parameter_numel(parameter) for parameter in self.exclusive(module)) + packed_numel(module)

    def share(self, modules: Sequence[nn.Module]) -> float:
        """Return the share of the model's parameters that belong to `modules` alone."""
        return sum(map(self.numel, modules)) / max(self.model_numel, 1)


def _parameter_paths(root: nn.Module) -> Counter[int]:
    """Number of paths from `root` to each parameter, by id."""
    return Counter(id(parameter) for _, parameter in root.named_parameters(remove_duplicate=False))


def find_lists(root: nn.Module, ownership: Ownership, undivided: Collection[nn.Module]) -> list[LayerList]:
    """Return the layer lists of `root` in registration order."""
    within = {id(inside) for module in undivided for layer in module.children() for inside in layer.modules()}
    return _Search(ownership, within).below("", root)


class _Search:
    """One walk through the modules of a model, each visited once, under its first path."""

    def __init__(self, ownership: Ownership, within: Collection[int]) -> None:
        """Make a walk. `within`: modules, by id, that are no blocks."""
        self._ownership = ownership
        self._within = within
        self._visited: set[int] = set()
        self._inside_blocks: set[int] = set()

    def below(self, path: str, module: nn.Module) -> list[LayerList]:
        """Return the layer lists of `module` and of the modules in it, the outermost first."""
        if id(module) in self._visited:
            return []
        self._visited.add(id(module))
        if isinstance(module, LIST_TYPES) and self._are_free(layers := _repeated_layers(path, module, self._ownership)):
            self._inside_blocks |= module_ids(layers)
            return [LayerList(path, layers), *self._in_children(path, module)]
        siblings = _siblings(path, module)
        may_be_blocks = self._are_free(siblings) and self._share(siblings) >= MIN_LIST_SHARE
        found = self._in_children(path, module)
        if not may_be_blocks:
            return found
        taken = module_ids(siblings)
        inside = [each for each in found if not taken.isdisjoint(module_ids(each.layers))]
        if not self._are_better(siblings, inside, path):
            return found
        self._inside_blocks |= taken
        return [LayerList(path, siblings), *(each for each in found if each not in inside)]

    def _in_children(self, path: str, module: nn.Module) -> list[LayerList]:
        return [found for child_path, child in children(path, module) for found in self.below(child_path, child)]

    def _are_free(self, layers: Named) -> bool:
        """Whether the layers share nothing with other blocks. Experts and adapters in a block move with it, and a list
        that collects parts of known blocks a second time is a view."""
        return (
            bool(layers)
            and self._inside_blocks.isdisjoint(module_ids(layers))
            and all(id(layer) not in self._within for _, layer in layers)
        )

    def _share(self, layers: Named) -> float:
        return self._ownership.share([layer for _, layer in layers])

    def _are_better(self, siblings: Named, inside: Sequence[LayerList], path: str) -> bool:
        """Whether `siblings` as blocks need less on the GPU at once than the lists inside them as blocks. Two of the
        largest blocks have to be there, and all that is in no block. Two towers of one class, each with a list of
        layers, are no blocks. Stages are none where the last stage is most of the model."""
        sizes = [self._ownership.numel(layer) for _, layer in siblings]
        whole, at_once = sum(sizes), 2 * max(sizes)
        layers = [layer for each in inside if not _holds_experts(each.path, path) for _, layer in each.layers]
        if not layers:
            return at_once < whole or (at_once == whole and _are_numbered(siblings, path))
        inner_sizes = [self._ownership.numel(layer) for layer in layers]
        return at_once < whole - sum(inner_sizes) + 2 * max(inner_sizes)


def _holds_experts(path: str, above: str) -> bool:
    return EXPERTS in path[len(above) :].lower()


# Lists of layers ------------------------------------------------------------------------------------------------------


def _repeated_layers(path: str, module: nn.Module, ownership: Ownership) -> Named:
    """Return the children of a list that are blocks; empty when it is no layer list.

    Layers that occur once (an embedding or a head in one Sequential with the blocks) are not repeated and stay outer
    modules.
    """
    candidates = [(child_path, child) for child_path, child in children(path, module) if can_be_block(child)]
    # The same layer run several times (ALBERT style): its weights are needed all through the model.
    if len({id(child) for _, child in candidates}) < len(candidates):
        return ()
    kinds: dict[Any, list[nn.Module]] = defaultdict(list)
    for _, child in candidates:
        kinds[_kind(child)].append(child)
    repeated: set[int] = set()
    for members in kinds.values():
        # A composite layer seen twice is a repeated layer. A bare Linear or BatchNorm may occur twice by chance: it
        # counts only when it makes up a good part of the model.
        if len(members) >= 2 and (_is_composite(members[0]) or ownership.share(members) >= MIN_LIST_SHARE):
            repeated.update(id(member) for member in members)
    layers = tuple((child_path, child) for child_path, child in candidates if id(child) in repeated)
    return layers if ownership.share([child for _, child in layers]) >= MIN_LIST_SHARE else ()


def _kind(layer: nn.Module) -> Any:
    """Return the kind of a layer: its class and, for a bare torch layer, its shapes. Layers of one kind are
    repetitions.

    Composite layers may differ in shapes (a dense first layer before the MoE ones).
    """
    if _is_composite(layer):
        return type(layer)
    return type(layer), tuple(parameter_shape(parameter) for parameter in layer.parameters())


def _is_composite(layer: nn.Module) -> bool:
    return any(True for _ in layer.children())


def can_be_block(module: nn.Module) -> bool:
    """Whether a module has parameters and can be called; ModuleList, ModuleDict and ParameterList cannot."""
    return type(module).forward is not nn.Module.forward and any(True for _ in module.parameters())


# Layers beside each other, in whatever holds them ---------------------------------------------------------------------


def _siblings(path: str, module: nn.Module) -> Named:
    """Return the composite layers in `module` whose class occurs at least twice."""
    candidates = [each for each in _called(path, module) if _is_composite(each[1])]
    times = Counter(id(layer) for _, layer in candidates)
    kinds = Counter(_class_of(layer) for _, layer in candidates if times[id(layer)] == 1)
    return tuple((each, layer) for each, layer in candidates if times[id(layer)] == 1 and kinds[_class_of(layer)] >= 2)


def _called(path: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the children of `module` that are called, and the called modules in its lists. A model's own lists are
    searched by themselves: their modules count only where several lists have numbers in their names."""
    direct = [(child_path, child) for child_path, child in children(path, module)]
    lists = [each for each in direct if _is_plain_list(each[1])]
    opened = _is_plain_list(module) or (len(lists) >= 2 and _are_numbered(tuple(lists), path))
    for child_path, child in direct:
        if can_be_block(child):
            yield child_path, child
        elif opened and _is_plain_list(child):
            yield from _called(child_path, child)


def _is_plain_list(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList | nn.ModuleDict) and type(module).forward is nn.Module.forward


def _class_of(layer: nn.Module) -> Any:
    """Return the class of a layer. An nn.Sequential may be anything, so the classes in it count, too."""
    return type(layer), tuple(map(type, layer.children())) if isinstance(layer, nn.Sequential) else ()


def _are_numbered(layers: Named, path: str) -> bool:
    """Whether all layers have numbers in their names below `path`."""
    return all(any(map(str.isdigit, each[len(path) :])) for each, _ in layers)


# Modules --------------------------------------------------------------------------------------------------------------


def children(path: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield (module path, module) of the direct children. Unlike in named_children(), a child that occurs twice comes
    twice."""
    for name, child in module._modules.items():
        if child is not None:
            yield f"{path}.{name}" if path else name, child


def module_ids(layers: Named) -> set[int]:
    return {id(module) for _, layer in layers for module in layer.modules()}


# ----------------------------------------------------------------------------------------------------------------------
# The blocks that `ds_slide.blocks` names: paths of modules that hold blocks, or of blocks, with patterns allowed.

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
"""Modules that stand for their elements."""


def named_lists(root: nn.Module, paths: Sequence[str], ownership: Ownership) -> list[LayerList]:
    """Return the blocks that `paths` name, in registration order."""
    modules = dict(root.named_modules(remove_duplicate=False))
    found: list[LayerList] = []
    inside_blocks: set[int] = set()
    for index, path in enumerate(paths):
        where = f'ds_slide.blocks[{index}]: "{path}"'
        matched = [each for each in modules if each and _matches(each, path)]
        if not matched:
            raise SlideConfigError(f"{where} is no module of this model{_meant(root, path, modules, ownership)}")
        for each in matched:
            layer_list = _layers_of(where, each, modules[each], ownership)
            if not inside_blocks.isdisjoint(module_ids(layer_list.layers)):
                raise SlideConfigError(f"{where} overlaps with what is named before it; name each layer once")
            inside_blocks |= module_ids(layer_list.layers)
            found.append(layer_list)
    _check_is_no_whole_model(root, found, ownership)
    order = {path: position for position, path in enumerate(modules)}
    return sorted(found, key=lambda layer_list: order[layer_list.layers[0][0]])


def _check_is_no_whole_model(root: nn.Module, found: Sequence[LayerList], ownership: Ownership) -> None:
    """Refuse one block that holds all layers: there would be nothing to move beside it."""
    named = [layer for layer_list in found for layer in layer_list.layers]
    if len(named) != 1:
        return
    ((path, module),) = named
    lists = [each.path for each in find_lists(root, ownership, ())]
    if lists and all(each.startswith(f"{path}.") for each in lists):
        kind = type(module).__name__
        raise SlideConfigError(f'ds_slide.blocks names "{path}" alone, a {kind}; name "{lists[0]}", its layers')


def _matches(path: str, pattern: str) -> bool:
    """Whether each part of a module path matches the same part of the pattern."""
    parts, patterns = path.split("."), pattern.split(".")
    return len(parts) == len(patterns) and all(map(fnmatchcase, parts, patterns))


def _layers_of(where: str, path: str, module: nn.Module, ownership: Ownership) -> LayerList:
    """Return the modules that a path stands for: the module, or the elements of a container and of containers in it."""
    if not isinstance(module, CONTAINERS):
        if not can_be_block(module):
            kind = type(module).__name__
            lacks = "parameters" if type(module).forward is not nn.Module.forward else "a forward"
            raise SlideConfigError(f'{where} names "{path}", a {kind} without {lacks}; name layers, or a list of them')
        layers: Named = ((path, module),)
    else:
        layers = _elements(path, module)
        if len({id(layer) for _, layer in layers}) < len(layers):
            raise SlideConfigError(f"{where} holds the same layer more than once; such a list cannot be streamed")
    own = tuple(each for each in layers if ownership.exclusive(each[1]))
    if not own:
        raise SlideConfigError(f"{where} has no element with parameters of its own; name a list of layers")
    is_itself = own[0][0] == path
    return LayerList(path.rpartition(".")[0] if is_itself else path, own)


def _elements(path: str, container: nn.Module) -> Named:
    found: list[tuple[str, nn.Module]] = []
    for child_path, child in children(path, container):
        if can_be_block(child):
            found.append((child_path, child))
        elif isinstance(child, CONTAINERS):
            found += _elements(child_path, child)
    return tuple(found)


def _meant(root: nn.Module, path: str, modules: dict[str, nn.Module], ownership: Ownership) -> str:
    """Return the rest of the sentence, which names what was probably meant."""
    lists = [each.path or layers[0] for each in find_lists(root, ownership, ()) for layers in each.layers]
    able = [each for each, module in modules.items() if each and (can_be_block(module) or _elements(each, module))]
    nearest = difflib.get_close_matches(path, dict.fromkeys(lists) or able, n=1, cutoff=0.0)
    return f'; did you mean "{nearest[0]}"?' if nearest else "; no module of it has parameters and a forward"
