"""A recorded step as a picture: a row for each lane, a colour for each block, and in the gaps what was waited for."""

from __future__ import annotations

import colorsys
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ds_slide.report.causes import causes, clipped, duration
from ds_slide.report.drawing import Bar, Panel, steps_side_by_side
from ds_slide.report.recorded import RecordedStep
from ds_slide.report.trace import BETWEEN, COMPUTE, REQUESTS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH = 14.0
OTHER, WAITING = "#9aa0a6", "#f7dcdc"
PHASES = {"forward": "#3b6fb6", "backward": "#e08a2e"}
SHOWN_SHARE = 0.01
"""Of the step: threads of the script that have waited for less have no row."""
_SHORT = {"h2d of outer modules": "h2d, outer", "inputs of blocks": "inputs"}
_DISK_ROWS = {REQUESTS: ("ssd read", "ssd written")}


def trace_picture(steps: Sequence[RecordedStep]) -> Figure:
    """One step of each rank, on one scale of time of day."""
    origin = min(step.begin_unix_s for step in steps)
    legend = [(colour, f"{what} (upper edge)") for what, colour in PHASES.items()]
    legend += [(OTHER, "outside of the blocks"), (WAITING, "waits for what it says")]
    caption = ["A block has one colour in all rows. Where a row has no colour there was nothing to do."]
    return steps_side_by_side([_panel(step, step.begin_unix_s - origin) for step in steps], legend, caption, WIDTH)


def _panel(step: RecordedStep, offset: float) -> Panel:
    bars = list(_bars(step, offset))
    rows = [row for lane in step.lanes for row in _DISK_ROWS.get(lane, (lane,))]
    waited: dict[str, float] = defaultdict(float)
    for bar in bars:
        waited[bar.row] += bar.end - bar.begin
    rows += sorted(row for row in waited if row not in rows and waited[row] >= SHOWN_SHARE * step.seconds)
    title = f"rank {step.rank}, step {step.number}: {duration(step.seconds)}, "
    title += f"{step.bound_lane} busy for {duration(step.bound_s)}"
    return Panel(title, {row: _SHORT.get(row, row) for row in rows}, bars, offset + step.seconds)


def _bars(step: RecordedStep, offset: float) -> Iterator[Bar]:
    """Waits first: where a lane works at the same time, that covers them."""
    waits = [(wait.waiter, wait.what, wait.begin, wait.end) for wait in step.waits if wait.waiter in step.lanes[1:]]
    waits += [(cause.waiter, cause.what, cause.begin, cause.end) for cause in causes(step)]
    for row, what, begin, end in waits:
        title = f"waits {duration(end - begin)} for {what}"
        yield Bar(row, offset + begin, offset + end, WAITING, (what, *_shorter(what, step.units)), title)
    colours = block_colours(step)
    for work in step.work:
        row, labels = work.lane, [work.unit.rpartition(".")[2]]
        if work.lane in _DISK_ROWS:
            row, labels = _DISK_ROWS[work.lane][work.what.endswith("written")], []  # requests overlap
        stripe = PHASES.get(work.what, "") if work.lane == COMPUTE else ""
        title = f"{work.what} {work.unit}".rstrip() + f", {duration(work.end - work.begin)}"
        for begin, end in clipped([(work.begin, work.end)], 0.0, step.seconds):
            yield Bar(row, offset + begin, offset + end, colours.get(work.unit, OTHER), labels, title, stripe)


def _shorter(what: str, units: Sequence[str]) -> Iterator[str]:
    """ "update 3" for "the update of model.layers.3"."""
    words = what.removeprefix("the ").split(" of ")
    for unit in units:
        if len(words) > 1 and re.match(rf"{re.escape(unit)}(?!\w)", words[1]):
            yield f"{words[0]} {unit.rpartition('.')[2]}"


def block_colours(step: RecordedStep) -> dict[str, str]:
    """Around the wheel in the order of the blocks, which are the units that the compute row names."""
    computed = {work.unit for work in step.work if work.lane == COMPUTE and work.what != BETWEEN}
    blocks = [unit for unit in step.units if unit in computed]
    colours = {}
    for number, block in enumerate(blocks):
        # Neighbours differ in brightness: there may be a hundred of them.
        rgb = colorsys.hls_to_rgb(0.8 * number / len(blocks), (0.62, 0.74)[number % 2], 0.55)
        colours[block] = "#" + "".join(f"{round(255 * channel):02x}" for channel in rgb)
    return colours
