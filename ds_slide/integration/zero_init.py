"""`deepspeed.zero.Init` with parameters on NVMe: under DS-Slide they wait in host memory until the plan places them.

Stock would compile and start its own swapper at the first `zero.Init`, write every parameter to its own file and leave
the files behind; DS-Slide would only read them back. Without the key "ds_slide" nothing changes.

The JSON may still have "auto" there: axolotl loads the model before it makes Trainer's TrainingArguments, which fill in
the numbers.
"""

from __future__ import annotations

import copy
import functools
import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import ModuleType
from typing import Any

_reads_its_json: ContextVar[bool] = ContextVar("zero.Init reads its JSON", default=False)


def install_zero_init(init_class: Any, slide_config: Callable[[Any], Any]) -> None:
    """Wrap the constructor of `deepspeed.runtime.zero.partition_parameters.Init`. `slide_config`: None means off."""
    original = init_class.__init__
    signature = inspect.signature(original)

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            given = signature.bind(self, *args, **kwargs)
        except TypeError:
            original(self, *args, **kwargs)  # reports it
            return
        for name in ("config_dict_or_path", "config"):
            raw = as_written(given.arguments.get(name))
            if raw is not None and slide_config(raw) is not None:
                from ds_slide.integration.early import check_json

                check_json(raw)
                given.arguments[name] = in_host_memory(raw)
                if given.arguments.get("remote_device") == "nvme":
                    given.arguments["remote_device"] = "cpu"
        with _reading():
            original(*given.args, **given.kwargs)

    init_class.__init__ = __init__


def reads_its_json() -> bool:
    """Whether this thread is in the constructor of `zero.Init`, so that values of the JSON may be filled in later."""
    return _reads_its_json.get()


@contextmanager
def _reading() -> Iterator[None]:
    token = _reads_its_json.set(True)
    try:
        yield
    finally:
        _reads_its_json.reset(token)


def in_host_memory(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return `config` with `offload_param.device` "cpu" instead of "nvme"; the object given is not changed."""
    section = (config.get("zero_optimization") or {}).get("offload_param") or {}
    if section.get("device") != "nvme":
        return config
    changed = copy.deepcopy(dict(config))
    changed["zero_optimization"]["offload_param"] = {"device": "cpu", "pin_memory": section.get("pin_memory", False)}
    return changed


# ----------------------------------------------------------------------------------------------------------------------
# The DeepSpeed config as a script gives it, which may be a dictionary or the path of a JSON file.


def as_written(config: Any) -> Mapping[str, Any] | None:
    """Return the config as a dictionary; None where DeepSpeed has to judge it (absent, base64, unreadable)."""
    if isinstance(config, Mapping):
        return config
    if isinstance(config, str | Path) and os.path.isfile(config):  # a long base64 text is no file, and no error
        import hjson  # type: ignore[import-untyped]  # DeepSpeed's own reader: JSON with comments, commas at the end

        try:
            with open(config) as file:
                loaded = hjson.load(file, object_pairs_hook=_without_duplicates)
        except (OSError, ValueError, RecursionError):
            return None
        return loaded if isinstance(loaded, Mapping) else None
    return None


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object as DeepSpeed reads it. DeepSpeed's own hook cannot be imported without all of DeepSpeed."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key stands there twice")
    return found


# ----------------------------------------------------------------------------------------------------------------------
# The first place where Trainer reads the JSON: TrainingArguments make an HfDeepSpeedConfig of accelerate.

_wrapped_classes: set[type] = set()


def install(module: ModuleType) -> None:
    """Wrap `HfDeepSpeedConfig` of the module `accelerate.utils.deepspeed`. Idempotent."""
    config_class = module.HfDeepSpeedConfig
    if config_class in _wrapped_classes:
        return
    original = config_class.__init__

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        given = as_written(args[0] if args else kwargs.get("config_file_or_dict"))
        if given is not None and "ds_slide" in given:
            from ds_slide.integration.early import check_types

            check_types(given, filled=False)  # the constructor reads these types before any other check
        original(self, *args, **kwargs)
        config = getattr(self, "config", None)
        # Without the key nothing of DS-Slide is imported, let alone run.
        if isinstance(config, Mapping) and "ds_slide" in config:
            from ds_slide.integration.early import check_json

            check_json(config)

    config_class.__init__ = __init__
    _wrapped_classes.add(config_class)
