"""Checks of the JSON alone, which refuse a fault where the JSON is first read: before a model is loaded.

Two places read it earlier than `deepspeed.initialize`: `deepspeed.zero.Init`, where Hugging Face also loads models, and
`HfDeepSpeedConfig` of accelerate, which Trainer's TrainingArguments make. Values that are "auto" there are left to the
check of the engine, and so are all problems that depend on the model or the script's optimizer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

from deepspeed.runtime.config import DtypeEnum

from ds_slide.config import SlideConfig
from ds_slide.config.json_types import AUTO, SECTIONS, device_of, type_problems
from ds_slide.errors import SlideConfigError
from ds_slide.report.refusals import end_in_one_sentence


def enabled_block(raw: Mapping[str, Any]) -> SlideConfig | None:
    """Return the "ds_slide" block of `raw`, None where it is off. Raises SlideConfigError for a fault in it.

    Every entry point of DS-Slide calls it first. From the first call on, refusals end the process in one sentence.
    """
    try:
        slide = SlideConfig.from_deepspeed(raw)
    except SlideConfigError:
        end_in_one_sentence()
        raise
    if slide is not None:
        end_in_one_sentence()
    return slide


def check_types(raw: Mapping[str, Any], *, filled: bool = True) -> SlideConfig | None:
    """Return the block as `enabled_block` does; also raise SlideConfigError for sections of a wrong type.

    `filled`: no "auto" will be replaced any more.
    """
    slide = enabled_block(raw)
    if slide is not None:
        from ds_slide.integration.contract import raise_all

        raise_all(*type_problems(raw, filled=filled))
    return slide


def check_json(raw: Mapping[str, Any]) -> None:
    """Raise SlideConfigError for settings that no engine with DS-Slide supports. `raw`: as written, with "auto"."""
    slide = check_types(raw, filled=False)
    if slide is None:
        return
    from ds_slide.integration import contract
    from ds_slide.integration.refused import REFUSED_ENGINE_SETTINGS, REFUSED_ZERO_SETTINGS, setting_problems
    from ds_slide.plan.ssd_settings import ssd_problems

    if (stage := _at(raw, "zero_optimization.stage", 0)) != AUTO:
        contract.require_stage(stage)
    # The values of the JSON by the names that the checks of the engine use, without "auto".
    rows = (*REFUSED_ENGINE_SETTINGS, *REFUSED_ZERO_SETTINGS)
    values = {row.name: value for row in rows if _is_set(value := _at(raw, row.path))} | _numbers(raw)
    offload = _at(raw, "zero_optimization.offload_optimizer")
    values["offload_optimizer_config"] = (
        SimpleNamespace(**{str(key): value for key, value in offload.items()}) if isinstance(offload, Mapping) else None
    )
    values["torch_autocast"] = _at(raw, "torch_autocast.enabled") is True
    values["torch_autocast_dtype"] = _dtype(_at(raw, "torch_autocast.dtype"))
    values["zenflow_config"] = _at(raw, "zero_optimization.zenflow")
    contract.raise_all(
        *setting_problems(values, rows),
        *contract.autocast_problems(values),
        *contract.offload_problems(values),
        *(() if _ssd_is_open(slide, raw) else ssd_problems(slide, raw)),
        *contract.state_dtype_problems(slide),
        *contract.holding_problems(values, slide),
    )


def _ssd_is_open(slide: SlideConfig, raw: Mapping[str, Any]) -> bool:
    """Whether the existence or the place of an SSD tier is still to be filled in."""
    sections = [_at(raw, f"zero_optimization.{name}") for name in SECTIONS]
    if any(device_of(section) == AUTO for section in sections):
        return True
    on_nvme = [section for section in sections if device_of(section) == "nvme"]
    return slide.nvme_path is None and any(section.get("nvme_path") == AUTO for section in on_nvme)


def _dtype(name: Any) -> Any:
    """Return the data type that `name` means for DeepSpeed; `name` itself where it is none, which DeepSpeed reports."""
    try:
        return DtypeEnum(name).value
    except ValueError:
        return name


def _numbers(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that `holding_problems` reads."""
    return dict(_set_numbers(raw)) | {"fp16": _at(raw, "fp16.enabled") is True}


def _set_numbers(raw: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, path in (
        ("clip_grad", "gradient_clipping"),
        ("gradient_accumulation_steps", "gradient_accumulation_steps"),
        ("managed_gradient_accumulation", "managed_gradient_accumulation"),
    ):
        if isinstance(value := _at(raw, path), int | float):
            yield name, value


def _at(raw: Any, path: str, default: Any = None) -> Any:
    for key in path.split("."):
        if not isinstance(raw, Mapping) or key not in raw:
            return default
        raw = raw[key]
    return raw


def _is_set(value: Any) -> bool:
    return value is not None and value != AUTO
