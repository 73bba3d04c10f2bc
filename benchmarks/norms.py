"""How often clipping bites in a training: the gradient norm of every step beside the limit, as CSV and picture.

    deepspeed --num_gpus 1 examples/finetune.py --deepspeed_config ds.json --model DIR --data FILE --log runs/log.jsonl
    python3 benchmarks/norms.py runs/log.jsonl --limit 1.0 --out out/norms

Writes OUT.csv and OUT.svg, and prints a JSON line. A norm at most the limit leaves a step as it would be without
clipping: updates that do not wait for the norm are right there. `followed`: of the steps after one within the limit,
the share that is within it, too; that is how often "as in the step before" is right where it says so. Where the log
has DS-Slide's statistics, `ahead` and `taken_back` are the steps whose updates began before the norm was known, and
counted or were taken back; the others held them.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import statistics
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ds_slide.report import drawing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WITHIN, ABOVE = "#2f9e8f", "#c4424d"
Updates = Literal["held", "ahead", "taken_back"]
BANDS: dict[Updates, str] = {"ahead": "#5b7fc7", "taken_back": "#d9902f"}


def updates_of(steps: list[dict[str, Any]]) -> list[Updates]:
    """What became of the updates of each step, from the counts since the start in `slide_stats()["speculation"]`."""
    found: list[Updates] = []
    before = {"steps": 0, "taken_back": 0}
    for step in steps:
        counts = step["slide"].get("speculation", before)
        taken_back, begun = (counts[name] > before[name] for name in ("taken_back", "steps"))
        found.append("taken_back" if taken_back else "ahead" if begun else "held")
        before = counts
    return found


def summarise(norms: list[float], limit: float) -> dict[str, Any]:
    """What the picture shows, in numbers. A norm that is not finite is within none."""
    within = [norm <= limit for norm in norms]
    after = [second for first, second in pairwise(within) if first]
    return {
        "steps": len(norms),
        "limit": limit,
        "within": sum(within),
        "share_within": sum(within) / len(norms),
        "followed": sum(after) / len(after) if after else None,
        "crossings": sum(first != second for first, second in pairwise(within)),
        "median": statistics.median(norms),
        "largest": max(norm for norm in norms if math.isfinite(norm)),
    }


def picture(norms: list[float], limit: float, caption: str, updates: list[Updates] | None = None) -> Figure:
    """A dot a step on a logarithmic scale, the limit as a line, and below it which steps had updates ahead."""
    finite = [norm for norm in norms if math.isfinite(norm) and norm > 0]
    # Norms that are not finite lie at the largest, zeros at the smallest.
    shown = [max(*finite, limit) if not math.isfinite(norm) else norm or min(*finite, limit) for norm in norms]
    figure = drawing.new_figure(9.6, 3.2)
    axes = figure.subplots()
    axes.set_title(caption, loc="left", fontsize=10, parse_math=False)
    axes.set_yscale("log")
    axes.axhline(limit, color="black", linewidth=1)
    colours = [WITHIN if norm <= limit else ABOVE for norm in norms]
    axes.scatter(range(len(norms)), shown, s=6, c=colours)
    for height, (what, colour) in zip((0.05, 0.0), BANDS.items(), strict=True):
        steps = [number for number, which in enumerate(updates or []) if which == what]
        if steps:
            bars = [(number - 0.5, 1) for number in steps]
            place = axes.get_xaxis_transform()  # the height as a share of the axes
            axes.broken_barh(bars, (height, 0.04), color=colour, transform=place, label=what.replace("_", " "))
    axes.set_xlabel(f"step; the line: the limit of {limit:g}")
    if updates and set(updates) & set(BANDS):
        figure.legend(loc="outside upper right", frameon=False, fontsize=8)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("log", type=Path, help="what examples/finetune.py --log has written")
    parser.add_argument("--limit", type=float, default=1.0, help="gradient_clipping of that run")
    parser.add_argument("--out", type=Path, required=True, help="of the files, without .csv and .svg")
    arguments = parser.parse_args()
    steps = [json.loads(line) for line in arguments.log.read_text().splitlines()]
    norms = [step["grad_norm"] for step in steps]
    if not norms or None in norms or arguments.limit <= 0:
        parser.error(f"{arguments.log} has steps without a norm, or no steps, or --limit is not above 0")
    updates = updates_of(steps)
    summary = summarise(norms, arguments.limit) | Counter(updates)
    with arguments.out.with_name(f"{arguments.out.name}.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["step", "norm", "within", "loss", "updates"])
        for step, norm, what in zip(steps, norms, updates, strict=True):
            writer.writerow([step["step"], f"{norm:.6g}", int(norm <= arguments.limit), f"{step['loss']:.6g}", what])
    caption = f"Gradient norms: {summary['within']} of {summary['steps']} steps within the limit"
    drawn = picture(norms, arguments.limit, caption, updates)
    drawing.write(drawn, arguments.out.with_name(f"{arguments.out.name}.svg"))
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
