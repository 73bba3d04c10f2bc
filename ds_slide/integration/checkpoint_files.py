"""DeepSpeed's checkpoint engine, through which it writes and reads every file of a checkpoint, in bounded memory."""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from deepspeed import comm as dist
from deepspeed.checkpoint.constants import (
    FROZEN_PARAM_FRAGMENTS,
    FROZEN_PARAM_SHAPES,
    OPTIMIZER_STATE_DICT,
    PARAM_SHAPES,
)
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum

from ds_slide.checkpoint import restricted
from ds_slide.checkpoint.archive import Archive
from ds_slide.checkpoint.restricted import MappedFiles
from ds_slide.errors import SlideError

# The loss scalers are in the optimizer's file, also without loss scaling; the stage likewise, in stock's.
restricted.also_allow(LossScaler, DynamicLossScaler, ZeroStageEnum)


class Reading:
    """One load. `frozen`: this rank's parts of the frozen parameters by name, mapped from the file."""

    def __init__(self) -> None:
        self.files = MappedFiles()
        self.frozen: Mapping[str, torch.Tensor] = {}

    def load(self, path: str, map_location: Any) -> Any:
        value = self.files.load(path, map_location)
        if not isinstance(value, dict) or OPTIMIZER_STATE_DICT in value:
            return value
        # The model's file. The caller keeps its content, so it is copied: a mapped file may be removed. The frozen
        # parameters may be larger than memory, and DeepSpeed would write them to the state buffers.
        self.frozen = value.pop(FROZEN_PARAM_FRAGMENTS, None) or {}
        return {**copy.deepcopy(value), FROZEN_PARAM_FRAGMENTS: None}


class SlideCheckpointEngine(TorchCheckpointEngine):
    """Writes a temporary file and renames it; while a checkpoint is saved or loaded, plans or maps the files."""

    def __init__(self) -> None:
        super().__init__()
        self.name = type(self).__name__
        self._collected: list[tuple[Path, Archive]] | None = None
        self._copies = False
        self._reading: Reading | None = None

    def save(self, state_dict: Any, path: str) -> None:
        if self._collected is not None:
            self._collected.append((Path(path), Archive(state_dict, copied=self._copies)))
            return
        archive = Archive(state_dict)
        target = Path(path)
        beside = target.with_name(f".{target.name}.ds_slide_saving")
        beside.unlink(missing_ok=True)
        try:
            archive.write(beside)
            os.replace(beside, target)
        except OSError as error:
            raise SlideError(f"{target} cannot be written ({error.strerror}); choose another directory") from error
        finally:
            beside.unlink(missing_ok=True)

    def load(self, path: str, map_location: Any = None) -> Any:
        if self._reading is None:
            return restricted.load(path, map_location)
        return self._reading.load(path, map_location)

    @contextlib.contextmanager
    def collecting(self, *, copied: bool = False) -> Iterator[list[tuple[Path, Archive]]]:
        """Let `save` only add its planned files to the list meanwhile. `copied`: as in Archive."""
        collected: list[tuple[Path, Archive]] = []
        self._collected, self._copies = collected, copied
        try:
            yield collected
        finally:
            self._collected = None

    @contextlib.contextmanager
    def reading(self) -> Iterator[Reading]:
        """Let `load` map its files meanwhile."""
        self._reading = reading = Reading()
        try:
            yield reading
        finally:
            self._reading = None


# ----------------------------------------------------------------------------------------------------------------------
# The parameters of a checkpoint and of the model, compared by name before anything is changed.
#
# DeepSpeed finds out in the middle of a save or a load that a parameter is not its own, and prints the whole tensor.

_SHOWN = 4
"""The most names in a message; a model with adapters has hundreds."""


def require_own_parameters(engine: Any) -> None:
    """Raise SlideError for a save of a model with parameters added since its engine started: the checkpoint would not
    have them."""
    places = engine.optimizer.protocol.places
    added = [name for name, parameter in engine.module.named_parameters() if parameter not in places]
    if added:
        raise SlideError(
            f"the checkpoint would not have {_listed(added)}, added to the model after deepspeed.initialize; add "
            "adapters and other parameters before it, or give the model to deepspeed.initialize again"
        )


def require_same_parameters(engine: Any, path: Path, file: str, *, strict: bool) -> None:
    """Raise SlideError where the tag at `path`, with model states in `file`, has other parameters than the model.

    `strict`: whether the load wants every weight. Otherwise the tag may have been saved without the frozen ones, as
    transformers' Trainer saves models with adapters.
    """
    content = MappedFiles().load(file, "cpu")
    groups, frozen = content.get(PARAM_SHAPES), content.get(FROZEN_PARAM_SHAPES)
    if groups is None:
        return
    # A parameter that was frozen for a while when it was saved is in both, and has optimizer states.
    saved = dict.fromkeys(frozen or (), False) | {name: True for group in groups for name in group}
    own = {
        engine.param_names[parameter]: place[1].trainable
        for parameter, place in engine.optimizer.protocol.places.items()
    }
    both, missing = saved.keys() & own.keys(), own.keys() - saved.keys()
    if frozen is None:
        excluded = {name for name in missing if not own[name]}
        if excluded and strict:
            raise SlideError(
                f"the checkpoint {path} was saved without frozen parameters, and the model has "
                f"{_listed(sorted(excluded))}; pass load_module_strict=False to load_checkpoint, which leaves them as "
                "they are"
            )
        missing -= excluded
    problems = [
        _clause("does not have {}", missing, own),
        _clause("has {}, and the model has not", saved.keys() - own.keys(), saved),
        _clause("trains {}, frozen in the model", {name for name in both if saved[name] and not own[name]}, own),
        _clause("has {} frozen, trained in the model", {name for name in both if own[name] and not saved[name]}, own),
    ]
    if any(problems):
        raise SlideError(
            f"the checkpoint {path} {' and '.join(filter(None, problems))}; load it with the model that it was saved "
            "with, before parameters are added, frozen or taken away"
        )


def _clause(text: str, names: Collection[str], order: Iterable[str]) -> str:
    return text.format(_listed([name for name in order if name in names])) if names else ""


def _listed(names: list[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


# ----------------------------------------------------------------------------------------------------------------------
# Steps that all ranks take together: they go on when every rank has succeeded, or stop with the same fault.

T = TypeVar("T")


@dataclass(frozen=True)
class Failure:
    """The fault of a rank, in words."""

    message: str


def together(step: Callable[[], T]) -> list[T]:
    """Run `step` on every rank and return all results, by rank. Collective.

    Where a rank fails, it raises its own exception and the others SlideError: no rank is left waiting.
    """
    own: Any
    fault: Exception | None = None
    try:
        own = step()
    except Exception as error:
        own, fault = Failure(f"{error}" if isinstance(error, SlideError) else f"{type(error).__name__}: {error}"), error
    results: list[Any] = [own]
    if dist.get_world_size() > 1:
        results = [None] * dist.get_world_size()
        dist.all_gather_object(results, own)
    if fault is not None:
        raise fault
    for rank, result in enumerate(results):
        if isinstance(result, Failure):
            raise SlideError(f"rank {rank}: {result.message}")
    return results
