"""`ds-slide trace`: what a recorded step spent its time with, and what it waited for.

Recorded by the training itself: `"ds_slide": {"trace": {"path": "step.json", "steps": [10, 12]}}`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ds_slide.errors import SlideError
from ds_slide.report import drawing
from ds_slide.report.causes import duration, lane_shares, largest_waits
from ds_slide.report.recorded import RecordedStep, read
from ds_slide.report.trace_picture import trace_picture


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Those of `ds-slide trace`."""
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


def run(arguments: argparse.Namespace, say: Callable[[str], None]) -> int:
    """The answer goes to `say`, by lines. Returns the exit code. Raises SlideError for files that cannot be read or
    written."""
    recorded = [read(path) for name in arguments.files for path in _of_all_ranks(name)]
    steps = [_chosen(of_file, arguments.step) for of_file in recorded]
    if arguments.json:
        say(json.dumps([figures(step) for step in steps], indent=2))
    else:
        say("\n\n".join("\n".join(lines(step)) for step in steps))
    if arguments.plot is not None:
        drawing.write(trace_picture(steps), arguments.plot)
    return 0


def figures(step: RecordedStep) -> dict[str, Any]:
    """Seconds; a wait's `units` are the seconds by unit."""
    return {
        "rank": step.rank,
        "step": step.number,
        "step_s": step.seconds,
        "bound_s": step.bound_s,
        "bound_lane": step.bound_lane,
        "lanes": [asdict(share) for share in lane_shares(step)],
        "waits": [{**asdict(wait), "sentence": wait.sentence} for wait in largest_waits(step)],
    }


def lines(step: RecordedStep) -> Iterator[str]:
    """For people."""
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
    waits = largest_waits(step)
    yield from (wait.sentence for wait in waits)
    if not waits:
        yield "compute waited for nothing that is worth a name"


def _of_all_ranks(path: Path) -> Sequence[Path]:
    """The file itself, or where several ranks have written to its name, theirs, in the order of the ranks."""
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
