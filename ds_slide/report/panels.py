"""Steps side by side: a panel for each, in it a row for each lane, all of them on one scale of time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ds_slide.report.drawing import Line, Picture, Rectangle, Shape, Text

LEFT, RIGHT = 120, 20
ROW, GAP, TITLE = 22, 6, 34
PHASE = 4
"""Height of the stripe that says forward or backward."""
BACKGROUND = "#f1f3f4"
CHARACTER = 5.5
"""Mean width in pixels of a character of the labels."""
LABEL_SIZE = 10


@dataclass(frozen=True)
class Bar:
    """One row's work, or its wait, in seconds on the picture's scale. `labels`: the first of them that has room
    is written inside; `title`: for who points at it; `stripe`: a colour along its upper edge."""

    row: str
    begin: float
    end: float
    fill: str
    labels: Sequence[str] = ()
    title: str = ""
    stripe: str = ""


@dataclass(frozen=True)
class Panel:
    """`rows`: names that are shown, by row, from the top. `end`: where a line says that the step ends."""

    title: str
    rows: dict[str, str]
    bars: Sequence[Bar]
    end: float


def picture(
    panels: Sequence[Panel], legend: Sequence[tuple[str, str]], caption: Sequence[str], width: int = 960
) -> Picture:
    """`legend`: (colour, what it stands for). `caption`: lines below it."""
    longest = max((bar.end for panel in panels for bar in panel.bars), default=0.0)
    longest = max(longest, *(panel.end for panel in panels))
    scale = (width - LEFT - RIGHT) / longest
    shapes: list[Shape] = []
    top = 0
    for panel in panels:
        shapes += _panel(panel, top, scale, width)
        top += TITLE + len(panel.rows) * (ROW + GAP) + 8
    shapes += _axis(top, scale, longest, width)
    shapes += _legend(top + 44, legend)
    top += 72 + 20 * ((len(legend) + 3) // 4 - 1)
    shapes += [Text(LEFT, top + 16 * number, line, 11, colour="#555") for number, line in enumerate(caption)]
    return Picture(width, top + 16 * len(caption), shapes)


def _panel(panel: Panel, top: int, scale: float, width: int) -> Iterator[Shape]:
    yield Text(LEFT, top + 22, panel.title, 15, weight="bold")
    for number, (row, name) in enumerate(panel.rows.items()):
        y = top + TITLE + number * (ROW + GAP)
        yield Text(LEFT - 10, y + ROW - 7, name, anchor="end")
        yield Rectangle(LEFT, y, width - LEFT - RIGHT, ROW, BACKGROUND)
        for bar in panel.bars:
            if bar.row == row:
                yield from _bar(bar, y, scale)
    end, bottom = LEFT + panel.end * scale, top + TITLE + len(panel.rows) * (ROW + GAP) - GAP
    yield Line(end, top + TITLE - 4, end, bottom + 4, 1.5)


def _bar(bar: Bar, y: int, scale: float) -> Iterator[Shape]:
    begin = max(bar.begin, 0.0)  # work that was under way when the step began
    x, width = LEFT + begin * scale, max((bar.end - begin) * scale, 0.3)
    yield Rectangle(x, y, width, ROW, bar.fill, bar.title)
    if bar.stripe:
        yield Rectangle(x, y, width, PHASE, bar.stripe)
    for label in bar.labels:
        if width > len(label) * CHARACTER + 6:
            yield Text(x + width / 2, y + ROW - 7, label, LABEL_SIZE, "middle")
            return


def _axis(top: int, scale: float, longest: float, width: int) -> Iterator[Shape]:
    spacings = (factor * 10.0**exponent for exponent in range(-6, 9) for factor in (1, 2, 5))
    spacing = next(step for step in spacings if longest / step <= 10)
    yield Line(LEFT, top, width - RIGHT, top)
    for number in range(int(longest / spacing) + 1):
        x = LEFT + number * spacing * scale
        yield Line(x, top, x, top + 5)
        yield Text(x, top + 19, f"{number * spacing:g} s", 11, "middle")


def _legend(top: int, legend: Sequence[tuple[str, str]]) -> Iterator[Shape]:
    for number, (colour, name) in enumerate(legend):
        x, y = LEFT + (number % 4) * 205, top + (number // 4) * 20
        yield Rectangle(x, y - 10, 12, 12, colour)
        yield Text(x + 18, y, name)
