"""Forecasts of one model with one JSON, for any batch and with any change of the JSON's block."""

from __future__ import annotations

import contextlib
import copy
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from ds_slide.cli.planning.inputs import Inputs
from ds_slide.cli.planning.model import ModelShape, set_checkpointing
from ds_slide.cli.planning.steady import Question, Spare, decide
from ds_slide.config import CONFIG_KEY
from ds_slide.integration.planning import Planned, convert_model, filled, plan_json
from ds_slide.patching.apply import apply_kernels
from ds_slide.plan.ceilings import Ceilings
from ds_slide.plan.forecast import ActivationPlan, Forecast, Room
from ds_slide.plan.keeping import Keepable, Kept
from ds_slide.plan.memory import Plan
from ds_slide.plan.mixtures import mixtures
from ds_slide.plan.rates import Rates
from ds_slide.plan.step_model import Step, Work, all_schedules, scheduled
from ds_slide.plan.step_work import work_of
from ds_slide.plan.trace import (
    FUNCTION,
    Again,
    StepTrace,
    TracedUnit,
    kept_by_block,
    trace_step,
    with_kept,
)
from ds_slide.runtime.activations.checkpointing import FLAG


@dataclass(frozen=True)
class Request:
    """One run to plan. `raw`: the JSON as it was written. `batch`: sequences of a micro-batch; None: the JSON's."""

    shape: ModelShape
    raw: Mapping[str, Any]
    batch: int | None
    seq: int
    room: Room
    ceilings: Ceilings
    checkpointing: bool = True

    def with_block(self, **settings: Any) -> Request:
        """Return a copy with other values in the "ds_slide" block."""
        return replace(self, raw={**self.raw, CONFIG_KEY: {**self.raw.get(CONFIG_KEY, {}), **settings}})

    def with_sections_on_ssd(self, *sections: str) -> Request:
        """Return a copy with the device "nvme" in these sections of "zero_optimization"."""
        raw: dict[str, Any] = copy.deepcopy(dict(self.raw))
        for section in sections:
            there = raw["zero_optimization"].get(section) or {}
            raw["zero_optimization"][section] = {"nvme_path": "/local_nvme", **there, "device": "nvme"}
        return replace(self, raw=raw)


@dataclass
class Planner:
    """Makes forecasts, and keeps its traces: a trace takes a second or two, all else little."""

    _traces: dict[Any, _Traced] = field(default_factory=dict)
    _bare: dict[str, Any] = field(default_factory=dict)
    """Models without kernels, like a script's, by their names."""
    _prepared: dict[Any, Any] = field(default_factory=dict)
    """Models with the kernels that an engine puts into them."""

    def planned(self, request: Request) -> Planned:
        """Return what an engine would be built from. Raises SlideConfigError for a request that an engine would refuse,
        and DoesNotFit where the plan does not fit."""
        raw, notes = filled(request.raw, request.batch, request.room.ranks)
        name = request.shape.name
        if name not in self._bare:
            self._bare[name] = request.shape.build()
        found = plan_json(self._bare[name], raw, request.room)
        return replace(found, notes=[*notes, *found.notes])

    def forecast(self, request: Request) -> Forecast:
        """Return the forecast of the first steps, which have to fit. Raises what `planned` raises, and SlideError where
        the model cannot be traced. The forecast's own `shortage` also counts the activations."""
        return self._case(request).forecast()

    def steady(self, request: Request) -> Forecast:
        """Return the forecast of the steps after the engine has decided about spare GPU memory. Raises what `forecast`
        raises."""
        case = self._case(request)
        slide = case.planned.settings.slide
        plain, keepable = case.trace, []
        if _takes_over(request, case.planned):
            plain = self._trace(request, case.planned, case.batch, checkpointing=False).step
            saved = kept_by_block(plain, case.trace)
            for index in sorted(case.checkpointed):
                again = case.trace.again.get(index, ())
                mixed = mixtures([each.run for each in again], saved[index]) if slide.activations == "auto" else ()
                keepable.append(Keepable(index, saved[index], case.recomputation_s(again), mixed))

        # Inputs that have to leave the GPU come free for the decision.
        tied = request.room.ranks > 1 or case.planned.micro_batches > 1
        spare = Spare(request.room, case.trace.peak_bytes, slide.gpu_memory, tied, case.rates.copy)
        placed, moved = case.planned.plan, ActivationPlan()
        if request.room.gpu is not None:
            moved = case.inputs.within(spare.inputs_missing(placed), moved)
        spare = replace(spare, needed=spare.needed - moved.moved_bytes)
        # The engine's own functions decide, and the decision is forecast.
        steps, forwards = Steps(case, plain, moved), case.planned.micro_batches
        found = decide(Question(placed, spare, keepable, steps, slide.gpu_states == "auto", forwards))
        activations = replace(
            moved,
            checkpointed=frozenset(each.order for each in keepable),
            kept=found.kept,
            kept_bytes=found.kept.nbytes(keepable),
        )
        between = max((plan.gpu_bytes + steps.trace(kept).peak_bytes for plan, kept in found.before), default=0)
        return replace(case.decided(found.plan, steps.trace(found.kept), activations), gpu_peak_between=between)

    def _case(self, request: Request) -> _Case:
        planned = self.planned(request)
        batch = int(planned.raw["train_micro_batch_size_per_gpu"])
        traced = self._trace(request, planned, batch, checkpointing=_checkpoints(request, planned))
        rates = Rates.of(request.ceilings, on_gpu=request.room.gpu is not None)
        taken_over = traced.checkpointed if _takes_over(request, planned) else frozenset[int]()
        limit = planned.settings.slide.host_memory
        has_ssd = planned.settings.ssd is not None
        inputs = Inputs.of(traced.step, taken_over, planned.plan, request.room, limit, has_ssd=has_ssd)
        return _Case(request, planned, batch, traced.step, traced.checkpointed, inputs, rates)

    def _trace(self, request: Request, planned: Planned, batch: int, *, checkpointing: bool) -> _Traced:
        slide = planned.settings.slide
        name, on_gpu = request.shape.name, request.room.gpu is not None
        run = (name, slide.kernels, slide.stream_head, slide.compression is not None, on_gpu)
        key = (run, checkpointing, batch, request.seq, request.room.gpu)
        if key not in self._traces:
            if run not in self._prepared:
                # The embedding comes first: it is not packed.
                model = convert_model(request.shape.build(), next(self._bare[name].parameters()).dtype)
                if on_gpu:
                    apply_kernels(model, slide.kernels, "cuda")
                if slide.stream_head:
                    # The head's gradient is made and sent down row by row, and is never on the GPU as a whole.
                    model.get_output_embeddings().weight.requires_grad_(False)
                self._prepared[run] = model
            model = self._prepared[run]
            with contextlib.suppress(ValueError):  # a model without checkpointing runs without it
                set_checkpointing(model, checkpointing)
            units = _units_of(model, planned)
            step = trace_step(model, units, batch, request.seq, request.room.gpu or 0)
            self._traces[key] = _Traced(step, _checkpointed(units))
        return self._traces[key]


@dataclass(frozen=True)
class _Traced:
    """A traced step, and the blocks that are recomputed in it and that the engine takes over."""

    step: StepTrace
    checkpointed: frozenset[int]


@dataclass(frozen=True)
class _Case:
    """The input of a forecast."""

    request: Request
    planned: Planned
    batch: int
    trace: StepTrace
    """The step with nothing kept and nothing moved."""
    checkpointed: frozenset[int]
    inputs: Inputs
    rates: Rates

    def work(self, plan: Plan, trace: StepTrace, *, two: bool = True) -> Work:
        """Return the work of a step. `two`: updates may be done in two passes, where the rule allows it."""
        planned, rule = self.planned, self.planned.settings.rule
        assert rule is not None
        two = two and planned.settings.slide.update_passes != 1 and rule.two_passes
        return work_of(plan, trace, self.rates, planned.micro_batches, two=two)

    def recomputation_s(self, again: Sequence[Again]) -> float:
        """Return the seconds that the runs `again` take in a step."""
        runs = Counter(chain.from_iterable(each.operations for each in again))
        return self.planned.micro_batches * max(self.rates.seconds(runs), self.rates.launches(runs))

    def forecast(self) -> Forecast:
        """Return the forecast before the engine decides anything."""
        activations = self.inputs.unmeasured(ActivationPlan(self.checkpointed))
        trace = self.trace.with_moved(activations.moved_bytes, activations.on_ssd_bytes)
        return self._forecast(self.planned.plan, trace, activations, None)

    def decided(self, plan: Plan, trace: StepTrace, activations: ActivationPlan) -> Forecast:
        return self._forecast(plan, trace, activations, self.forecast())

    def _forecast(self, plan: Plan, trace: StepTrace, activations: ActivationPlan, first: Forecast | None) -> Forecast:
        work = self.work(plan, trace)
        return Forecast(
            plan=plan,
            trace=trace,
            time=scheduled(work),
            below_limit=scheduled(work, below_limit=True),
            schedules=all_schedules(work),
            room=self.request.room,
            batch=self.batch,
            seq=self.request.seq,
            micro_batches=self.planned.micro_batches,
            activations=activations,
            first=first,
        )


@dataclass(frozen=True)
class Steps:
    """Forecasts of steps that keep more or less. `plain`: the trace of a step that recomputes nothing."""

    case: _Case
    plain: StepTrace
    moved: ActivationPlan

    def trace(self, kept: Kept) -> StepTrace:
        found = with_kept(self.case.trace, self.plain, kept)
        return found.with_moved(self.moved.moved_bytes, self.moved.on_ssd_bytes)

    def step(self, plan: Plan, kept: Kept, /, *, two: bool = True) -> Step:
        return scheduled(self.case.work(plan, self.trace(kept), two=two))


def _takes_over(request: Request, planned: Planned) -> bool:
    """Whether the engine decides which blocks are recomputed, with or without a script that asks for recomputation."""
    slide = planned.settings.slide
    return slide.activations != "as_written" and bool(request.room.gpu or slide.gpu_memory)


def _checkpoints(request: Request, planned: Planned) -> bool:
    """Whether blocks are recomputed in the first steps."""
    return request.checkpointing or _takes_over(request, planned)


def _checkpointed(units: Sequence[TracedUnit]) -> frozenset[int]:
    found = (index for index, unit in enumerate(units) if unit.block is not None and _is_checkpointed(unit.block))
    return frozenset(found)


def _is_checkpointed(block: Any) -> bool:
    return bool(vars(block).get(FLAG)) and vars(block).get(FUNCTION) is not None


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
