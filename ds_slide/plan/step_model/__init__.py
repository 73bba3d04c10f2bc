"""The one model of how long a step takes.

Work            seconds that a step asks of each lane. `work_of` makes it from a plan and the ceilings of a machine.
step_of(work)   The step with one schedule of updates. `scheduled` takes the schedule that the engine takes.
Step            seconds of a step and of its lanes: a forecast, or what the engine has measured.
Step.after      The same step after a `Change`. The engine and `ds-slide plan` share out spare memory by it.
Updates         seconds that tell both whether updates are done in two passes.
"""

from ds_slide.plan.step_model.schedules import Work, all_schedules, scheduled, step_of
from ds_slide.plan.step_model.step import Change, Schedule, Schedules, Step
from ds_slide.plan.step_model.two_passes import Updates, mean_backward_s
from ds_slide.plan.step_model.work import work_of

__all__ = [
    "Change",
    "Schedule",
    "Schedules",
    "Step",
    "Updates",
    "Work",
    "all_schedules",
    "mean_backward_s",
    "scheduled",
    "step_of",
    "work_of",
]
