"""`load_checkpoint`: checked by all ranks before anything is changed, then copied piece by piece into state buffers.

The files are DeepSpeed's, for its tools and for stock ZeRO-3. In `ds_slide.checkpoint`, `archive`, `sums` and
`restricted` write and read one file piece by piece; `publish` and `manifest` make the files of all ranks one
checkpoint, which is complete or absent.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.checkpoint.constants import FP32_FLAT_GROUPS, OPTIMIZER_STATE_DICT
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

from ds_slide.checkpoint import client_states, compressed, restricted
from ds_slide.checkpoint.archive import PIECE, is_ours
from ds_slide.checkpoint.manifest import NAME, Manifest, newest_whole_tag
from ds_slide.checkpoint.publish import checked_tag, recover
from ds_slide.checkpoint.restricted import MappedFiles
from ds_slide.checkpoint.state_buffers import MASTER, write_frozen
from ds_slide.checkpoint.sums import tag_in
from ds_slide.checkpoint.universal import LATEST
from ds_slide.errors import SlideConfigError, SlideError
from ds_slide.integration.checkpoint_files import Reading, SlideCheckpointEngine, require_same_parameters, together
from ds_slide.integration.checkpoint_save import finish_save, is_publisher, save_checkpoint
from ds_slide.integration.engine_methods import override
from ds_slide.optim.client import ClientRule

logger = logging.getLogger(__name__)

_MODEL, _OPTIMIZER = "*_model_states.pt", "*_optim_states.pt"
_RANK = re.compile(r"zero_pp_rank_(\d+)_")
Loaded = tuple[str | None, dict[str, Any] | None]


def attach(engine: Any) -> None:
    """Give `engine`, whose optimizer is a SlideZeroOptimizer, DS-Slide's checkpoints. Raises SlideConfigError."""
    if type(engine.checkpoint_engine) is not TorchCheckpointEngine:
        raise SlideConfigError(
            f"the config asks for DeepSpeed's {type(engine.checkpoint_engine).__name__}, but DS-Slide writes "
            "checkpoints itself, piece by piece; remove checkpoint.writer and datastates_ckpt"
        )
    engine.checkpoint_engine = SlideCheckpointEngine()
    override(engine, save_checkpoint)
    override(engine, load_checkpoint)


def load_checkpoint(
    engine: Any,
    load_dir: str | Path,
    tag: Any = None,
    load_module_strict: bool = True,
    load_optimizer_states: bool = True,
    load_lr_scheduler_states: bool = True,
    load_module_only: bool = False,
    custom_load_fn: Callable[..., Any] | None = None,
) -> Loaded:
    """DeepSpeedEngine.load_checkpoint. Collective. Raises SlideError, with nothing changed, for a broken checkpoint.

    Without optimizer states the masters, rounded to the model's dtype, become the weights, as in stock. Unlike stock,
    they come from the requested tag, and also with `load_module_only` alone, where stock loads no weights at all.
    """
    directory = Path(load_dir)
    finish_save(engine)
    everything = load_optimizer_states and not load_module_only
    wanted = Wanted(everything, custom_load_fn is not None, dist.get_world_size(), load_module_strict)
    options = {
        "load_module_strict": load_module_strict,
        "load_lr_scheduler_states": load_lr_scheduler_states,
        "load_module_only": load_module_only,
        "custom_load_fn": custom_load_fn,
    }
    units = compressed.compressed_units(engine.optimizer.runtime.units)
    if engine.load_universal_checkpoint():
        if units and everything:
            raise SlideError(
                "a universal checkpoint has no moments in the subspaces of ds_slide.compression; pass "
                "load_optimizer_states=False to load_checkpoint for its weights, or remove ds_slide.compression"
            )
        if isinstance(engine.optimizer.rule, ClientRule) and everything:
            raise SlideError(
                f"a universal checkpoint has no states of {engine.optimizer.rule.name}; pass load_optimizer_states="
                "False to load_checkpoint for its weights, or load the checkpoint that it was made from"
            )
        tag = _universal_tag(engine, directory, tag, everything=everything)
        with _reading(engine):
            universal: Loaded = engine._load_checkpoint(str(load_dir), tag, **options)
            engine._load_zero_checkpoint(str(load_dir), tag, load_optimizer_states=everything)
            if everything:
                engine.optimizer.runtime.access.states_loaded()
        return universal
    # Together: in node-local storage the file may be missing on one host.
    if tag is None and not any(together(lambda: os.path.lexists(directory / "latest"))):
        stock: Loaded = type(engine).load_checkpoint(engine, load_dir)  # warns and loads nothing
        return stock
    tag = whole_tag(engine, directory, tag, wanted)
    # `_ranks_of` asks all ranks, which a load with optimizer states need not do again.
    whole_model = not everything and wanted.whole_model(_ranks_of(directory / tag))
    with _reading(engine) as reading:
        subspaces = _subspaces(units, directory / tag, reading, engine.global_rank) if everything else None
        own = _of_client(engine, directory / tag, reading) if everything else None
        with _whole_model_loaded(engine, str(load_dir), tag) if whole_model else nullcontext():
            loaded: Loaded = engine._load_checkpoint(str(load_dir), tag, **options)
        if everything:
            _load_frozen(engine, reading)
            engine._load_zero_checkpoint(str(load_dir), tag, load_optimizer_states=True)
            if subspaces is not None:
                compressed.load(engine.optimizer.runtime, *subspaces, reading.files)
            if own is not None:
                client_states.load(engine.optimizer.runtime.units, own)
            engine.optimizer.runtime.access.states_loaded()
        elif whole_model:
            engine.optimizer._restore_from_bit16_weights()
        else:
            _load_frozen(engine, reading)
            _load_weights(engine, reading, str(load_dir), tag)
    return loaded


@dataclass(frozen=True)
class Wanted:
    """The states that a load takes. `everything`: the optimizer's, too. `custom`: the script loads the module. `ranks`:
    the number of ranks that load. `strict`: no weight may be missing."""

    everything: bool
    custom: bool
    ranks: int
    strict: bool = True

    def whole_model(self, saved: frozenset[str]) -> bool:
        """Whether the whole model is read from the files of all ranks, `saved`, and loaded into the module."""
        return not self.everything and (self.custom or len(saved) != self.ranks)


def saved_ranks(path: Path) -> frozenset[str]:
    """Return the numbers of the ranks that have saved the tag at `path`, as far as their files are on this host."""
    # Numbers are counted, not files: the Hub's cache has each file twice, as a blob and as a link to it.
    return frozenset(_RANK.findall(" ".join(file.name for file in path.glob(_OPTIMIZER))))


def _ranks_of(path: Path) -> frozenset[str]:
    """Return the numbers of the ranks that have saved the tag at `path`, on all hosts. Collective."""
    return frozenset().union(*together(lambda: saved_ranks(path)))


# ----------------------------------------------------------------------------------------------------------------------
# The tag that a load takes, and its checks by all ranks together before anything is changed.


def _universal_tag(engine: Any, directory: Path, tag: Any, *, everything: bool) -> str:
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
        keys = (MASTER, *optimizer.rule.state_names) if everything else (MASTER,)
        optimizer.universal_checkpoint(path).check(optimizer.sub_groups, len(optimizer.optimizer.param_groups), keys)
        return chosen

    return together(verify)[0]


def whole_tag(engine: Any, directory: Path, tag: Any, wanted: Wanted) -> str:
    """Return the tag to load, when the files that this load reads match the manifest and hold nothing that is refused.
    Collective. Raises SlideError."""
    chosen = str(tag)
    saved: frozenset[str] = frozenset()

    def put_back() -> None:
        try:
            if is_publisher(engine):
                recover(directory)
        except OSError as error:
            where = error.filename or directory
            raise SlideError(f"the checkpoint's {where} cannot be read ({error.strerror})") from error

    def choose() -> str:
        nonlocal chosen
        if tag is None:
            chosen = tag_in(directory / "latest")
        return chosen

    def verify() -> None:
        try:
            _verify(engine, directory, _checked(directory, chosen), wanted, saved)
        except OSError as error:
            where = error.filename or directory / chosen
            raise SlideError(f"the checkpoint's {where} cannot be read ({error.strerror})") from error

    try:
        together(put_back)  # a separate step: no rank looks for the tag before it is back
        chosen_by = together(choose)
        if len(set(chosen_by)) > 1:
            rank, found = next((rank, each) for rank, each in enumerate(chosen_by) if each != chosen_by[0])
            raise SlideError(
                f"{directory / 'latest'} names {chosen_by[0]!r} on rank 0's host and {found!r} on rank {rank}'s; pass "
                "load_checkpoint a tag that all hosts have"
            )
        saved = _ranks_of(directory / chosen)
        together(verify)
        return chosen
    except SlideError as error:
        other = together(lambda: newest_whole_tag(directory, {chosen}) if is_publisher(engine) else None)[0]
        hint = "no other tag is known to be whole" if other is None else f"the newest whole tag there is {other!r}"
        raise SlideError(f"{error} ({hint})") from error


def _checked(directory: Path, tag: str) -> str:
    try:
        return checked_tag(tag)
    except SlideError as error:
        raise SlideError(f"{directory} has no such checkpoint: {error}") from error


def _verify(engine: Any, directory: Path, tag: str, wanted: Wanted, saved: frozenset[str]) -> None:
    """Check the files on this host. `saved`: the ranks that have saved the tag, on all hosts."""
    path = directory / tag
    if not path.is_dir():
        raise SlideError(f"there is no checkpoint {path}; load a tag that is there")
    whole_model, count = wanted.whole_model(saved), len(saved)
    if whole_model and (missing := sorted(saved - saved_ranks(path), key=int)):
        raise SlideError(
            f"the checkpoint {path} has no files of rank {missing[0]} on rank {engine.global_rank}'s host, and a load "
            "of the whole model reads those of all ranks; copy the files of all hosts to each"
        )
    if not whole_model and count not in (0, wanted.ranks):
        raise SlideError(
            f"the checkpoint {path} was saved by {count} rank{'s' * (count > 1)} and is loaded by {wanted.ranks}, but "
            "the optimizer states of ZeRO-3 are divided by ranks; convert it with ds_to_universal.py and set "
            "checkpoint.load_universal to true, or pass load_optimizer_states=False to load_checkpoint for its weights"
        )
    files = [engine._get_zero_ckpt_name(str(directory), tag), engine._get_ckpt_name(str(directory), tag)]
    files += engine._get_all_ckpt_names(str(directory), tag)  # DeepSpeed merges them where there are several
    own = {compressed.NAME, compressed.name_of(engine.global_rank), client_states.name_of(engine.global_rank)}
    files += [str(path / name) for name in own]
    if whole_model:
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
    if not whole_model and os.path.lexists(states := engine._get_ckpt_name(str(directory), tag)):
        require_same_parameters(engine, path, states, strict=wanted.strict)


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


# ----------------------------------------------------------------------------------------------------------------------
# The states of a load, copied piece by piece.


def _subspaces(
    units: compressed.Compressed, tag: Path, reading: Reading, rank: int
) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Return a tag's content for the subspaces of `units`, from the files of rank 0 and of `rank`; None where no unit
    is compressed. Collective. Raises SlideError."""
    path, own = tag / compressed.NAME, tag / compressed.name_of(rank)
    if not units:
        if os.path.lexists(path):
            raise SlideError(
                f"{tag} was saved with ds_slide.compression, so that it has no moments of the matrices that were "
                "compressed; set that, or pass load_optimizer_states=False to load_checkpoint for its weights"
            )
        return None
    if not os.path.lexists(path):
        raise SlideError(
            f"{tag} has no {path.name}: it was saved without ds_slide.compression, which this run has; remove that, or "
            "pass load_optimizer_states=False to load_checkpoint for its weights"
        )
    saved: dict[str, Any] = reading.files.load(str(path), "cpu")
    compressed.check(units, saved, str(path))

    def require_own() -> None:
        if not os.path.lexists(own):
            raise SlideError(
                f"{tag} has no {own.name}, which holds rank {rank}'s part of the moments; load another tag, or pass "
                "load_optimizer_states=False to load_checkpoint for its weights"
            )

    together(require_own)  # a file that is missing on one rank must not leave another rank waiting
    return saved, reading.files.load(str(own), "cpu") if rank else saved


def _of_client(engine: Any, tag: Path, reading: Reading) -> dict[str, Any] | None:
    """Return this rank's states of a client's optimizer in a tag, checked on all ranks; None without such an optimizer.
    Collective. Raises SlideError."""
    rule, path = engine.optimizer.rule, tag / client_states.name_of(engine.global_rank)

    def read() -> dict[str, Any] | None:
        is_there = os.path.lexists(path)
        if not isinstance(rule, ClientRule):
            if is_there:
                raise SlideError(
                    f"{tag} was saved with an optimizer of the script's own, whose states are in {path.name}, but this "
                    f"run has {rule.name}; load it with the optimizer that it was saved with, or pass "
                    "load_optimizer_states=False to load_checkpoint"
                )
            return None
        if not is_there:
            raise SlideError(
                f"{tag} has no {path.name} with the states of {rule.name}; load it with the optimizer that it was "
                "saved with, or pass load_optimizer_states=False to load_checkpoint"
            )
        saved: dict[str, Any] = reading.files.load(str(path), "cpu")
        client_states.check(engine.optimizer.runtime.units, rule, saved, str(path))
        return saved

    own: list[dict[str, Any] | None] = []
    together(lambda: own.append(read()))  # each rank keeps its own states: no other rank needs them
    return own[0]


@contextmanager
def _reading(engine: Any) -> Iterator[Reading]:
    """Keep every parameter partitioned meanwhile, and map the files that are loaded."""
    engine.optimizer.checkpoint_event_prologue()
    complete = False
    try:
        with engine.checkpoint_engine.reading() as reading:
            engine.optimizer.mapped_files = reading.files
            yield reading
        complete = True
    finally:
        engine.optimizer.mapped_files = None
        # The epilogue needs all ranks, and a rank that has failed alone must not wait for the others.
        if complete or dist.get_world_size() == 1:
            engine.optimizer.checkpoint_event_epilogue()


def _load_frozen(engine: Any, reading: Reading) -> None:
    """Set the weights of the parameters that the optimizer does not own."""
    optimizer = engine.optimizer
    optimizer.runtime.access.begin_writing()
    written = {}
    for parameter, (unit, entry) in optimizer.protocol.places.items():
        saved = reading.frozen.get(engine.param_names[parameter])
        if entry.trainable or saved is None:
            continue
        if saved.numel() != entry.partition_numel:
            raise SlideError(
                f"the checkpoint holds {saved.numel():,} elements of {entry.name} on this rank instead of "
                f"{entry.partition_numel:,}; load it with the model and the number of ranks that it was saved with"
            )
        optimizer.runtime.access.settle(unit)
        flat = saved.detach().reshape(-1)
        for start in range(0, flat.numel(), PIECE):
            with reading.files.using(flat[start : start + PIECE]) as values:
                write_frozen(unit, entry, start, values)
        written[unit.order] = unit
    for unit in written.values():
        optimizer.runtime.access.weights_changed(unit)


def _load_weights(engine: Any, reading: Reading, load_dir: str, tag: str) -> None:
    """Set the weights from this rank's masters; moments and step count stay."""
    saved = reading.load(engine._get_zero_ckpt_name(load_dir, tag), "cpu")[OPTIMIZER_STATE_DICT]
    engine.optimizer.sub_groups.load_masters(saved[FP32_FLAT_GROUPS], reading.files, rounded=True)


# ----------------------------------------------------------------------------------------------------------------------
# The whole model in fp32 out of a ZeRO-3 checkpoint of any number of ranks, as DeepSpeed's `zero_to_fp32` makes it.
#
# DeepSpeed's own load calls that module on the tag that `latest` names, and its torch.load runs any code in a file.
# Here a second copy of the module reads the requested tag, restricted.

_MODULE = "deepspeed.utils.zero_to_fp32"


class _Torch(ModuleType):
    """torch with another `load`."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def load(path: str, map_location: Any = None, *_others: Any, mmap: bool | None = False, **_options: Any) -> Any:
        return restricted.load(path, map_location, mapped=bool(mmap))


@contextmanager
def _whole_model_loaded(engine: Any, load_dir: str, tag: str) -> Iterator[None]:
    """Let `engine` load the whole model out of `tag` into its module meanwhile."""
    owner = type(engine)

    def load_module_state_dict(checkpoint: dict[str, Any], **options: Any) -> None:
        checkpoint = {**checkpoint, "module": _state_dict(load_dir, tag)}
        owner.load_module_state_dict(engine, checkpoint, **{**options, "fetch_z3_params": True})

    engine.load_module_state_dict = load_module_state_dict
    try:
        yield
    finally:
        del engine.load_module_state_dict


def _state_dict(load_dir: str, tag: str) -> dict[str, Any]:
    result: dict[str, Any] = _zero_to_fp32().get_fp32_state_dict_from_zero_checkpoint(load_dir, tag)
    return result


@functools.cache
def _zero_to_fp32() -> Any:
    spec = importlib.util.find_spec(_MODULE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)  # not in sys.modules: the module of other code stays as it was
    spec.loader.exec_module(module)
    module.torch = _Torch("torch")  # type: ignore[attr-defined]
    return module
