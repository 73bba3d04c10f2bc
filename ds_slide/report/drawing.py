"""All pictures, by matplotlib: axes for a caller to draw on, steps side by side, and how a picture becomes a file."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_slide.errors import SlideError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BACKGROUND = "#f1f3f4"


@dataclass(frozen=True)
class Sizes:
    """Sizes in inches, except where another unit is named. A row is 1 high, and a bar in it 0.8."""

    row: float = 0.3
    title: float = 0.4
    line: float = 0.2
    """A line of the legend or the caption."""
    character: float = 0.055
    """The mean width of a label's character."""
    label_points: int = 7
    legend_columns: int = 4
    stripe: float = 0.15
    """The stripe along a bar's upper edge, as a part of a row."""


SIZES = Sizes()


@dataclass(frozen=True)
class Bar:
    """Work of one row, or its wait, in seconds. `labels`: the first label that has room is written inside. `title`:
    viewers of an SVG show it under the pointer. `stripe`: a colour along the upper edge."""

    row: str
    begin: float
    end: float
    fill: str
    labels: Sequence[str] = ()
    title: str = ""
    stripe: str = ""


@dataclass(frozen=True)
class Panel:
    """`rows`: the shown name of each row, from the top. `end`: seconds, where a line marks the end of the step."""

    title: str
    rows: dict[str, str]
    bars: Sequence[Bar]
    end: float


def require_matplotlib() -> None:
    """Raise SlideError where matplotlib is missing."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise SlideError(f'a picture needs matplotlib ({error}): pip install "ds-slide[plot]"') from error


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure; sizes in inches. Raises SlideError where matplotlib is missing."""
    require_matplotlib()
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def write(figure: Figure, path: Path) -> None:
    """Write the file, in the format of its ending. The same picture has the same bytes. Raises SlideError where that
    fails."""
    from matplotlib import rc_context

    is_svg = path.suffix == ".svg"
    metadata = {"Date": None, "Creator": None} if is_svg else None
    try:
        with rc_context({"svg.fonttype": "none", "svg.hashsalt": "ds_slide"}):
            figure.savefig(path, dpi=200, metadata=metadata)
        if is_svg:
            written = re.sub(r'<g id="title: ([^"]*)">', r"<g><title>\1</title>", path.read_text(encoding="utf-8"))
            path.write_text("\n".join(map(str.rstrip, written.split("\n"))), encoding="utf-8")
    except (OSError, ValueError) as error:
        raise SlideError(f"{path} cannot be written: {error}") from error


def steps_side_by_side(
    panels: Sequence[Panel], legend: Sequence[tuple[str, str]], caption: Sequence[str], width: float = 9.6
) -> Figure:
    """Draw a panel for each step, with a row for each lane, on one scale of time. `legend`: (colour, its meaning).
    `caption`: lines at the bottom. `width`: inches."""
    rows = [len(panel.rows) for panel in panels]
    lines = len(caption) + (len(legend) - 1) // SIZES.legend_columns + 3
    figure = new_figure(width, sum(rows) * SIZES.row + len(rows) * SIZES.title + lines * SIZES.line)
    from matplotlib.patches import Patch

    longest = max([bar.end for panel in panels for bar in panel.bars] + [panel.end for panel in panels])
    all_axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False, height_ratios=rows)[:, 0]
    for axes, panel in zip(all_axes, panels, strict=True):
        _draw(axes, panel, longest, 0.85 * width / (longest or 1.0))
    all_axes[-1].set_xlabel("seconds", fontsize=8)
    figure.legend(
        handles=[Patch(color=colour, label=name) for colour, name in legend],
        loc="outside upper left",
        ncols=SIZES.legend_columns,
        frameon=False,
        fontsize=8,
    )
    figure.supxlabel("\n".join(caption), x=0.01, ha="left", fontsize=8, color="#555", parse_math=False)
    return figure


def _draw(axes: Axes, panel: Panel, longest: float, inches_a_second: float) -> None:
    place = {row: number for number, row in enumerate(panel.rows)}
    axes.set_title(panel.title, loc="left", fontsize=10, fontweight="bold", parse_math=False)
    axes.set_xlim(0, longest or 1.0)
    axes.set_ylim(len(place) - 0.5, -0.5)
    axes.set_yticks(range(len(place)), panel.rows.values(), fontsize=8)
    axes.tick_params(length=0, labelsize=8)
    axes.spines[:].set_visible(False)
    for number in place.values():
        _rectangle(axes, number, (0, longest), BACKGROUND)
    for bar in panel.bars:
        if bar.row in place:
            _draw_bar(axes, bar, place[bar.row], inches_a_second)
    axes.axvline(panel.end, color="black", linewidth=1)


def _draw_bar(axes: Axes, bar: Bar, row: int, inches_a_second: float) -> None:
    begin = max(bar.begin, 0.0)  # work that was under way when the step began
    span = (begin, bar.end - begin)
    _rectangle(axes, row, span, bar.fill, gid=f"title: {bar.title}" if bar.title else None)
    if bar.stripe:
        _rectangle(axes, row, span, bar.stripe, height=SIZES.stripe)
    room = (bar.end - begin) * inches_a_second
    label = next((label for label in bar.labels if room > len(label) * SIZES.character + 0.06), None)
    if label is not None:
        middle = (begin + bar.end) / 2
        axes.text(middle, row, label, ha="center", va="center", fontsize=SIZES.label_points, parse_math=False)


def _rectangle(axes: Axes, row: int, span: tuple[float, float], colour: str, height: float = 0.8, **more: Any) -> None:
    """Draw a part of a row. `span`: (begin, width) in seconds."""
    from matplotlib.patches import Rectangle

    axes.add_patch(Rectangle((span[0], row - 0.4), span[1], height, color=colour, linewidth=0, **more))
