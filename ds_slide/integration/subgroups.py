"""DeepSpeed's view of the states: flat tensors by sub-group, as its checkpoints and tools expect them.

A sub-group is a run of parameters of one optimizer group (cut at `sub_group_size`, as stock ZeRO-3 does), and its
flat tensors hold this rank's padded partitions one after the other. DS-Slide stores by unit, so these tensors are
made when a checkpoint is written and taken apart when one is read; each can be exchanged with stock DeepSpeed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ds_slide.errors import SlideError
from ds_slide.integration import planes
from ds_slide.model.layout import Entry
from ds_slide.runtime.engine import SlideRuntime
from ds_slide.runtime.unit import Unit

Places = dict[nn.Parameter, tuple[Unit, Entry]]


@dataclass(frozen=True)
class SubGroups:
    """`groups`: DeepSpeed's `fp16_groups`. `group_ids`: the optimizer group that each belongs to."""

    groups: Sequence[Sequence[nn.Parameter]]
    group_ids: Sequence[int]
    places: Places
    runtime: SlideRuntime

    def _flat(self, group: Sequence[nn.Parameter], read: Callable[[Unit, Entry], torch.Tensor]) -> torch.Tensor:
        numel = sum(self.places[parameter][1].partition_numel for parameter in group)
        flat = torch.empty(numel, dtype=torch.float32)
        for (unit, entry), span in self._spans(group):
            flat[span].copy_(read(unit, entry))
        return flat

    def _spans(self, group: Sequence[nn.Parameter]) -> Iterator[tuple[tuple[Unit, Entry], slice]]:
        offset = 0
        for parameter in group:
            place = self.places[parameter]
            yield place, slice(offset, offset + place[1].partition_numel)
            offset += place[1].partition_numel

    def _settle(self) -> None:
        for unit in self.runtime.units:
            self.runtime.settle(unit)

    def masters(self) -> list[torch.Tensor]:
        """fp32 masters by sub-group (`fp32_flat_groups`), host tensors."""
        self._settle()
        return [self._flat(group, planes.read_master) for group in self.groups]

    def optimizer_state(self, param_groups: Sequence[dict[str, Any]], step: int) -> dict[str, Any]:
        """The state dict that a torch optimizer over the flat sub-groups would have."""
        self._settle()
        state, packed = {}, []
        for number, group in enumerate(self.groups):
            moments = {
                key: self._flat(group, functools.partial(planes.read_state, key=key)) for key in planes.STATE_KEYS
            }
            state[number] = {"step": step, **moments}
        for group_id, param_group in enumerate(param_groups):
            settings = {key: value for key, value in param_group.items() if key != "params"}
            members = [number for number, owner in enumerate(self.group_ids) if owner == group_id]
            packed.append({**settings, "params": members})
        return {"state": state, "param_groups": packed}

    def load_masters(self, flats: Sequence[torch.Tensor]) -> None:
        """Set weights and masters from `fp32_flat_groups`."""
        self._check(flats, "fp32_flat_groups")
        self._settle()
        for group, flat in zip(self.groups, flats, strict=True):
            for (unit, entry), span in self._spans(group):
                planes.write_master(unit, entry, flat[span])
        for unit in self.runtime.units:
            self.runtime.weights_changed(unit)

    def load_optimizer_state(self, state_dict: dict[str, Any], param_groups: Sequence[dict[str, Any]]) -> int:
        """Set the moments and the groups' settings; returns the step count."""
        state = state_dict["state"]
        self._check([state[number]["exp_avg"] for number in sorted(state)], "optimizer_state_dict")
        self._settle()
        step = 0
        for number, group in enumerate(self.groups):
            saved = state[number]
            step = int(saved["step"])
            for key in planes.STATE_KEYS:
                for (unit, entry), span in self._spans(group):
                    planes.read_state(unit, entry, key).copy_(saved[key].reshape(-1)[span])
        for param_group, loaded in zip(param_groups, state_dict["param_groups"], strict=True):
            param_group.update({key: value for key, value in loaded.items() if key != "params"})
        return step

    def _check(self, flats: Sequence[torch.Tensor], what: str) -> None:
        expected = [sum(self.places[parameter][1].partition_numel for parameter in group) for group in self.groups]
        found = [flat.numel() for flat in flats]
        if found != expected:
            raise SlideError(
                f"the checkpoint's {what} holds sub-groups of {found} elements on this rank, but the model needs "
                f"{expected}; load it with the model, the number of ranks and the zero_optimization.sub_group_size "
                "that it was saved with"
            )
