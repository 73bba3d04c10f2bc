"""`ds-slide trace`: what a recorded step spent its time with, and what it waited for.

The training itself records it: `"ds_slide": {"trace": {"path": "step.json", "steps": [10, 12]}}`.
"""

from __future__ import annotations

import argparse
import colorsys
import json
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_slide.errors import SlideError
from ds_slide.report import drawing
from ds_slide.report.causes import causes, clipped, duration, lane_shares, largest_waits
from ds_slide.report.chrome import RecordedStep, read
from ds_slide.report.drawing import Bar, Panel, steps_side_by_side
from ds_slide.report.host import host_shares
from ds_slide.report.trace import BETWEEN, COMPUTE, REQUESTS

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `ds-slide trace`."""
    parser.add_argument(
        "files",
        type=Path,
        nargs="+",
        metavar="FILE",
        help='what "trace" in the "ds_slide" block has written; of several ranks one name stands for all their files',
    )
    parser.add_argument("--step", type=int, metavar="N", help="the step to look at (default: the last one recorded)")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the step, for instance as step.svg")


def run(arguments: argparse.Namespace, answer: list[str]) -> int:
    """Append to `answer`, and return the exit code. Raises SlideError for files that cannot be read or written."""
    recorded = [read(path) for name in arguments.files for path in _of_all_ranks(name)]
    steps = [_chosen(of_file, arguments.step) for of_file in recorded]
    if arguments.json:
        answer.append(json.dumps([figures(step) for step in steps], indent=2))
    else:
        answer.append("\n\n".join("\n".join(lines(step)) for step in steps))
    if arguments.plot is not None:
        drawing.write(trace_picture(steps), arguments.plot)
    return 0


def figures(step: RecordedStep) -> dict[str, Any]:
    """Return the figures of a step in seconds. A wait's `units` are seconds by unit. `host`: see `HostShare`."""
    return {
        "rank": step.rank,
        "step": step.number,
        "step_s": step.seconds,
        "bound_s": step.bound_s,
        "bound_lane": step.bound_lane,
        "lanes": [asdict(share) for share in lane_shares(step)],
        "host": [asdict(share) for share in host_shares(step.host)],
        "waits": [{**asdict(wait), "sentence": wait.sentence} for wait in largest_waits(step)],
    }


def lines(step: RecordedStep) -> Iterator[str]:
    """Yield the lines of a step for people."""
    share = step.bound_s / step.seconds
    yield (
        f"rank {step.rank}, step {step.number}: T = {duration(step.seconds)}; T* = {duration(step.bound_s)}, for which "
        f"{step.bound_lane} was busy; T*/T = {share:.0%}"
    )
    yield f"{'lane':22}{'busy':>10}{'':6}{'waited':>8}{'idle':>8}"
    for lane in lane_shares(step):
        parts = [
            seconds / step.seconds if step.seconds else 0.0 for seconds in (lane.busy_s, lane.waited_s, lane.idle_s)
        ]
        yield f"{lane.lane:22}{duration(lane.busy_s):>10}{parts[0]:>6.0%}{parts[1]:>8.0%}{parts[2]:>8.0%}"
    yield from (share.sentence for share in host_shares(step.host))
    waits = largest_waits(step)
    yield from (wait.sentence for wait in waits)
    if not waits:
        yield "compute waited for nothing that is worth a name"


def _of_all_ranks(path: Path) -> Sequence[Path]:
    """Return the file itself, or the files that several ranks have written under its name, by rank."""
    if path.exists():
        return [path]
    marked = {number: found for found in path.parent.glob("*") if (number := _rank_of(found, path)) is not None}
    if not marked:
        raise SlideError(
            f"{path} does not exist, nor a file of a rank ({path.with_suffix('.rank0' + path.suffix).name}); it is "
            "written when the last of its steps has ended"
        )
    return [marked[number] for number in sorted(marked)]


def _rank_of(found: Path, path: Path) -> int | None:
    begin, end = f"{path.stem}.rank", path.suffix
    number = found.name.removeprefix(begin).removesuffix(end)
    is_one = found.name == f"{begin}{number}{end}" and number.isdecimal()
    return int(number) if is_one else None


def _chosen(steps: Sequence[RecordedStep], number: int | None) -> RecordedStep:
    if number is None:
        return steps[-1]
    for step in steps:
        if step.number == number:
            return step
    raise SlideError(f"step {number} is not in the trace, which has steps {steps[0].number} to {steps[-1].number}")


# ----------------------------------------------------------------------------------------------------------------------
# A recorded step as a picture: a row for each lane, a colour for each block, and in the gaps the cause of each wait.

OTHER, WAITING = "#9aa0a6", "#f7dcdc"
PHASES = {"forward": "#3b6fb6", "backward": "#e08a2e"}
_SHORT = {"h2d of outer modules": "h2d, outer", "inputs of blocks": "inputs"}
_DISK_ROWS = {REQUESTS: ("ssd read", "ssd written")}


def trace_picture(steps: Sequence[RecordedStep]) -> Figure:
    """Draw one step of each rank, on one scale of time of day."""
    origin = min(step.begin_unix_s for step in steps)
    legend = [(colour, f"{what} (upper edge)") for what, colour in PHASES.items()]
    legend += [(OTHER, "outside of the blocks"), (WAITING, "waits for what it says")]
    caption = ["A block has one colour in all rows. Where a row has no colour there was nothing to do."]
    return steps_side_by_side([_panel(step, step.begin_unix_s - origin) for step in steps], legend, caption, width=14.0)


def _panel(step: RecordedStep, offset: float) -> Panel:
    bars = list(_bars(step, offset))
    rows = [row for lane in step.lanes for row in _DISK_ROWS.get(lane, (lane,))]
    waited: dict[str, float] = defaultdict(float)
    for bar in bars:
        waited[bar.row] += bar.end - bar.begin
    # Threads of the script that have waited for less than a hundredth of the step have no row.
    rows += sorted(row for row in waited if row not in rows and waited[row] >= 0.01 * step.seconds)
    title = f"rank {step.rank}, step {step.number}: {duration(step.seconds)}, "
    title += f"{step.bound_lane} busy for {duration(step.bound_s)}"
    return Panel(title, {row: _SHORT.get(row, row) for row in rows}, bars, offset + step.seconds)


def _bars(step: RecordedStep, offset: float) -> Iterator[Bar]:
    """Yield the waits first: work of a lane at the same time is drawn over them."""
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
    """Return colours around the wheel, by index of the block. Blocks are the units that the compute row names."""
    computed = {work.unit for work in step.work if work.lane == COMPUTE and work.what != BETWEEN}
    blocks = [unit for unit in step.units if unit in computed]
    colours = {}
    for number, block in enumerate(blocks):
        # Neighbours differ in brightness: there may be a hundred of them.
        rgb = colorsys.hls_to_rgb(0.8 * number / len(blocks), (0.62, 0.74)[number % 2], 0.55)
        colours[block] = "#" + "".join(f"{round(255 * channel):02x}" for channel in rgb)
    return colours
