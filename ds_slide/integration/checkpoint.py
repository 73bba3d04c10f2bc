"""Checkpoints of an engine that runs DS-Slide: crash-safe, and in bounded memory however large the model.

The files are DeepSpeed's, for its tools and for stock ZeRO-3. `checkpoint_save` and `load_checkpoint` have the order of
the work. In `ds_slide.checkpoint`, `archive`, `sums` and `restricted` write and read one file piece by piece;
`publish` and `manifest` make the files of all ranks one checkpoint, which is complete or absent.

The engine gets these as attributes of the object: the class, and with it every engine without the key, keeps
DeepSpeed's.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from deepspeed.checkpoint.constants import FP32_FLAT_GROUPS, OPTIMIZER_STATE_DICT
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

from ds_slide.checkpoint import compressed, restricted
from ds_slide.checkpoint.archive import PIECE
from ds_slide.checkpoint.state_buffers import write_frozen
from ds_slide.errors import SlideConfigError, SlideError
from ds_slide.integration.checkpoint_files import Reading, SlideCheckpointEngine, together
from ds_slide.integration.checkpoint_save import finish_save, save_checkpoint
from ds_slide.integration.checkpoint_tag import ranks, saved_ranks, universal_tag, whole_tag
from ds_slide.integration.engine_methods import override


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


# ----------------------------------------------------------------------------------------------------------------------
# `load_checkpoint`: checked before anything is changed, then copied piece by piece into the state buffers.

Loaded = tuple[str | None, dict[str, Any] | None]


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
        tag = universal_tag(engine, directory, tag, everything=everything)
        with _reading(engine):
            universal: Loaded = engine._load_checkpoint(str(load_dir), tag, **options)
            engine._load_zero_checkpoint(str(load_dir), tag, load_optimizer_states=everything)
            if everything:
                engine.optimizer.runtime.states_loaded()
        return universal
    if tag is None and not os.path.lexists(directory / "latest"):
        stock: Loaded = type(engine).load_checkpoint(engine, load_dir)  # warns and loads nothing
        return stock

    def through_module(path: Path) -> bool:
        return not everything and (custom_load_fn is not None or saved_ranks(path) != ranks())

    tag = whole_tag(engine, directory, tag, every_rank=through_module)
    whole_model = through_module(directory / tag)
    with _reading(engine) as reading:
        subspaces = _subspaces(units, directory / tag, reading, engine.global_rank) if everything else None
        with whole_model_loaded(engine, str(load_dir), tag) if whole_model else nullcontext():
            loaded: Loaded = engine._load_checkpoint(str(load_dir), tag, **options)
        if everything:
            _load_frozen(engine, reading)
            engine._load_zero_checkpoint(str(load_dir), tag, load_optimizer_states=True)
            if subspaces is not None:
                compressed.load(engine.optimizer.runtime, *subspaces, reading.files)
            engine.optimizer.runtime.states_loaded()
        elif whole_model:
            engine.optimizer._restore_from_bit16_weights()
        else:
            _load_frozen(engine, reading)
            _load_weights(engine, reading, str(load_dir), tag)
    return loaded


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
        if complete or ranks() == 1:
            engine.optimizer.checkpoint_event_epilogue()


def _load_frozen(engine: Any, reading: Reading) -> None:
    """Set the weights of the parameters that the optimizer does not own."""
    optimizer = engine.optimizer
    optimizer.runtime.begin_writing()
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
        optimizer.runtime.settle(unit)
        flat = saved.detach().reshape(-1)
        for start in range(0, flat.numel(), PIECE):
            with reading.files.using(flat[start : start + PIECE]) as values:
                write_frozen(unit, entry, start, values)
        written[unit.order] = unit
    for unit in written.values():
        optimizer.runtime.weights_changed(unit)


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
def whole_model_loaded(engine: Any, load_dir: str, tag: str) -> Iterator[None]:
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
