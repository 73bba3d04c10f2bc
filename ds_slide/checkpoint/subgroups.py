"""DeepSpeed's view of the states: flat tensors by sub-group, for its checkpoints and tools.

A sub-group is a sequence of parameters of one optimizer group, cut at `sub_group_size` like in stock ZeRO-3. Its flat
tensors hold this rank's padded partitions one after the other. DS-Slide stores by unit, so these tensors are planned,
not made. A save takes them in pieces from the state buffers, and a load writes them in pieces.
"""

from __future__ import annotations

import copy
from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import nn

from ds_slide.checkpoint.archive import PIECE, Planned
from ds_slide.checkpoint.restricted import MappedFiles
from ds_slide.checkpoint.state_buffers import MASTER, as_weights, pieces, read_values, write_values
from ds_slide.errors import SlideError
from ds_slide.model.layout import Entry
from ds_slide.optim.rule import UpdateRule
from ds_slide.runtime.core.unit import Unit
from ds_slide.runtime.engine import SlideRuntime
from ds_slide.store.state import UnitState

_NOTHING = torch.empty(0)
"""The states that a sub-group does not have."""
Places = dict[nn.Parameter, tuple[Unit, Entry]]
Flat = tuple[torch.Tensor, int]
"""A flat tensor, and the element where the partition of a parameter begins."""


class States(Protocol):
    """The source of states for a save: the units themselves (`SubGroups`), or copies (`Snapshot`)."""

    def of(self, unit: Unit) -> UnitState: ...


@dataclass(frozen=True)
class SubGroups:
    """The sub-groups of an engine. `groups`: DeepSpeed's `fp16_groups`. `group_ids`: the optimizer group of each.
    `rule`: the update rule, which tells the rule of each optimizer group."""

    groups: Sequence[Sequence[nn.Parameter]]
    group_ids: Sequence[int]
    places: Places
    runtime: SlideRuntime
    rule: UpdateRule

    def state_names(self, number: int) -> Sequence[str]:
        """Return the states of the rule that updates sub-group `number`."""
        return self.rule.of_group(self.group_ids[number]).state_names

    def of(self, unit: Unit) -> UnitState:
        """Wait for the pending update of `unit` and return its states."""
        self.runtime.access.settle(unit)
        return unit.state

    def masters(self, states: States) -> list[Planned]:
        """Return the fp32 masters by sub-group (`fp32_flat_groups`)."""
        return [self._planned(group, MASTER, states) for group in self.groups]

    def optimizer_state(
        self, param_groups: Sequence[dict[str, Any]], step: Callable[[], int | torch.Tensor], states: States
    ) -> dict[str, Any]:
        """Return the state dict that a torch optimizer over the flat sub-groups would have. `step` makes a step count
        for each sub-group, because optimizers with a tensor count in place."""
        state = {
            number: {"step": step(), **{key: self._planned(group, key, states) for key in self.state_names(number)}}
            for number, group in enumerate(self.groups)
        }
        packed = []
        for group_id, param_group in enumerate(param_groups):
            settings = {key: value for key, value in param_group.items() if key != "params"}
            members = [number for number, owner in enumerate(self.group_ids) if owner == group_id]
            packed.append({**settings, "params": members})
        return {"state": state, "param_groups": packed}

    def _planned(self, group: Sequence[nn.Parameter], key: str, states: States) -> Planned:
        places = [self.places[parameter] for parameter in group]
        ends = list(accumulate(entry.partition_numel for _, entry in places))

        def read(start: int, stop: int) -> torch.Tensor:
            values = torch.empty(stop - start, dtype=torch.float32)
            index, done = bisect_right(ends, start), start
            while done < stop:
                unit, entry = places[index]
                end = min(ends[index], stop)
                offset = entry.offset + entry.partition_numel - ends[index]
                run = slice(offset + done, offset + end)
                values[done - start : end - start] = read_values(states.of(unit), key, run)
                index, done = index + 1, end
            return values

        return Planned(ends[-1] if ends else 0, torch.float32, read)

    def load_masters(self, flats: Sequence[torch.Tensor], files: MappedFiles, *, rounded: bool = False) -> None:
        """Set weights and masters from `fp32_flat_groups`. `rounded`: round both to the model's dtype."""
        self._check(flats, "fp32_flat_groups")
        self.runtime.access.begin_writing()
        self._load(MASTER, flats, files, rounded=rounded)
        for unit in self.runtime.units:
            self.runtime.access.weights_changed(unit)

    def load_optimizer_state(
        self, state_dict: dict[str, Any], param_groups: Sequence[dict[str, Any]], files: MappedFiles
    ) -> int:
        """Set the optimizer states and the groups' settings, and return the step count."""
        saved = [state_dict["state"][number] for number in sorted(state_dict["state"])]
        for key, numbers in self._holders().items():
            if not all(key in state for number, state in enumerate(saved) if number in numbers):
                found = sorted(set().union(*saved) - {"step"})
                raise SlideError(
                    f"the checkpoint's optimizer_state_dict has no {key}, which the optimizer needs, but "
                    f"{', '.join(found) or 'no states'}; load it with the optimizer that it was saved with, or pass "
                    "load_optimizer_states=False to load_checkpoint"
                )
            flats = [state[key].reshape(-1) if number in numbers else _NOTHING for number, state in enumerate(saved)]
            self._check(flats, "optimizer_state_dict", numbers)
            self._load(key, flats, files)
        load_settings(param_groups, state_dict["param_groups"])
        # torch's SGD counts no steps. If it has a state, its first step is over.
        return int(saved[-1].get("step", 1)) if saved else 0

    def _load(self, key: str, flats: Sequence[torch.Tensor], files: MappedFiles, *, rounded: bool = False) -> None:
        sources: dict[nn.Parameter, Flat] = {}
        for group, flat in zip(self.groups, flats, strict=True):
            starts = accumulate((self.places[parameter][1].partition_numel for parameter in group), initial=0)
            sources |= {parameter: (flat, start) for parameter, start in zip(group, starts, strict=False)}
        for unit in self.runtime.units:
            if key == MASTER or unit.state.writes_change or unit.state.has(key):
                self.load_unit(unit, key, sources, files, rounded=rounded)

    def load_unit(
        self, unit: Unit, key: str, sources: Mapping[nn.Parameter, Flat], files: MappedFiles, *, rounded: bool = False
    ) -> None:
        """Set one state of a unit in the order of the state buffers, with padding. The pieces start at a multiple of
        PIECE, so that state buffers with a scale for each group of elements get whole groups."""
        self.runtime.access.settle(unit)
        weights = unit.parameter_dtype
        for span in pieces(unit.layout.trainable_numel, PIECE):
            values = _values(unit, span, sources, files)
            write_values(unit.state, key, span, as_weights(values, weights) if rounded else values)

    def _holders(self) -> dict[str, list[int]]:
        """Return the numbers of the sub-groups with each state."""
        names = [self.state_names(number) for number in range(len(self.groups))]
        keys = dict.fromkeys(key for each in names for key in each)
        return {key: [number for number, each in enumerate(names) if key in each] for key in keys}

    def _check(self, flats: Sequence[torch.Tensor], what: str, numbers: Collection[int] | None = None) -> None:
        """`numbers`: the sub-groups that have something in `flats`; None: all."""
        expected = [
            sum(self.places[parameter][1].partition_numel for parameter in group)
            if numbers is None or number in numbers
            else 0
            for number, group in enumerate(self.groups)
        ]
        found = [flat.numel() for flat in flats]
        if found != expected:
            raise SlideError(
                f"the checkpoint's {what} holds sub-groups of {found} elements on this rank, but the model needs "
                f"{expected}; load it with the model, the parameters that require a gradient, the number of ranks and "
                "the zero_optimization.sub_group_size that it was saved with"
            )


def load_settings(param_groups: Sequence[dict[str, Any]], saved: Sequence[Mapping[str, Any]]) -> None:
    """Give each parameter group its saved settings."""
    for param_group, loaded in zip(param_groups, saved, strict=True):
        settings = {key: value for key, value in loaded.items() if key != "params"}
        param_group.update(copy.deepcopy(settings))  # a tensor among them would keep the file mapped


def _values(unit: Unit, span: slice, sources: Mapping[nn.Parameter, Flat], files: MappedFiles) -> torch.Tensor:
    """Return the local elements `span` of a unit from the flat tensors. Elements between the parameters are zero, and
    so is the rest of a partition behind the end of its flat tensor."""
    values = torch.zeros(span.stop - span.start, dtype=torch.float32)
    for parameter, entry in zip(unit.parameters, unit.layout.entries, strict=True):
        first, last = max(entry.offset, span.start), min(entry.offset + entry.partition_numel, span.stop)
        if first < last and parameter in sources:
            flat, begin = sources[parameter]
            offset = begin - entry.offset
            with files.using(flat[offset + first : offset + last]) as source:
                values[first - span.start : first - span.start + source.numel()] = source
    return values
