"""`load_checkpoint`: checked before anything is changed, then copied piece by piece into the planes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from deepspeed import comm as dist
from deepspeed.checkpoint.constants import FP32_FLAT_GROUPS, OPTIMIZER_STATE_DICT

from ds_slide.errors import SlideError
from ds_slide.integration.checkpoint_files import Reading
from ds_slide.integration.checkpoint_manifest import Manifest, newest_whole_tag
from ds_slide.integration.checkpoint_pickle import PIECE
from ds_slide.integration.checkpoint_place import checked_tag, recover
from ds_slide.integration.checkpoint_ranks import together
from ds_slide.integration.checkpoint_save import finish_save, is_publisher
from ds_slide.integration.checkpoint_universal import LATEST
from ds_slide.integration.planes import MASTER, STATE_KEYS, write_frozen

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

    Without optimizer states the masters, rounded to the model's dtype, become the weights, as in stock; but those of
    the tag that is asked for, and with `load_module_only` alone too, where stock loads no weights at all.
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
    if engine.load_universal_checkpoint():
        tag = _universal_tag(engine, directory, tag, everything=everything)
        with _reading(engine):
            universal: Loaded = engine._load_checkpoint(str(load_dir), tag, **options)
            engine._load_zero_checkpoint(str(load_dir), tag, load_optimizer_states=everything)
            if everything:
                engine.optimizer.runtime.states_loaded()
        return universal
    if tag is None and not (directory / "latest").is_file():
        stock: Loaded = type(engine).load_checkpoint(engine, load_dir)  # warns and loads nothing
        return stock
    tag = _whole_tag(engine, directory, tag, every_rank=not everything)
    with _reading(engine) as reading:
        through_module = not everything and (custom_load_fn is not None or _ranks_of(directory / tag) != _ranks())
        if through_module:
            _require_latest(directory, tag)
        # False makes DeepSpeed build the whole fp32 model in memory. Nothing else depends on it under ZeRO-3.
        options["load_optimizer_states"] = not through_module
        loaded: Loaded = engine._load_checkpoint(str(load_dir), tag, **options)
        if everything:
            _load_frozen(engine, reading)
            engine._load_zero_checkpoint(str(load_dir), tag, load_optimizer_states=True)
            engine.optimizer.runtime.states_loaded()
        elif through_module:
            engine.optimizer._restore_from_bit16_weights()
        else:
            _load_frozen(engine, reading)
            _load_weights(engine, reading, str(load_dir), tag)
    return loaded


@contextmanager
def _reading(engine: Any) -> Iterator[Reading]:
    """Meanwhile every parameter is partitioned, and the files that are loaded are mapped."""
    engine.optimizer.checkpoint_event_prologue()
    complete = False
    try:
        with engine.checkpoint_engine.reading() as reading:
            engine.optimizer.mapped_files = reading.files
            yield reading
        complete = True
    finally:
        engine.optimizer.mapped_files = None
        # Alone, a rank that has failed must not wait for the others, which this needs.
        if complete or _ranks() == 1:
            engine.optimizer.checkpoint_event_epilogue()


def _universal_tag(engine: Any, directory: Path, tag: Any, *, everything: bool) -> str:
    """The universal tag to load, when each of its files holds what this model needs."""

    def verify() -> str:
        chosen = str(tag)
        try:
            if tag is None:
                chosen = (directory / LATEST).read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise SlideError(
                f"{directory / LATEST}, which names the universal checkpoint to load, cannot be read ({error}); "
                "convert a checkpoint with ds_to_universal.py, pass its tag, or set checkpoint.load_universal to false"
            ) from error
        path = directory / chosen
        if not engine._get_all_ckpt_names(str(directory), chosen):
            raise SlideError(
                f"{path} has no file zero_pp_rank_0_mp_rank_00_model_states.pt, so it is no universal checkpoint of "
                "ZeRO-3; convert one with ds_to_universal.py, or set checkpoint.load_universal to false"
            )
        optimizer = engine.optimizer
        keys = (MASTER, *STATE_KEYS) if everything else (MASTER,)
        optimizer.universal_checkpoint(path).check(optimizer.sub_groups, len(optimizer.optimizer.param_groups), keys)
        return chosen

    return together(verify)[0]


def _whole_tag(engine: Any, directory: Path, tag: Any, *, every_rank: bool) -> str:
    """The tag to load, when what this load reads of it is as the manifest says."""
    chosen = str(tag)

    def verify() -> str:
        nonlocal chosen
        try:
            if is_publisher(engine):
                recover(directory)
            if tag is None:
                chosen = (directory / "latest").read_text().strip()
            _verify(engine, directory, checked_tag(chosen), every_rank=every_rank)
        except (OSError, UnicodeDecodeError) as error:
            raise SlideError(f"the checkpoint {directory / chosen} cannot be read ({error})") from error
        return chosen

    try:
        return together(verify)[0]
    except SlideError as error:
        other = together(lambda: newest_whole_tag(directory, {chosen}) if is_publisher(engine) else None)[0]
        hint = "no other tag is known to be whole" if other is None else f"the newest whole tag there is {other!r}"
        raise SlideError(f"{error} ({hint})") from error


def _verify(engine: Any, directory: Path, tag: str, *, every_rank: bool) -> None:
    path = directory / tag
    if not path.is_dir():
        raise SlideError(f"there is no checkpoint {path}; load a tag that is there")
    manifest = Manifest.read(path)
    if manifest is None:
        return
    names = (engine._get_ckpt_name(str(directory), tag), engine._get_zero_ckpt_name(str(directory), tag))
    own = {Path(name).name for name in names}
    others = every_rank and _ranks_of(path) != _ranks()
    manifest.check(path, lambda name: others or name in own)


def _ranks() -> int:
    return int(dist.get_world_size())


def _ranks_of(path: Path) -> int:
    """Number of ranks that have saved the tag at `path`."""
    return len(list(path.glob("*_optim_states.pt")))


def _require_latest(directory: Path, tag: str) -> None:
    latest = directory / "latest"
    if not latest.is_file() or latest.read_text().strip() != tag:
        raise SlideError(
            f"DeepSpeed takes the weights for custom_load_fn, and for another number of ranks, from the tag in "
            f"{latest}, which is not {tag!r}; write {tag!r} into that file"
        )


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
