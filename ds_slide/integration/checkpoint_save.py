"""`save_checkpoint`: DeepSpeed's files, written piece by piece, whole or not at all.

They are written at once or, with `ds_slide.async_save`, by a thread from a copy of the states.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from deepspeed.checkpoint.constants import DS_VERSION, OPTIMIZER_STATE_DICT
from deepspeed.git_version_info import version
from torch import nn

from ds_slide.checkpoint import client_states, compressed, restricted
from ds_slide.checkpoint.archive import Archive, Planned, Wrote
from ds_slide.checkpoint.background import BackgroundSave, Snapshot
from ds_slide.checkpoint.publish import Agreement, Staging, checked_tag, new_name, reached
from ds_slide.checkpoint.state_buffers import read_weights
from ds_slide.checkpoint.subgroups import States
from ds_slide.checkpoint.sums import Sum
from ds_slide.errors import SlideError
from ds_slide.integration.checkpoint_files import require_own_parameters, together
from ds_slide.report.log import size

logger = logging.getLogger(__name__)


def is_publisher(engine: Any) -> bool:
    """Whether this rank makes directories and renames them: one rank for each file system."""
    return bool((engine.local_rank if engine.use_node_local_storage() else engine.global_rank) == 0)


def save_checkpoint(
    engine: Any,
    save_dir: str | Path,
    tag: Any = None,
    client_state: dict[str, Any] | None = None,
    save_latest: bool = True,
    exclude_frozen_parameters: bool = False,
) -> bool:
    """DeepSpeedEngine.save_checkpoint. Collective. Raises SlideError when it fails on any rank: the temporary directory
    is removed then, and an older checkpoint under the same tag is as it was."""
    if not save_dir:
        raise ValueError(f"save_dir must be a non-empty string, got {save_dir!r}")
    require_own_parameters(engine)
    tag = checked_tag(f"global_step{engine.global_steps}" if tag is None else str(tag))
    finish_save(engine)
    together(functools.partial(_settle, engine))
    try:
        engine._checkpoint_tag_validation(tag)
        # Absolute: the script may change its directory before an asynchronous save has ended.
        staging = Staging(Path(save_dir).absolute(), together(new_name)[0])
        snapshot = _snapshot(engine, staging.save_dir / tag, frozen=not exclude_frozen_parameters)
        request = _Request(staging, tag, client_state or {}, save_latest, exclude_frozen_parameters)
        try:
            _save(engine, request, snapshot)
        finally:
            if engine.optimizer.saving is None:
                _discard(staging)
    finally:
        engine.optimizer.checkpoint_event_epilogue()
    return True


def _settle(engine: Any) -> None:
    engine.optimizer.runtime.interruptions.require_weights("saving a checkpoint")
    engine.optimizer.checkpoint_event_prologue()


def finish_save(engine: Any) -> None:
    """Wait for an asynchronous save that is under way. Collective. Raises SlideError, on all ranks, where it failed."""
    saving, engine.optimizer.saving = engine.optimizer.saving, None
    if saving is None:
        return
    agreed = False
    try:
        together(saving.require)
        together(saving.complete if is_publisher(engine) else lambda: None)
        agreed = True
    except SlideError:  # raised on all ranks; after other exceptions (a rank is gone) ranks may still write or publish
        agreed = True
        raise
    finally:
        saving.close(all_have_ended=agreed)


@dataclass(frozen=True)
class _Request:
    staging: Staging
    tag: str
    client_state: dict[str, Any]
    save_latest: bool
    exclude_frozen: bool


def _snapshot(engine: Any, target: Path, *, frozen: bool) -> Snapshot | None:
    """Return the copy of states for an asynchronous save; None where the save waits. Collective."""
    optimizer = engine.optimizer
    if not optimizer.async_save:
        return None
    snapshot = Snapshot(optimizer.runtime.units, frozen)
    if engine.use_node_local_storage():
        reason = "checkpoint.use_node_local_storage leaves the ranks no directory in which they could agree"
    elif not all(together(snapshot.fits)):
        room = snapshot.room()
        reason = (
            f"a copy of the states needs {size(snapshot.nbytes())}, and {size(room.nbytes)} are free ({room.source})"
        )
    else:
        return snapshot
    if not optimizer.has_said_that_saves_wait:
        optimizer.has_said_that_saves_wait = True
        logger.warning("saving %s waits for the end of the write in spite of ds_slide.async_save: %s", target, reason)
    return None


def _save(engine: Any, request: _Request, snapshot: Snapshot | None) -> None:
    staging, tag = request.staging, request.tag
    archives: list[tuple[Path, Archive]] = []

    def plan() -> int:
        archives.extend(_planned_files(engine, request, snapshot))
        return sum(archive.nbytes for _, archive in archives)

    sizes = together(plan)
    needed = sizes[engine.global_rank] if engine.use_node_local_storage() else sum(sizes)
    together(functools.partial(_open, engine, staging, tag, needed))
    reached("opened")
    if snapshot is None:
        written = together(lambda: _write_files(archives))
        together(functools.partial(_publish, engine, staging, tag, written, request.save_latest))
        return
    together(snapshot.take)
    reached("copied")
    agreement = Agreement(staging, tag, len(sizes), request.save_latest)

    def begin() -> None:
        engine.optimizer.saving = _Save(agreement, engine.global_rank, archives)

    try:
        together(begin)
    except SlideError:  # raised on all ranks: either all ranks have a save, or none
        saving, engine.optimizer.saving = engine.optimizer.saving, None
        if saving is not None:
            saving.close(all_have_ended=False)
        raise


class _Save(BackgroundSave):
    """The save of a tag by a thread. It has no reference to the engine, which may be destroyed meanwhile."""

    def __init__(self, agreement: Agreement, rank: int, archives: list[tuple[Path, Archive]]) -> None:
        self._agreement = agreement
        self._rank = rank
        self._archives = archives
        nbytes = sum(archive.nbytes for _, archive in archives)
        super().__init__(agreement.staging.save_dir / agreement.tag, nbytes, alone=agreement.ranks == 1)

    def write(self) -> None:
        archives, self._archives = self._archives, []  # a failed save keeps no copy of the states either
        with _as_failure(self._target, self._nbytes):
            self._agreement.finish(self._rank, _write_files(archives, self.wrote))
            archives.clear()  # this also frees the copy of the states

    def complete(self) -> None:
        with _as_failure(self._target, self._nbytes):
            self._agreement.publish_if_complete()

    def release(self) -> None:
        _discard(self._agreement.staging)


def _planned_files(engine: Any, request: _Request, snapshot: Snapshot | None) -> list[tuple[Path, Archive]]:
    """Return this rank's files as DeepSpeed composes them. `snapshot`: the states to be written, if copied."""
    directory, tag = request.staging.path, request.tag
    copied = snapshot is not None
    states: States = engine.optimizer.sub_groups if snapshot is None else snapshot
    with engine.checkpoint_engine.collecting(copied=copied) as collected, _planned_fragments(engine, states):
        arguments = {"client_state": request.client_state, "exclude_frozen_parameters": request.exclude_frozen}
        engine._save_checkpoint(str(directory), tag, **arguments)
        optimizer_state = engine.optimizer.planned_state_dict(states)
        content = {OPTIMIZER_STATE_DICT: optimizer_state, "ds_config": engine.config, DS_VERSION: version}
        engine.checkpoint_engine.save(content, engine._get_zero_ckpt_name(str(directory), tag))
        subspaces = compressed.planned(engine.optimizer.runtime)
        if subspaces is not None:
            engine.checkpoint_engine.save(subspaces, str(directory / tag / compressed.name_of(engine.global_rank)))
        own = client_states.planned(engine.optimizer.runtime.units, engine.optimizer.rule)
        if own is not None:
            engine.checkpoint_engine.save(own, str(directory / tag / client_states.name_of(engine.global_rank)))
    if is_publisher(engine):
        _say_what_will_be_refused(engine, request.staging.save_dir / tag, [archive for _, archive in collected])
    return collected


def _say_what_will_be_refused(engine: Any, target: Path, archives: list[Archive]) -> None:
    """Warn, once for each class, while there is still time to allow it: a later load would fail."""
    names = {name for archive in archives for name in restricted.refused_names(archive.pickled)}
    if names := names - engine.optimizer.names_said_to_be_refused:
        engine.optimizer.names_said_to_be_refused |= names
        logger.warning(
            "%s holds %s out of client_state or a scheduler, which load_checkpoint refuses unless the script allows it "
            "first with torch.serialization.add_safe_globals([...])",
            target,
            restricted.listed(sorted(names)),
        )


@contextmanager
def _planned_fragments(engine: Any, states: States) -> Iterator[None]:
    """Let DeepSpeed save planned tensors of frozen parameters, and of buffers that move with their blocks: with views,
    it would pickle the whole state buffer."""
    places = engine.optimizer.protocol.places
    carried = {
        each.home.data_ptr() for unit in engine.optimizer.runtime.units for each in unit.carried if each.home.numel()
    }
    whole_state_dict = engine.module_state_dict

    def fragment(parameter: nn.Parameter) -> Planned:
        unit, entry = places[parameter]

        def read(start: int, stop: int) -> torch.Tensor:
            return read_weights(states.of(unit), entry, start, stop)

        return Planned(entry.partition_numel, parameter.dtype, read)

    def state_dict(*args: Any, **options: Any) -> Any:
        found = whole_state_dict(*args, **options)
        for name, value in found.items():
            if isinstance(value, torch.Tensor) and value.numel() and value.data_ptr() in carried:
                found[name] = Planned.of(value)
        return found

    engine._get_param_fragment_func = fragment
    engine.module_state_dict = state_dict
    try:
        yield
    finally:
        del engine._get_param_fragment_func, engine.module_state_dict


def _open(engine: Any, staging: Staging, tag: str, needed: int) -> None:
    if not is_publisher(engine):
        return
    target = staging.save_dir / tag
    with _as_failure(target, needed):
        staging.open(tag)
        if engine.global_rank == 0:
            engine._copy_recovery_script(str(staging.present_path))
        free = staging.free_bytes()
    if free < needed:
        raise SlideError(
            f"saving {target} needs {size(needed)}, but {size(free)} are free there, "
            f"{size(needed - free)} short; remove an older checkpoint (one "
            "that is replaced is kept until the new one is whole), or choose another directory"
        )


def _write_files(archives: list[tuple[Path, Archive]], wrote: Wrote | None = None) -> dict[str, Sum]:
    written = {}
    for path, archive in archives:
        written[path.name] = archive.write(path, wrote)
        reached(f"wrote {path.name}")
    return written


def _publish(engine: Any, staging: Staging, tag: str, written: list[dict[str, Sum]], save_latest: bool) -> None:
    if not is_publisher(engine):
        return
    new = staging.path / tag
    files = {name: found for rank in written for name, found in rank.items()}
    if engine.use_node_local_storage():
        files = {name: found for name, found in files.items() if (new / name).exists()}
    with _as_failure(staging.save_dir / tag, sum(found.nbytes for found in files.values())):
        staging.publish(tag, files, latest=save_latest)  # in each directory: stock leaves it to rank 0's host alone


@contextmanager
def _as_failure(target: Path, nbytes: int) -> Iterator[None]:
    """Turn an error of the operating system into a SlideError."""
    try:
        yield
    except OSError as error:
        raise SlideError(
            f"saving {target} ({size(nbytes)}) failed at {error.filename or target} ({error.strerror}); earlier "
            "checkpoints are as they were; make the directory writable or choose another one"
        ) from error


def _discard(staging: Staging) -> None:
    try:
        staging.discard()
    except OSError as error:
        logger.warning("%s could not be removed (%s); the next save there does it", staging.path, error)
