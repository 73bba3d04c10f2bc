"""The plan of an engine, from a DeepSpeed JSON and a model on the meta device, without an engine.

The JSON goes through DeepSpeed's parser and DS-Slide's checks. The same functions as for an engine make its units,
settings and plan.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed import set_optimizer_flags
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import nn

from ds_slide.config import CONFIG_KEY, SlideConfig, shown
from ds_slide.config.json_types import AUTO
from ds_slide.errors import SlideConfigError
from ds_slide.integration import update_rules
from ds_slide.integration.assemble import accumulates, autocast_is_enabled, divided, gpu_states_of, plan_of
from ds_slide.integration.contract import check_deepspeed_config, raise_all
from ds_slide.integration.early import check_types
from ds_slide.integration.refused import compressed_ranks_problems
from ds_slide.model.carried import TRAINED_DTYPES
from ds_slide.optim.adamw import ADAMW
from ds_slide.optim.muon import MuonRule
from ds_slide.optim.muon_batch import may_have_kernel
from ds_slide.plan.forecast import Room
from ds_slide.plan.memory import Budgets, Plan
from ds_slide.plan.needs import Needs
from ds_slide.plan.ssd_settings import ssd_settings
from ds_slide.runtime.core.settings import RuntimeSettings, UnitPlan

FILLED = {
    "gradient_clipping": 1.0,
    "gradient_accumulation_steps": 1,
    "bf16.enabled": True,
    "fp16.enabled": False,
    "zero_optimization.stage": 3,
}
"""Trainer's default values for "auto", except bf16, which scripts switch on. Other settings that are "auto" do not
change the plan."""


BATCH_SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


@dataclass(frozen=True)
class Planned:
    """The plan of an engine, and the data that it is made from."""

    plan: Plan
    needs: Needs
    settings: RuntimeSettings
    unit_plans: Sequence[UnitPlan]
    micro_batches: int
    raw: Mapping[str, Any]
    """The JSON without its "auto" values."""
    notes: Sequence[str]
    """The assumptions, a sentence each."""


def filled(raw: Mapping[str, Any], batch: int | None, ranks: int) -> tuple[dict[str, Any], list[str]]:
    """Return the JSON with a value for every "auto", and a sentence for each value that counts.

    `batch`: None for the JSON's batch. Raises SlideConfigError where neither gives it.
    """
    config, notes = copy.deepcopy(dict(raw)), []
    block = config.pop(CONFIG_KEY, None)
    # Each "auto" is removed, or replaced by Trainer's default where it changes the plan.
    for path in list(_autos(config)):
        *parents, key = path.split(".")
        section = config
        for parent in parents:
            section = section[parent]
        del section[key]
        if path in FILLED:
            by_script = path == "bf16.enabled"
            section[key] = not _is_fp16(config) if by_script else FILLED[path]
            source = "TrainingArguments say it" if by_script else "the default of transformers' Trainer"
            notes.append(f'{path} is "auto" and taken for {shown(section[key])}; {source}')
    # Batch sizes are whole numbers that agree with each other.
    for key in BATCH_SIZES:
        if key in config and (type(config[key]) is not int or config[key] < 1):
            raise SlideConfigError(f"{key} is {shown(config[key])}; expected a whole number above 0")
    whole = config.pop("train_batch_size", None)
    batch = batch or _micro_batch(config, whole, ranks)
    if whole and "gradient_accumulation_steps" not in config:
        config["gradient_accumulation_steps"] = max(1, whole // (batch * ranks))
    config["train_micro_batch_size_per_gpu"] = batch
    if block is not None:
        config[CONFIG_KEY] = block
    return config, notes


def _is_fp16(config: Mapping[str, Any]) -> bool:
    section = config.get("fp16")
    return isinstance(section, Mapping) and section.get("enabled") is True


def _micro_batch(config: Mapping[str, Any], whole: int | None, ranks: int) -> int:
    """Return the sequences of a micro-batch from the JSON, as DeepSpeed reads it. `whole`: its train_batch_size."""
    batch: int | None = config.get("train_micro_batch_size_per_gpu")
    times: int | None = config.get("gradient_accumulation_steps")
    if whole is None:
        if batch is None:
            raise SlideConfigError("the JSON has no number for train_micro_batch_size_per_gpu; give it, or --batch")
        return batch
    found = batch or whole // (ranks * (times or 1))
    if found * ranks * (times or whole // max(1, found * ranks)) != whole:
        raise SlideConfigError(
            f"train_batch_size is {whole}, which is not train_micro_batch_size_per_gpu ({batch or 'not given'}) times "
            f"gradient_accumulation_steps ({times or 'not given'}) times {ranks} of --ranks; change one of them"
        )
    return found


def _autos(section: Mapping[str, Any], path: str = "") -> Any:
    for key, value in section.items():
        if value == AUTO:
            yield f"{path}{key}"
        elif isinstance(value, Mapping):
            yield from _autos(value, f"{path}{key}.")


def with_block(raw: Mapping[str, Any], **settings: Any) -> dict[str, Any]:
    """Return the JSON with other values in its "ds_slide" block."""
    return {**raw, CONFIG_KEY: {**raw.get(CONFIG_KEY, {}), **settings}}


def plan_json(model: nn.Module, raw: Mapping[str, Any], room: Room) -> Planned:
    """Plan a run of `raw`, which is `filled`, on a model on the meta device. Raises SlideConfigError where an engine
    would refuse it, and SlideError where it does not fit `room`."""
    slide = check_types(raw)
    if slide is None:
        raise SlideConfigError(f'the JSON does not switch DS-Slide on; add "{CONFIG_KEY}": {{"enabled": true}}')
    notes = []
    parsed = DeepSpeedConfig(dict(raw))
    # The cores belong to the machine of the run, not to this one.
    check_deepspeed_config(parsed, slide.model_copy(update={"cpu_cores": "auto"}), model=model)
    raise_all(*compressed_ranks_problems(slide, room.ranks))
    if autocast_is_enabled(raw):
        raise SlideConfigError(
            "torch_autocast.enabled is true, which cannot be planned before the run; plan with bf16.enabled"
        )
    rule = update_rules.asked_for(parsed.optimizer_name, None)
    if rule is None and parsed.optimizer_name is not None:
        raise SlideConfigError(
            f'optimizer.type is "{parsed.optimizer_name}", whose states are measured when the engine starts, so that '
            "they cannot be planned before; plan with AdamW for the rest"
        )
    if rule is None:
        rule = ADAMW
        notes.append("the JSON names no optimizer; AdamW is assumed, as scripts bring it")
    engine = _engine_of(parsed)
    model_dtype, accumulation_dtype = engine.get_data_types()
    convert_model(model, model_dtype)
    if model_dtype == torch.float32:
        notes.append("the model is in fp32, but times are those of products in bf16, which are several times as fast")
    steps = parsed.gradient_accumulation_steps
    set_optimizer_flags(parsed, model)  # it marks the parameters for Muon
    rule, group_of = update_rules.with_groups(rule, model, parsed.optimizer_params)
    if isinstance(rule, MuonRule):
        notes.append("products of Muon's updates are counted at the rate of large products in bf16")
    settings = RuntimeSettings(
        slide,
        ssd_settings(slide, raw),
        engine.communication_data_type,
        accumulation_dtype,
        accumulates(raw, steps),
        clips=parsed.gradient_clipping > 0,
        rule=rule,
        ranks=room.ranks,
        has_muon_kernel=slide.muon_kernel is True or (slide.muon_kernel == "auto" and may_have_kernel()),
    )
    shares = room.ranks > 1 and slide.share_weights is not False
    unit_plans, _ = divided(model, group_of, settings, room.ranks, shares_weights=shares)
    plan = plan_of(unit_plans, settings, _budgets(slide, room), shares_weights=shares)
    return Planned(plan, plan.needs, settings, unit_plans, steps, raw, notes)


def convert_model(model: Any, dtype: torch.dtype) -> Any:
    """Convert parameters and buffers to the run's data type, but no packed weights in fp8."""
    castable = (*TRAINED_DTYPES, torch.float64)
    return model._apply(lambda tensor: tensor.to(dtype) if tensor.dtype in castable else tensor)


def _engine_of(parsed: DeepSpeedConfig) -> Any:
    """Return an engine that has only its config, for its methods that derive values from the config."""
    engine = object.__new__(DeepSpeedEngine)
    object.__setattr__(engine, "_config", parsed)
    return engine


def _budgets(slide: SlideConfig, room: Room) -> Budgets:
    on_gpu, host = room.gpu is not None, room.host_for_plan
    gpu = room.gpu_for_plan if room.gpu_for_plan is not None else host
    return Budgets(
        room.gpu or host,
        gpu,
        host,
        gpu_states_of(slide, gpu_is_own=on_gpu),
        slide.gpu_memory,
        slide.host_memory,
        gpu_is_own=on_gpu,
        host_source="planned for" + (f", for each of {room.ranks} ranks" if room.ranks > 1 else ""),
    )
