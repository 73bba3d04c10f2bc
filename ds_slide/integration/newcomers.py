"""Parameters that require a gradient and did not when the engine was built, or were not in the model then.

A unit's parameter gets optimizer states at the next forward. A parameter that was put into the model since belongs to
no unit, and would never train: an error names it. torch reports every parameter and module that is registered, so the
model is walked only after a registration. Each forward reads only `requires_grad` of frozen parameters (30 ns each).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from ds_slide.errors import SlideError
from ds_slide.model.layout import Entry
from ds_slide.runtime.core.clients import AS_THEY_ARE
from ds_slide.runtime.core.unit import Unit

Places = Mapping[nn.Parameter, tuple[Unit, Entry]]


class Newcomers:
    """Looks for such parameters before each forward with gradients (`ds_slide.runtime.engine.Newcomers`)."""

    def __init__(self, module: nn.Module, places: Places, train: Callable[[Sequence[nn.Parameter]], None]) -> None:
        """`train`: gives parameters of units optimizer states."""
        self._module = module
        self._places = places
        self._train = train
        self._frozen = [parameter for parameter in places if not parameter.requires_grad]
        """Frozen parameters without states. A parameter that requires a gradient from the start and is in no group of
        the optimizer is left out: plain torch does not update it either."""
        self._strangers: list[tuple[str, nn.Parameter]] = []
        """Parameters of the model that belong to no unit."""
        self._modules: set[int] = set()
        self._has_changed = True
        itself, registered = (
            weakref.ref(self),
            (
                register_module_parameter_registration_hook,
                register_module_module_registration_hook,
            ),
        )

        def note(changed: nn.Module, _name: str, _new: Any) -> None:
            newcomers = itself()
            if newcomers is not None and id(changed) in newcomers._modules:
                newcomers._has_changed = True

        self._handles = [register(note) for register in registered]
        # The hooks are for all modules of the process: they go with an engine that is dropped, too.
        self._end = weakref.finalize(self, _remove, self._handles)
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
            self._train(on)
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


@dataclass(frozen=True)
class OptimizerGroups:
    """The optimizer's parameter groups as the script has made them, frozen parameters included."""

    given: Sequence[Sequence[nn.Parameter]]
    model_order: Mapping[nn.Parameter, int]

    @classmethod
    def of(cls, optimizer: Any, module: nn.Module) -> OptimizerGroups:
        """Return the groups of `optimizer`, before DS-Slide empties them."""
        order = {parameter: number for number, parameter in enumerate(module.parameters())}
        return cls([list(group["params"]) for group in optimizer.param_groups], order)

    def index_of(self, parameter: nn.Parameter, name: str) -> int:
        """Return the group of a parameter that is trained from now on. SlideError where it is not known."""
        for index, group in enumerate(self.given):
            if any(each is parameter for each in group):
                return index
        if len(self.given) == 1:
            return 0
        raise SlideError(
            f"parameter {name} requires a gradient since deepspeed.initialize, but is in none of the optimizer's "
            f"{len(self.given)} parameter groups; put it into one before deepspeed.initialize, where it may be frozen"
        )

    def with_later(
        self, trainable: Sequence[dict[str, Any]], later: Mapping[nn.Parameter, int]
    ) -> list[dict[str, Any]]:
        """Return `trainable`, DeepSpeed's groups of trained parameters, with the parameters `later`. The order is as in
        an engine that trains them from the start, so that such an engine can load a checkpoint of this one."""
        by_index = {group["_ds_source_param_group_id"]: dict(group) for group in trainable}
        for index in sorted(set(later.values())):
            group = by_index.setdefault(index, {"params": [], "_ds_source_param_group_id": index})
            members = {*group["params"], *(parameter for parameter, owner in later.items() if owner == index)}
            group["params"] = self._in_order(self.given[index], members)
        return [by_index[index] for index in sorted(by_index)]

    def _in_order(self, given: Sequence[nn.Parameter], members: set[nn.Parameter]) -> list[nn.Parameter]:
        known = [parameter for parameter in given if parameter in members]
        others = sorted(members - set(known), key=self.model_order.__getitem__)
        places = [self.model_order.get(parameter, -1) for parameter in known]
        if places == sorted(places):
            return sorted(members, key=self.model_order.__getitem__)
        return [*known, *others]
