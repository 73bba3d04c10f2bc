"""The optimizer's parameter groups, and parameters that join them later.

A parameter joins when it requires a gradient and did not when the engine was built, or was not in the model then. A
unit's parameter gets optimizer states at the next forward. A parameter that was put into the model since belongs to no
unit, and would never train: an error names it. torch reports every parameter and module that is registered, so the
model is walked only after a registration. Each forward reads only `requires_grad` of frozen parameters (30 ns each).
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from deepspeed.utils import z3_leaf_module
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from ds_slide.checkpoint.subgroups import SubGroups
from ds_slide.errors import SlideError
from ds_slide.integration.parameters import ParameterProtocol
from ds_slide.optim.rule import UpdateRule
from ds_slide.runtime.core.context import AS_THEY_ARE
from ds_slide.runtime.engine import SlideRuntime
from ds_slide.runtime.unfreezing import give_states


class ParameterGroups:
    """The parameter groups of ZeRO-3's optimizer, cut into sub-groups. SlideZeroOptimizer inherits them."""

    module: nn.Module
    optimizer: Any
    runtime: SlideRuntime
    protocol: ParameterProtocol
    rule: UpdateRule
    _create_fp16_sub_groups: Any
    _get_trainable_parameter_groups: Any

    def _take_groups(self) -> None:
        self._given: list[list[nn.Parameter]] = [list(group["params"]) for group in self.optimizer.param_groups]
        """The groups as the script has made them, frozen parameters included."""
        self._model_order = {parameter: number for number, parameter in enumerate(self.module.parameters())}
        self._cut_into_sub_groups(self._get_trainable_parameter_groups())

    def _cut_into_sub_groups(self, trainable: list[dict[str, Any]]) -> None:
        self.trainable_param_groups = trainable
        self.fp16_groups, self._group_ids = [], []
        for group in self.trainable_param_groups:
            for sub_group in self._create_fp16_sub_groups(group["params"]):
                self.fp16_groups.append(sub_group)
                self._group_ids.append(group["_ds_source_param_group_id"])
        self.sub_group_to_group_id = dict(enumerate(self._group_ids))

    def _group_of(self) -> dict[nn.Parameter, int]:
        """Return the optimizer group of each trainable parameter."""
        of_each = zip(self.fp16_groups, self._group_ids, strict=True)
        return {parameter: group_id for parameters, group_id in of_each for parameter in parameters}

    def _empty_parameter_groups(self) -> None:
        # As in stock: the optimizer object carries hyper-parameters for schedulers, never tensors.
        for group in self.optimizer.param_groups:
            group["params"] = []
        # A group that is added to the script's own object would never be updated.
        self.optimizer.add_param_group = _refuse_group

    def train_later(self, parameters: Sequence[nn.Parameter]) -> None:
        """Give these parameters, which were frozen at first, optimizer states, and a place in the sub-groups."""
        groups = {parameter: self._index_of(parameter) for parameter in parameters}
        give_states(self.runtime, groups)
        self.protocol.refresh()
        self._cut_into_sub_groups(self._with_later(groups))
        self._serve_sub_groups()

    def _index_of(self, parameter: nn.Parameter) -> int:
        """Return the group of a parameter that is trained from now on. SlideError where it is not known."""
        for index, group in enumerate(self._given):
            if any(each is parameter for each in group):
                return index
        if len(self._given) == 1:
            return 0
        raise SlideError(
            f"parameter {self.protocol.places[parameter][1].name} requires a gradient since deepspeed.initialize, but "
            f"is in none of the optimizer's {len(self._given)} parameter groups; put it into one before "
            "deepspeed.initialize, where it may be frozen"
        )

    def _with_later(self, later: Mapping[nn.Parameter, int]) -> list[dict[str, Any]]:
        """Return DeepSpeed's groups of trained parameters, with the parameters `later`. The order is as in an engine
        that trains them from the start, so that such an engine can load a checkpoint of this one."""
        by_index = {group["_ds_source_param_group_id"]: dict(group) for group in self.trainable_param_groups}
        for index in sorted(set(later.values())):
            group = by_index.setdefault(index, {"params": [], "_ds_source_param_group_id": index})
            members = {*group["params"], *(parameter for parameter, owner in later.items() if owner == index)}
            group["params"] = self._in_order(self._given[index], members)
        return [by_index[index] for index in sorted(by_index)]

    def _in_order(self, given: Sequence[nn.Parameter], members: set[nn.Parameter]) -> list[nn.Parameter]:
        known = [parameter for parameter in given if parameter in members]
        others = sorted(members - set(known), key=self._model_order.__getitem__)
        places = [self._model_order.get(parameter, -1) for parameter in known]
        if places == sorted(places):
            return sorted(members, key=self._model_order.__getitem__)
        return [*known, *others]

    def _serve_sub_groups(self) -> None:
        self.sub_groups = SubGroups(self.fp16_groups, self._group_ids, self.protocol.places, self.runtime, self.rule)

    @property
    def leaf_parameters(self) -> dict[nn.Module, list[nn.Parameter]]:
        """Trainable parameters by the module that `deepspeed.utils.set_z3_leaf_modules` has flagged, the outermost of
        nested modules."""
        owner: dict[nn.Parameter, nn.Module] = {}
        for leaf in filter(z3_leaf_module, self.module.modules()):
            for parameter in leaf.parameters():
                owner.setdefault(parameter, leaf)
        found: dict[nn.Module, list[nn.Parameter]] = defaultdict(list)
        for parameter in chain.from_iterable(self.fp16_groups):
            if parameter in owner:
                found[owner[parameter]].append(parameter)
        return found

    def add_param_group(self, param_group: Any) -> None:
        """Refuse: the places of all states were planned when the engine started."""
        _refuse_group(param_group)


def _refuse_group(param_group: Any) -> None:
    raise SlideError(
        f"add_param_group() of {len(list(param_group['params']))} parameters is refused, because DS-Slide has planned "
        "its memory for the groups that deepspeed.initialize was given; give it all groups, as model_parameters or in "
        "the optimizer, or call deepspeed.initialize of the model again"
    )


class Newcomers:
    """Looks for parameters that join, before each forward with gradients (`ds_slide.runtime.engine.Newcomers`)."""

    def __init__(self, groups: ParameterGroups) -> None:
        self._groups = groups
        self._module = groups.module
        self._places = groups.protocol.places
        self._frozen = [parameter for parameter in self._places if not parameter.requires_grad]
        """Frozen parameters without states. A parameter that requires a gradient from the start and is in no group of
        the optimizer is left out: plain torch does not update it either."""
        self._strangers: list[tuple[str, nn.Parameter]] = []
        """Parameters of the model that belong to no unit."""
        self._modules: set[int] = set()
        self._has_changed = True
        itself = weakref.ref(self)

        def note(changed: nn.Module, _name: str, _new: Any) -> None:
            newcomers = itself()
            if newcomers is not None and id(changed) in newcomers._modules:
                newcomers._has_changed = True

        handles = [register_module_parameter_registration_hook(note), register_module_module_registration_hook(note)]
        # The hooks are for all modules of the process: they go with an engine that is dropped, too.
        self._end = weakref.finalize(self, _remove, handles)
        self._leave_out_trained()

    def look(self) -> None:
        """Give optimizer states to parameters that require a gradient now. SlideError for a parameter in no unit."""
        self._walk()
        with AS_THEY_ARE():
            for name, parameter in self._strangers:
                if parameter.requires_grad:
                    raise _is_in_no_unit(name, parameter)
            on = [parameter for parameter in self._frozen if parameter.requires_grad]
        if on:
            self._groups.train_later(on)
            self._leave_out_trained()

    def require_no_gradient(self) -> None:
        """Raise SlideError at a step for a gradient of a parameter that no forward of the whole model has seen."""
        self._walk()
        for name, parameter in self._strangers:
            if parameter.grad is not None:
                raise _is_in_no_unit(name, parameter)
        for parameter in self._frozen:
            if parameter.requires_grad and parameter.grad is not None:
                raise SlideError(
                    f"parameter {self._places[parameter][1].name} has a gradient, but was frozen when the engine was "
                    "built, and no forward of the whole model has begun since it requires one; call engine(...), "
                    "which makes its optimizer states, instead of a part of the model"
                )

    def close(self) -> None:
        """Remove the hooks on registrations."""
        self._end()

    def _leave_out_trained(self) -> None:
        self._frozen = [parameter for parameter in self._frozen if not self._places[parameter][1].trainable]

    def _walk(self) -> None:
        if self._has_changed:
            self._has_changed = False
            self._modules = {id(module) for module in self._module.modules()}
            self._strangers = [each for each in self._module.named_parameters() if each[1] not in self._places]


def _remove(handles: Sequence[Any]) -> None:
    for handle in handles:
        handle.remove()


def _is_in_no_unit(name: str, parameter: nn.Parameter) -> SlideError:
    return SlideError(
        f"parameter {name} {list(parameter.shape)} requires a gradient, but was put into the model after "
        "deepspeed.initialize, so that DS-Slide would never update it; change the model before deepspeed.initialize, "
        "call deepspeed.initialize again with the changed model, or switch its requires_grad off"
    )
