"""DeepSpeed's checkpoint engine, through which it writes and reads every file of a checkpoint, in bounded memory."""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from deepspeed.checkpoint.constants import FROZEN_PARAM_FRAGMENTS, OPTIMIZER_STATE_DICT
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum

from ds_slide.checkpoint import restricted
from ds_slide.checkpoint.archive import Archive
from ds_slide.checkpoint.mapped import MappedFiles
from ds_slide.errors import SlideError

# The loss scalers are in the optimizer's file, also without loss scaling; the stage likewise, in stock's.
restricted.also_allow(LossScaler, DynamicLossScaler, ZeroStageEnum)


class Reading:
    """One load. `frozen`: this rank's parts of the frozen parameters by name, as maps of the file."""

    def __init__(self) -> None:
        self.files = MappedFiles()
        self.frozen: Mapping[str, torch.Tensor] = {}

    def load(self, path: str, map_location: Any) -> Any:
        value = self.files.load(path, map_location)
        if not isinstance(value, dict) or OPTIMIZER_STATE_DICT in value:
            return value
        # The model's file. What the caller gets out of it lives on, so it is copied and no map of a file that may be
        # removed; the frozen parameters may be larger than memory, and DeepSpeed would write them to the state buffers.
        self.frozen = value.pop(FROZEN_PARAM_FRAGMENTS, None) or {}
        return {**copy.deepcopy(value), FROZEN_PARAM_FRAGMENTS: None}


class SlideCheckpointEngine(TorchCheckpointEngine):
    """Writes beside and renames; while a checkpoint is saved or loaded, does what that needs."""

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
        """Let `save` only plan its files meanwhile, which are the list. `copied`: as in Archive."""
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
