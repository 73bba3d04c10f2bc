"""The tag that a load takes, and its checks by all ranks together before anything is changed."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from deepspeed import comm as dist

from ds_slide.checkpoint import compressed
from ds_slide.checkpoint.archive import is_ours
from ds_slide.checkpoint.manifest import NAME, Manifest, newest_whole_tag
from ds_slide.checkpoint.publish import checked_tag, recover
from ds_slide.checkpoint.restricted import MappedFiles
from ds_slide.checkpoint.state_buffers import MASTER
from ds_slide.checkpoint.sums import tag_in
from ds_slide.checkpoint.universal import LATEST
from ds_slide.errors import SlideError
from ds_slide.integration.checkpoint_files import require_same_parameters, together
from ds_slide.integration.checkpoint_save import is_publisher

logger = logging.getLogger(__name__)

_MODEL, _OPTIMIZER = "*_model_states.pt", "*_optim_states.pt"
_RANK = re.compile(r"zero_pp_rank_(\d+)_")


def universal_tag(engine: Any, directory: Path, tag: Any, *, everything: bool) -> str:
    """Return the universal tag to load, when each of its files fits this model. Collective. Raises SlideError."""

    def verify() -> str:
        if engine.optimizer.require_manifest:
            raise SlideError(
                "ds_slide.checkpoint.require_manifest asks for a manifest, but universal checkpoints, such as those in "
                f"{directory}, have none; set it to false, or load the checkpoint that they were made from"
            )
        chosen = str(tag)
        if tag is None:
            if not os.path.lexists(directory / LATEST):
                raise SlideError(
                    f"{directory / LATEST}, which names the universal checkpoint to load, is not there; convert a "
                    "checkpoint with ds_to_universal.py, pass its tag, or set checkpoint.load_universal to false"
                )
            chosen = tag_in(directory / LATEST)
        # The files of the tag, then their content against this model.
        path = directory / chosen
        metadata = engine._get_all_ckpt_names(str(directory), chosen)
        if not metadata:
            raise SlideError(
                f"{path} has no file zero_pp_rank_0_mp_rank_00_model_states.pt, so it is no universal checkpoint of "
                "ZeRO-3; convert one with ds_to_universal.py, or set checkpoint.load_universal to false"
            )
        _read_all(metadata)
        optimizer = engine.optimizer
        keys = (MASTER, *optimizer.sub_groups.state_names) if everything else (MASTER,)
        optimizer.universal_checkpoint(path).check(optimizer.sub_groups, len(optimizer.optimizer.param_groups), keys)
        return chosen

    return together(verify)[0]


def whole_tag(engine: Any, directory: Path, tag: Any, *, every_rank: Callable[[Path], bool]) -> str:
    """Return the tag to load, when the files that this load reads match the manifest and hold nothing that is refused.
    `every_rank`: whether the files of all ranks are read. Collective. Raises SlideError."""
    chosen = str(tag)

    def put_back() -> None:
        try:
            if is_publisher(engine):
                recover(directory)
        except OSError as error:
            where = error.filename or directory
            raise SlideError(f"the checkpoint's {where} cannot be read ({error.strerror})") from error

    def verify() -> str:
        nonlocal chosen
        try:
            if tag is None:
                chosen = tag_in(directory / "latest")
            _verify(engine, directory, _checked(directory, chosen), every_rank)
        except OSError as error:
            where = error.filename or directory / chosen
            raise SlideError(f"the checkpoint's {where} cannot be read ({error.strerror})") from error
        return chosen

    try:
        together(put_back)  # a separate step: no rank looks for the tag before it is back
        return together(verify)[0]
    except SlideError as error:
        other = together(lambda: newest_whole_tag(directory, {chosen}) if is_publisher(engine) else None)[0]
        hint = "no other tag is known to be whole" if other is None else f"the newest whole tag there is {other!r}"
        raise SlideError(f"{error} ({hint})") from error


def _checked(directory: Path, tag: str) -> str:
    try:
        return checked_tag(tag)
    except SlideError as error:
        raise SlideError(f"{directory} has no such checkpoint: {error}") from error


def saved_ranks(path: Path) -> int:
    """Return the number of ranks that have saved the tag at `path`."""
    # Counted by rank numbers: the Hub's cache has each file twice, as a blob and as a link to it.
    return len(set(_RANK.findall(" ".join(file.name for file in path.glob(_OPTIMIZER)))))


def _verify(engine: Any, directory: Path, tag: str, every_rank: Callable[[Path], bool]) -> None:
    path = directory / tag
    if not path.is_dir():
        raise SlideError(f"there is no checkpoint {path}; load a tag that is there")
    if not every_rank(path) and (saved := saved_ranks(path)) not in (0, ranks()):
        raise SlideError(
            f"the checkpoint {path} was saved by {saved} rank{'s' * (saved > 1)} and is loaded by {ranks()}, but the "
            "optimizer states of ZeRO-3 are divided by ranks; convert it with ds_to_universal.py and set "
            "checkpoint.load_universal to true, or pass load_optimizer_states=False to load_checkpoint for its weights"
        )
    files = [engine._get_zero_ckpt_name(str(directory), tag), engine._get_ckpt_name(str(directory), tag)]
    files += engine._get_all_ckpt_names(str(directory), tag)  # DeepSpeed merges them where there are several
    files += [str(path / name) for name in {compressed.NAME, compressed.name_of(engine.global_rank)}]
    if every_rank(path):
        files += [str(file) for pattern in (_MODEL, _OPTIMIZER) for file in path.glob(pattern)]
    names = {os.path.basename(file) for file in files}
    there = sorted({file for file in files if os.path.lexists(file)})
    manifest = Manifest.read(path)
    if manifest is None:
        _check_that_none_is_due(engine, path, there)
    else:
        manifest.check(path, names)
        manifest.check_listed(path, map(os.path.basename, there))
    _read_all(there)
    if not every_rank(path) and os.path.lexists(states := engine._get_ckpt_name(str(directory), tag)):
        require_same_parameters(engine, path, states)


def _check_that_none_is_due(engine: Any, path: Path, files: list[str]) -> None:
    """Raise SlideError for a tag without a manifest where one is required; warn where DS-Slide has written the tag."""
    if engine.optimizer.require_manifest:
        raise SlideError(
            f"the checkpoint {path} has no {NAME}, which ds_slide.checkpoint.require_manifest asks for; load another "
            "tag, or set require_manifest to false to load this one unchecked"
        )
    if is_publisher(engine) and any(map(is_ours, files)):
        logger.warning(
            "the checkpoint %s was written by DS-Slide, but its %s is missing: it is loaded without comparing sizes "
            "and sums; ds_slide.checkpoint.require_manifest refuses such a checkpoint",
            path,
            NAME,
        )


def _read_all(files: list[str]) -> None:
    """Raise SlideError for a file that will not load, while no rank has changed anything."""
    for file in files:
        MappedFiles().load(file, "cpu")


def ranks() -> int:
    return int(dist.get_world_size())
