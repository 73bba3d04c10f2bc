"""`save_checkpoint`: DeepSpeed's files, written piece by piece, whole or not at all."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from deepspeed.checkpoint.constants import DS_VERSION, OPTIMIZER_STATE_DICT
from deepspeed.git_version_info import version
from torch import nn

from ds_slide.errors import SlideError
from ds_slide.integration.checkpoint_archive import Archive
from ds_slide.integration.checkpoint_manifest import manifest_now
from ds_slide.integration.checkpoint_pickle import Planned
from ds_slide.integration.checkpoint_place import Staging, checked_tag, new_name, reached
from ds_slide.integration.checkpoint_ranks import together
from ds_slide.integration.checkpoint_sums import Sum
from ds_slide.integration.planes import read_weights

logger = logging.getLogger(__name__)


def is_publisher(engine: Any) -> bool:
    """Whether this rank makes directories and renames them: one a file system."""
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
    tag = checked_tag(f"global_step{engine.global_steps}" if tag is None else str(tag))
    together(engine.optimizer.checkpoint_event_prologue)
    try:
        engine._checkpoint_tag_validation(tag)
        staging = Staging(Path(save_dir), together(new_name)[0])
        try:
            _write(engine, staging, tag, client_state or {}, save_latest, exclude_frozen_parameters)
        finally:
            _discard(staging)
    finally:
        engine.optimizer.checkpoint_event_epilogue()
    return True


def _write(
    engine: Any, staging: Staging, tag: str, client_state: dict[str, Any], save_latest: bool, exclude_frozen: bool
) -> None:
    archives: list[tuple[Path, Archive]] = []

    def plan() -> int:
        archives.extend(_planned_files(engine, staging.path, tag, client_state, exclude_frozen))
        return sum(archive.nbytes for _, archive in archives)

    sizes = together(plan)
    needed = sizes[engine.global_rank] if engine.use_node_local_storage() else sum(sizes)
    together(functools.partial(_open, engine, staging, tag, needed))
    reached("opened")
    written = together(lambda: _write_files(archives))
    together(functools.partial(_publish, engine, staging, tag, written, save_latest))


def _planned_files(
    engine: Any, directory: Path, tag: str, client_state: dict[str, Any], exclude_frozen: bool
) -> list[tuple[Path, Archive]]:
    """This rank's files as DeepSpeed composes them."""
    with engine.checkpoint_engine.collecting() as collected, _planned_fragments(engine):
        arguments = {"client_state": client_state, "exclude_frozen_parameters": exclude_frozen}
        engine._save_checkpoint(str(directory), tag, **arguments)
        optimizer_state = engine.optimizer.planned_state_dict()
        content = {OPTIMIZER_STATE_DICT: optimizer_state, "ds_config": engine.config, DS_VERSION: version}
        engine.checkpoint_engine.save(content, engine._get_zero_ckpt_name(str(directory), tag))
    return collected


@contextmanager
def _planned_fragments(engine: Any) -> Iterator[None]:
    """DeepSpeed saves `ds_tensor` of frozen parameters, a view, with which the whole plane would be pickled."""
    places = engine.optimizer.protocol.places

    def fragment(parameter: nn.Parameter) -> Planned:
        unit, entry = places[parameter]
        engine.optimizer.runtime.settle(unit)
        return Planned(entry.partition_numel, parameter.dtype, functools.partial(read_weights, unit, entry))

    engine._get_param_fragment_func = fragment
    try:
        yield
    finally:
        del engine._get_param_fragment_func


def _open(engine: Any, staging: Staging, tag: str, needed: int) -> None:
    if not is_publisher(engine):
        return
    target = staging.save_dir / tag
    try:
        staging.open(tag)
        free = staging.free_bytes()
    except OSError as error:
        raise _failed(target, needed, error) from error
    if free < needed:
        raise SlideError(
            f"saving {target} needs {needed:,} bytes, but {free:,} are free there; remove an older checkpoint (one "
            "that is replaced is kept until the new one is whole), or choose another directory"
        )


def _write_files(archives: list[tuple[Path, Archive]]) -> dict[str, Sum]:
    written = {}
    for path, archive in archives:
        written[path.name] = archive.write(path)
        reached(f"wrote {path.name}")
    return written


def _publish(engine: Any, staging: Staging, tag: str, written: list[dict[str, Sum]], save_latest: bool) -> None:
    if not is_publisher(engine):
        return
    new = staging.path / tag
    files = {name: found for rank in written for name, found in rank.items()}
    if engine.use_node_local_storage():
        files = {name: found for name, found in files.items() if (new / name).exists()}
    try:
        manifest = manifest_now(files)
        manifest.check(new, lambda _name: False)
        manifest.write(new)
        if engine.global_rank == 0:
            engine._copy_recovery_script(str(staging.path))
        scripts = [path.name for path in staging.path.glob("*.py")]
        staging.publish(tag, scripts=scripts, latest=save_latest and engine.global_rank == 0)
    except OSError as error:
        raise _failed(staging.save_dir / tag, sum(found.nbytes for found in files.values()), error) from error


def _failed(target: Path, nbytes: int, error: OSError) -> SlideError:
    return SlideError(
        f"saving {target} ({nbytes:,} bytes) failed at {error.filename or target} ({error.strerror}); earlier "
        "checkpoints are as they were; make the directory writable or choose another one"
    )


def _discard(staging: Staging) -> None:
    try:
        staging.discard()
    except OSError as error:
        logger.warning("%s could not be removed (%s); the next save there does it", staging.path, error)
