"""The blocks that `ds_slide.blocks` names: module paths of what holds them, or of themselves, patterns among them."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn

from ds_slide.errors import SlideConfigError
from ds_slide.model.layer_lists import (
    LayerList,
    Named,
    Ownership,
    can_be_block,
    children,
    find_lists,
    module_ids,
)

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
"""What stands for its elements."""


def named_lists(root: nn.Module, paths: Sequence[str], ownership: Ownership) -> list[LayerList]:
    """What `paths` name, in registration order."""
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
    """The rest of the sentence: what was probably meant."""
    lists = [each.path or layers[0] for each in find_lists(root, ownership, ()) for layers in each.layers]
    able = [each for each, module in modules.items() if each and (can_be_block(module) or _elements(each, module))]
    nearest = difflib.get_close_matches(path, dict.fromkeys(lists) or able, n=1, cutoff=0.0)
    return f'; did you mean "{nearest[0]}"?' if nearest else "; no module of it has parameters and a forward"
