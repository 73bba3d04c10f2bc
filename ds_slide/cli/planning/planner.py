"""Forecasts of one model with one JSON, for any batch and with any change of the JSON's block."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ds_slide.cli.planning.model import ModelShape, set_checkpointing
from ds_slide.config import CONFIG_KEY
from ds_slide.integration.planning import Planned, filled, plan_json
from ds_slide.patching.apply import apply_kernels
from ds_slide.plan.ceilings.figures import Ceilings
from ds_slide.plan.forecast import Forecast, Room
from ds_slide.plan.rates import Rates
from ds_slide.plan.time import all_schedules, step_time
from ds_slide.plan.trace import StepTrace, TracedUnit, trace_step

IN_TWO_PASSES = ("AdamW", "Lion")
"""Rules of which the CPU may do the weights and the states apart."""


@dataclass(frozen=True)
class Request:
    """What is planned. `raw`: the JSON as it was written. `batch`: sequences of a micro-batch, None for the JSON's."""

    shape: ModelShape
    raw: Mapping[str, Any]
    batch: int | None
    seq: int
    room: Room
    ceilings: Ceilings
    checkpointing: bool = True

    def with_block(self, **settings: Any) -> Request:
        """With other values in the "ds_slide" block."""
        return replace(self, raw={**self.raw, CONFIG_KEY: {**self.raw.get(CONFIG_KEY, {}), **settings}})

    def with_sections_on_ssd(self, *sections: str) -> Request:
        """With the device "nvme" in these sections of "zero_optimization"."""
        raw: dict[str, Any] = copy.deepcopy(dict(self.raw))
        for section in sections:
            there = raw["zero_optimization"].get(section) or {}
            raw["zero_optimization"][section] = {"nvme_path": "/local_nvme", **there, "device": "nvme"}
        return replace(self, raw=raw)


@dataclass
class Planner:
    """Keeps what it has traced: a trace takes a second or two, all else little."""

    _traces: dict[Any, StepTrace] = field(default_factory=dict)
    _bare: dict[str, Any] = field(default_factory=dict)
    """Models as a script has them, by their names."""
    _prepared: dict[Any, Any] = field(default_factory=dict)
    """Models with the kernels that an engine puts into them."""

    def planned(self, request: Request) -> Planned:
        """What an engine would be built from. Raises SlideConfigError for what an engine would refuse, and DoesNotFit
        where what it places does not fit."""
        raw, notes = filled(request.raw, request.batch, request.room.ranks)
        name = request.shape.name
        if name not in self._bare:
            self._bare[name] = request.shape.build()
        found = plan_json(self._bare[name], raw, request.room)
        return replace(found, notes=[*notes, *found.notes])

    def forecast(self, request: Request) -> Forecast:
        """As `planned`; what the activations add is in the forecast's own `shortage`. Raises SlideError where the model
        cannot be traced."""
        planned = self.planned(request)
        batch = int(planned.raw["train_micro_batch_size_per_gpu"])
        trace = self._trace(request, planned, batch)
        rates = Rates.of(request.ceilings, on_gpu=request.room.gpu is not None)
        slide, rule = planned.settings.slide, planned.settings.rule
        assert rule is not None
        two = slide.debug.update_passes != 1 and rule.name in IN_TWO_PASSES
        micro = planned.micro_batches
        return Forecast(
            plan=planned.plan,
            trace=trace,
            time=step_time(planned.plan, planned.needs, trace, rates, micro_batches=micro, two=two),
            schedules=all_schedules(planned.plan, planned.needs, trace, rates, micro),
            room=request.room,
            batch=batch,
            seq=request.seq,
            micro_batches=micro,
        )

    def _trace(self, request: Request, planned: Planned, batch: int) -> StepTrace:
        slide = planned.settings.slide
        name, on_gpu = request.shape.name, request.room.gpu is not None
        run = (name, slide.kernels, slide.stream_head, on_gpu)
        key = (run, request.checkpointing, batch, request.seq, request.room.gpu)
        if key not in self._traces:
            if run not in self._prepared:
                model = request.shape.build().to(next(self._bare[name].parameters()).dtype)
                if on_gpu:
                    apply_kernels(model, slide.kernels, "cuda")
                if slide.stream_head:
                    # Its gradient is made and sent down row by row, and never there as a whole.
                    model.get_output_embeddings().weight.requires_grad_(False)
                self._prepared[run] = model
            model = self._prepared[run]
            with contextlib.suppress(ValueError):  # a model that has no checkpointing runs without
                set_checkpointing(model, request.checkpointing)
            units = _units_of(model, planned)
            self._traces[key] = trace_step(model, units, batch, request.seq, request.room.gpu or 0)
        return self._traces[key]


def _units_of(model: Any, planned: Planned) -> Sequence[TracedUnit]:
    """The units of the plan, in another model of the same shape."""
    parameters, modules = dict(model.named_parameters()), dict(model.named_modules())
    return [
        TracedUnit(
            [parameters[name] for name, _ in unit.spec.parameters],
            modules[unit.spec.name] if unit.spec.kind == "block" else None,
        )
        for unit in planned.unit_plans
    ]
