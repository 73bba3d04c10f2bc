"""A DeepSpeed JSON by itself: everything that an engine would refuse in it, and how it becomes one for DS-Slide."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ds_slide.config import CONFIG_KEY, SlideConfig, shown
from ds_slide.config.json_types import AUTO, SECTIONS, type_problems
from ds_slide.errors import SlideConfigError
from ds_slide.integration import update_rules
from ds_slide.integration.contract import optimizer_choice_problems, require_stage, rule_problems
from ds_slide.integration.early import json_problems, value_at


def refusals(raw: Mapping[str, Any]) -> list[str]:
    """Return a sentence for everything that an engine would refuse, empty for a JSON that it accepts.

    The model, the script's optimizer and values that are "auto" are not known here. The block counts as switched on.
    """
    found, slide = _block_refusals(raw)
    stage, name = value_at(raw, "zero_optimization.stage", 0), value_at(raw, "optimizer.type")
    if problems := list(type_problems(raw, filled=False)):
        # The other checks would read these sections as objects.
        found += problems
        kept = {key: value for key, value in _mapping(raw.get("zero_optimization")).items() if key not in SECTIONS}
        raw = {**raw, "zero_optimization": kept, "aio": {}}
        slide = slide.model_copy(update={"nvme_path": None})
    if stage != AUTO:
        try:
            require_stage(stage)
        except SlideConfigError as error:
            found.append(str(error))
    if isinstance(name, str) and name != AUTO:
        name = name.lower() if update_rules.known_as(name.lower()) else name  # as DeepSpeed reads it
        found += optimizer_choice_problems(name, None)
        found += rule_problems(slide, update_rules.asked_for(name, None))
    found += json_problems(raw, slide)
    return list(dict.fromkeys(found))  # some problems are found by two checks


def _block_refusals(raw: Mapping[str, Any]) -> tuple[list[str], SlideConfig]:
    """Return the refusals of the block, and the block without what is refused.

    The schema refuses one thing at a time. So the refused part is taken out until nothing is refused any more.
    """
    block, found = raw.get(CONFIG_KEY, {}), list[str]()
    if isinstance(block, Mapping):
        block = {**copy.deepcopy(dict(block)), "enabled": block.get("enabled", True) or True}
    beside = {key: value for key, value in raw.items() if key == "checkpoint"}
    while True:
        refused = _refusal({CONFIG_KEY: block, **beside})
        if isinstance(refused, SlideConfig):
            return found, refused
        found.append(refused)
        for smaller in _one_less(block) if isinstance(block, Mapping) else ():
            if _refusal({CONFIG_KEY: smaller, **beside}) != refused:
                block = smaller
                break
        else:
            block, beside = {"enabled": True}, {}


def _refusal(raw: Mapping[str, Any]) -> str | SlideConfig:
    try:
        slide = SlideConfig.from_deepspeed(raw)
    except SlideConfigError as error:
        return str(error)
    return slide or SlideConfig(enabled=True)


def _one_less(block: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the block without one of its values, the innermost first."""
    for key, value in block.items():
        for smaller in _one_less(value) if isinstance(value, Mapping) else ():
            yield {**block, key: smaller}
        others = {name: each for name, each in block.items() if name != key}
        yield {**others, "enabled": True} if key == "enabled" else others


# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Replaced:
    """Settings of stock's engine that DS-Slide has no use for. `section`: where they are, by JSON path."""

    section: str
    names: tuple[str, ...]
    why: str


REPLACED = (
    Replaced(
        "zero_optimization",
        ("stage3_prefetch_bucket_size", "stage3_max_live_parameters", "stage3_max_reuse_distance"),
        "whole blocks are fetched, by ds_slide.window",
    ),
    Replaced("zero_optimization", ("zenflow",), "updates are scheduled by ds_slide"),
    Replaced(
        "zero_optimization",
        (
            *("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients"),
            *("zero_hpz_partition_size", "mics_shard_size"),
        ),
        "ranks read weights in host memory or gather them, by ds_slide.share_weights",
    ),
    Replaced(
        "zero_optimization.offload_optimizer",
        ("ratio", "super_offload", "cpuadam_cores_perc"),
        "states are placed by ds_slide.gpu_states and ds_slide.host_memory",
    ),
    Replaced(
        "zero_optimization.offload_optimizer",
        ("buffer_count", "fast_init", "pipeline_read", "pipeline_write"),
        "the SSD tier has buffers of its own, by ds_slide.ssd_buffers",
    ),
    Replaced(
        "zero_optimization.offload_param",
        ("buffer_count", "buffer_size", "max_in_cpu"),
        "the SSD tier has buffers of its own, by ds_slide.weight_buffers",
    ),
    Replaced("aio", ("use_gds",), "states go through host memory, where they are updated"),
)
"""Both offload sections stay: they say where `deepspeed.zero.Init` puts weights, and open the SSD tier."""


def converted(raw: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the JSON with DS-Slide switched on and without what it replaces, and a sentence for each change."""
    made, notes = copy.deepcopy(dict(raw)), []
    zero = made.setdefault("zero_optimization", {})
    if not isinstance(zero, Mapping):
        raise SlideConfigError(
            f'zero_optimization is {shown(zero)}; expected an object such as {{"stage": 3}}: write it so first'
        )
    if zero.get("stage") not in (3, AUTO):
        notes.append(f"zero_optimization.stage: {shown(zero.get('stage', 0))} becomes 3, the stage of DS-Slide")
        made["zero_optimization"] = {"stage": 3, **{key: value for key, value in zero.items() if key != "stage"}}
    for row in REPLACED:
        section = value_at(made, row.section)
        for name in row.names if isinstance(section, dict) else ():
            if name in section:
                del section[name]
                notes.append(f"{row.section}.{name} goes: {row.why}")
    if made.get("aio") == {} and raw.get("aio") != {}:
        del made["aio"]
    block = made.get(CONFIG_KEY)
    if not isinstance(block, Mapping) or block.get("enabled") is not True:
        made[CONFIG_KEY] = {"enabled": True, **{k: v for k, v in _mapping(block).items() if k != "enabled"}}
        notes.append(f"{CONFIG_KEY}.enabled becomes true: DS-Slide's engine takes the place of stage 3")
    return made, notes


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
