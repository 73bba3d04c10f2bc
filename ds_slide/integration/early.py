"""The JSON where it is first read, and its checks there: a fault is refused before a model is loaded.

Two places read it earlier than `deepspeed.initialize`: `deepspeed.zero.Init`, where Hugging Face also loads models, and
`HfDeepSpeedConfig` of accelerate, which Trainer's TrainingArguments make. Values that are "auto" there are left to the
check of the engine, and so are all problems that depend on the model or the script's optimizer. axolotl, for example,
loads the model before it makes the TrainingArguments, which fill in the numbers.

Without the key "ds_slide" nothing else of DS-Slide is imported, let alone run: the functions import what they need.
"""

from __future__ import annotations

import copy
import functools
import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from ds_slide.config import SlideConfig

_read_configs: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def slide_config(ds_config: Any) -> SlideConfig | None:
    """Return the SlideConfig of a raw or parsed DeepSpeed config, None where DS-Slide is off. Raises SlideConfigError.

    A parsed config is read once for all callers. A raw config may change meanwhile: clients fill in its "auto" values.
    """
    if not hasattr(ds_config, "_param_dict"):
        return enabled_block(ds_config)
    if ds_config not in _read_configs:
        _read_configs[ds_config] = enabled_block(ds_config._param_dict)
    return _read_configs[ds_config]


def enabled_block(raw: Any) -> SlideConfig | None:
    """Return the "ds_slide" block of `raw`, None where it is absent or off. Raises SlideConfigError for a fault in it.

    Every entry point of DS-Slide calls it first. From the first call on, refusals end the process in one sentence.
    """
    if not isinstance(raw, Mapping) or "ds_slide" not in raw:
        return None
    from ds_slide.config import SlideConfig
    from ds_slide.errors import SlideConfigError, end_in_one_sentence

    try:
        slide = SlideConfig.from_deepspeed(raw)
    except SlideConfigError:
        end_in_one_sentence()
        raise
    if slide is not None:
        end_in_one_sentence()
    return slide


def check_types(raw: Any, *, filled: bool = True) -> SlideConfig | None:
    """Return the block as `enabled_block` does; also raise SlideConfigError for sections of a wrong type.

    `filled`: no "auto" will be replaced any more.
    """
    slide = enabled_block(raw)
    if slide is not None:
        from ds_slide.config.json_types import type_problems
        from ds_slide.integration.contract import raise_all

        raise_all(*type_problems(raw, filled=filled))
    return slide


def check_json(raw: Any) -> None:
    """Raise SlideConfigError for settings that no engine with DS-Slide supports. `raw`: as written, with "auto"."""
    slide = check_types(raw, filled=False)
    if slide is None:
        return
    from ds_slide.config.json_types import AUTO
    from ds_slide.integration import contract

    if (stage := value_at(raw, "zero_optimization.stage", 0)) != AUTO:
        contract.require_stage(stage)
    contract.raise_all(*json_problems(raw, slide))


def json_problems(raw: Mapping[str, Any], slide: SlideConfig) -> Iterator[str]:
    """Yield what no engine with DS-Slide supports in the JSON beside its block, its types and the stage."""
    from ds_slide.config.json_types import AUTO
    from ds_slide.integration import contract
    from ds_slide.integration.refused import REFUSED_ENGINE_SETTINGS, REFUSED_ZERO_SETTINGS, setting_problems
    from ds_slide.plan.ssd_settings import ssd_problems

    # The values of the JSON by the names that the checks of the engine use, without "auto".
    rows = (*REFUSED_ENGINE_SETTINGS, *REFUSED_ZERO_SETTINGS)
    values = {row.name: value for row in rows if (value := value_at(raw, row.path)) not in (None, AUTO)}
    for name, path in (
        ("clip_grad", "gradient_clipping"),
        ("gradient_accumulation_steps", "gradient_accumulation_steps"),
        ("managed_gradient_accumulation", "managed_gradient_accumulation"),
        ("sequence_parallel_size", "sequence_parallel_size"),
        ("data_parallel_size", "data_parallel_size"),
    ):
        if isinstance(value := value_at(raw, path), int | float):
            values[name] = value
    values["fp16"] = value_at(raw, "fp16.enabled") is True
    offload = value_at(raw, "zero_optimization.offload_optimizer")
    values["offload_optimizer_config"] = (
        SimpleNamespace(**{str(key): value for key, value in offload.items()}) if isinstance(offload, Mapping) else None
    )
    values["torch_autocast"] = value_at(raw, "torch_autocast.enabled") is True
    values["torch_autocast_dtype"] = _dtype(value_at(raw, "torch_autocast.dtype"))
    values["zenflow_config"] = value_at(raw, "zero_optimization.zenflow")
    yield from setting_problems(values, rows)
    yield from contract.autocast_problems(values)
    yield from contract.sequence_problems(values, slide)
    yield from contract.offload_problems(values)
    if not _ssd_is_open(slide, raw):
        yield from ssd_problems(slide, raw)
    yield from contract.state_dtype_problems(slide)
    yield from contract.deferral_problems(values, slide)


def _ssd_is_open(slide: SlideConfig, raw: Mapping[str, Any]) -> bool:
    """Whether the existence or the place of an SSD tier is still to be filled in."""
    from ds_slide.config.json_types import AUTO, SECTIONS, device_of

    sections = [value_at(raw, f"zero_optimization.{name}") for name in SECTIONS]
    if any(device_of(section) == AUTO for section in sections):
        return True
    on_nvme = [section for section in sections if device_of(section) == "nvme"]
    return slide.nvme_path is None and any(section.get("nvme_path") == AUTO for section in on_nvme)


def _dtype(name: Any) -> Any:
    """Return the data type that `name` means for DeepSpeed; `name` itself where it is none, which DeepSpeed reports."""
    if name is None:  # the import takes a second
        return None
    from deepspeed.runtime.config import DtypeEnum

    try:
        return DtypeEnum(name).value
    except ValueError:
        return name


def value_at(raw: Any, path: str, default: Any = None) -> Any:
    """Return the value at a JSON path ("a.b"), or `default` where there is none."""
    for key in path.split("."):
        if not isinstance(raw, Mapping) or key not in raw:
            return default
        raw = raw[key]
    return raw


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
# The wrapped readers: DeepSpeed's parser, `HfDeepSpeedConfig` and `zero.Init`.

_wrapped: set[type] = set()
_in_zero_init: ContextVar[bool] = ContextVar("zero.Init reads its JSON", default=False)


def around(owner: Any, name: str, context: Callable[..., AbstractContextManager[Any]]) -> None:
    """Let the method `name` of the class `owner` run inside `context`, which gets the method's arguments. Where the
    method is gone, the constructor's check says so, but only for an engine with DS-Slide."""
    original = getattr(owner, name, None)
    if original is None:
        return

    @functools.wraps(original)
    def method(*args: Any, **kwargs: Any) -> Any:
        with context(*args, **kwargs):
            return original(*args, **kwargs)

    setattr(owner, name, method)


def install(module: ModuleType) -> None:
    """Wrap `HfDeepSpeedConfig` of the module `accelerate.utils.deepspeed`, the first place where Trainer reads the
    JSON. Idempotent."""
    if module.HfDeepSpeedConfig not in _wrapped:
        _wrapped.add(module.HfDeepSpeedConfig)
        around(module.HfDeepSpeedConfig, "__init__", _both_checks)


@contextmanager
def _both_checks(made: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
    # The constructor reads these types before any other check.
    check_types(as_written(args[0] if args else kwargs.get("config_file_or_dict")), filled=False)
    yield
    check_json(getattr(made, "config", None))


def install_in_parser(parser: Any) -> None:
    """Let `DeepSpeedConfig` check the types of the JSON before it reads them."""
    around(parser, "_initialize_params", _types_are_checked)


@contextmanager
def _types_are_checked(_parsed: Any, raw: Any, *_args: Any, **_kwargs: Any) -> Iterator[None]:
    # In zero.Init, values of the JSON may be filled in later.
    check_types(raw, filled=not _in_zero_init.get())
    yield


def install_in_zero_init(init: Any) -> None:
    """Let `zero.Init` check the JSON; under DS-Slide, parameters on NVMe wait in host memory until the plan places
    them.

    Stock would compile and start its own swapper at the first `zero.Init`, write every parameter to its own file and
    leave the files behind; DS-Slide would only read them back.
    """
    original = init.__init__
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
                check_json(raw)
                given.arguments[name] = in_host_memory(raw)
                if given.arguments.get("remote_device") == "nvme":
                    given.arguments["remote_device"] = "cpu"
        token = _in_zero_init.set(True)
        try:
            original(*given.args, **given.kwargs)
        finally:
            _in_zero_init.reset(token)

    init.__init__ = __init__


def in_host_memory(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return `config` with `offload_param.device` "cpu" instead of "nvme"; the object given is not changed."""
    section = (config.get("zero_optimization") or {}).get("offload_param") or {}
    if section.get("device") != "nvme":
        return config
    changed = copy.deepcopy(dict(config))
    changed["zero_optimization"]["offload_param"] = {"device": "cpu", "pin_memory": section.get("pin_memory", False)}
    return changed
