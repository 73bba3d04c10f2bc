"""Universal checkpoints of DeepSpeed's `ds_to_universal.py`: one file for each parameter and state.

    <tag>/zero/<parameter>/fp32.pt, <state>.pt    the whole tensor, flat, for any number of ranks
    <tag>/zero/optimizer_state.pt                                step count, parameter groups, loss scale
    <tag>/zero_pp_rank_<N>_mp_rank_00_model_states.pt            what the script saved; no weights that are trained

Each rank maps the files of one unit at a time and copies its own part of them. So any number of ranks can load, and
memory stays bounded. Like in stock, the files lack frozen parameters and buffers, which stay as the model has them.
Stock gives every parameter group the settings of the first one. Here each group gets its own settings back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ds_slide.checkpoint.restricted import MappedFiles
from ds_slide.checkpoint.state_buffers import MASTER
from ds_slide.checkpoint.subgroups import Flat, SubGroups
from ds_slide.errors import SlideError
from ds_slide.model.layout import Entry, piece
from ds_slide.runtime.core.unit import Unit

LATEST = "latest_universal"
_CONVERTED = (MASTER, "exp_avg", "exp_avg_sq")
_AGAIN = "convert the checkpoint again with ds_to_universal.py, or load another tag"


@dataclass(frozen=True)
class GlobalState:
    """State that all parameters share. `scale`: three attributes of ZeRO's loss scaling, by name."""

    step: int
    param_groups: Sequence[Mapping[str, Any]]
    scale: Mapping[str, Any]


@dataclass(frozen=True)
class UniversalCheckpoint:
    """The directory of a tag. `names`: DeepSpeed's names of the parameters."""

    path: Path
    names: Mapping[nn.Parameter, str]

    @property
    def global_file(self) -> Path:
        return self.path / "zero" / "optimizer_state.pt"

    def check(self, sub_groups: SubGroups, param_groups: int, keys: Sequence[str]) -> None:
        """Raise SlideError, which names the file, unless every file of `keys` holds what the model needs."""
        if missing := [key for key in keys if key not in _CONVERTED]:
            raise SlideError(
                f"{self.path} is a universal checkpoint, for which ds_to_universal.py takes masters, exp_avg and "
                f"exp_avg_sq only, but the optimizer needs {', '.join(missing)}; load the checkpoint that it was made "
                "from, or pass load_optimizer_states=False to load_checkpoint"
            )
        groups = len(self.global_state().param_groups)
        if groups != param_groups:
            raise SlideError(
                f"{self.global_file} holds {groups} parameter groups, but the optimizer has {param_groups}; load it "
                "with the parameter groups that it was saved with"
            )
        for group in sub_groups.groups:
            for parameter in group:
                for key in keys:
                    self._flat(parameter, sub_groups.places[parameter][1], key, MappedFiles())

    def global_state(self) -> GlobalState:
        """Load what all parameters share. Raises SlideError where the file is not from a ZeRO-3 checkpoint."""
        content = _loaded(self.global_file, MappedFiles())
        try:
            optimizer = content[OPTIMIZER_STATE_DICT]
            steps = {int(state["step"]) for state in optimizer["state"].values()}
            (step,) = steps or {0}
            names = ("loss_scaler", "dynamic_loss_scale", "overflow")
            scale = {name: content[name] for name in names if name in content}
            return GlobalState(step, optimizer["param_groups"], scale)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise SlideError(
                f"{self.global_file} does not hold the optimizer state of a ZeRO-3 checkpoint "
                f"({type(error).__name__}: {error}); {_AGAIN}"
            ) from error

    def load(self, sub_groups: SubGroups, rank: int, keys: Sequence[str], *, rounded: bool = False) -> None:
        """Copy `rank`'s part of every state in `keys`. `rounded`: round masters to the model's dtype."""
        sub_groups.runtime.access.begin_writing()
        for unit in sub_groups.runtime.units:
            for key in keys:
                files = MappedFiles()  # for these files only: later files may be mapped at the same addresses
                sources = self._sources(unit, rank, key, files)
                sub_groups.load_unit(unit, key, sources, files, rounded=rounded and key == MASTER)
        for unit in sub_groups.runtime.units:
            sub_groups.runtime.access.weights_changed(unit)

    def _sources(self, unit: Unit, rank: int, key: str, files: MappedFiles) -> dict[nn.Parameter, Flat]:
        sources = {}
        for parameter, entry in zip(unit.parameters, unit.layout.entries, strict=True):
            if entry.trainable:
                start, stop = piece(entry, rank)
                sources[parameter] = (self._flat(parameter, entry, key, files)[start:stop], 0)
        return sources

    def _flat(self, parameter: nn.Parameter, entry: Entry, key: str, files: MappedFiles) -> torch.Tensor:
        path = self.path / "zero" / self.names[parameter] / ("fp32.pt" if key == MASTER else f"{key}.pt")
        content = _loaded(path, files)
        values = content.get(PARAM) if isinstance(content, dict) else content
        if not isinstance(values, torch.Tensor):
            raise SlideError(f"{path} holds no tensor; {_AGAIN}")
        if values.numel() != entry.numel:
            raise SlideError(
                f"{path} holds {values.numel():,} elements, but {self.names[parameter]} of the model has "
                f"{entry.numel:,}; load it with the model that it was saved with"
            )
        return values.detach().reshape(-1)


def _loaded(path: Path, files: MappedFiles) -> Any:
    try:
        return files.load(str(path), "cpu")
    except OSError as error:
        raise SlideError(
            f"the universal checkpoint's file {path} cannot be read ({error.strerror}); {_AGAIN}, made from the model "
            "that is trained"
        ) from error


# ----------------------------------------------------------------------------------------------------------------------
# DeepSpeed's keys in its checkpoint files, by the names of `deepspeed.checkpoint.constants`.

OPTIMIZER_STATE_DICT = "optimizer_state_dict"
PARAM = "param"
