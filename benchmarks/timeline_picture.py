"""Draws recorded steps of `timeline.py` as one SVG: a panel for each system, a row for each lane, one scale of time."""

from __future__ import annotations

import html
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

SYSTEMS = {"stock": "DeepSpeed ZeRO-3 offload", "slide": "DS-Slide"}
ROWS = {"compute": "compute", "h2d": "weights up", "d2h": "gradients down", "update": "CPU update"}
COLOURS = {
    "forward": "#3b6fb6",
    "backward": "#e08a2e",
    "other": "#9aa0a6",
    "weights": "#2f9e8f",
    "gradient": "#8e5bb5",
    "gradient kept": "#d8a0a6",
    "update": "#c4424d",
}
LEGEND = {
    "forward": "forward",
    "backward": "backward",
    "other": "rest of the step",
    "weights": "weights to the GPU",
    "gradient": "gradients to the host",
    "gradient kept": "gradients summed on the host",
    "update": "AdamW on the CPU",
}
WIDTH, LEFT, RIGHT = 960, 120, 20
ROW, GAP, TITLE = 22, 6, 34


@dataclass(frozen=True)
class Bar:
    """Work of one row, in seconds from the step's begin."""

    row: str
    what: str
    begin: float
    end: float


@dataclass(frozen=True)
class Panel:
    """One system's step. `bars`: fields of `Bar`."""

    system: str
    step_s: float
    bars: list[dict[str, Any]]
    facts: dict[str, str]
    command: str


def svg(panels: list[Panel]) -> str:
    """Stock above, DS-Slide below, or as they are given; the caption says on what they ran."""
    bars = [[Bar(**bar) for bar in panel.bars] for panel in panels]
    longest = max(bar.end for panel in bars for bar in panel)
    scale = (WIDTH - LEFT - RIGHT) / longest
    parts: list[str] = []
    top = 0
    for panel, of_panel in zip(panels, bars, strict=True):
        parts += _panel(panel, of_panel, top, scale)
        top += TITLE + len(ROWS) * (ROW + GAP) + 8
    parts += _axis(top, scale, longest)
    parts += _legend(top + 44, {bar.what for panel in bars for bar in panel})
    caption = _caption(panels)
    parts += [text(LEFT, top + 92 + 16 * number, line, size=11, colour="#555") for number, line in enumerate(caption)]
    height = top + 92 + 16 * len(caption)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
            'font-family="Helvetica, Arial, sans-serif">',
            f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
            *parts,
            "</svg>\n",
        ]
    )


def _panel(panel: Panel, bars: list[Bar], top: int, scale: float) -> Iterator[str]:
    title = SYSTEMS[panel.system]
    if panel.facts["GPU"] != "none":
        title += f": {panel.step_s:.2f} s a step"
    yield text(LEFT, top + 22, title, size=15, weight="bold")
    for number, (row, name) in enumerate(ROWS.items()):
        y = top + TITLE + number * (ROW + GAP)
        yield text(LEFT - 10, y + ROW - 7, name, anchor="end")
        yield f'<rect x="{LEFT}" y="{y}" width="{WIDTH - LEFT - RIGHT}" height="{ROW}" fill="#f1f3f4"/>'
        for bar in bars:
            if bar.row == row:
                begin = max(bar.begin, 0.0)  # work that was under way when the step began
                x, width = LEFT + begin * scale, max((bar.end - begin) * scale, 0.3)
                yield f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{ROW}" fill="{COLOURS[bar.what]}"/>'
    end = LEFT + max(bar.end for bar in bars if bar.row == "compute") * scale
    bottom = top + TITLE + len(ROWS) * (ROW + GAP) - GAP
    yield f'<path d="M{end:.2f} {top + TITLE - 4} V{bottom + 4}" stroke="#000" stroke-width="1.5"/>'


def _axis(top: int, scale: float, longest: float) -> Iterator[str]:
    spacing = next(step for step in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 1e9) if longest / step <= 10)
    yield f'<line x1="{LEFT}" y1="{top}" x2="{WIDTH - RIGHT}" y2="{top}" stroke="#000"/>'
    for number in range(int(longest / spacing) + 1):
        x = LEFT + number * spacing * scale
        yield f'<line x1="{x:.2f}" y1="{top}" x2="{x:.2f}" y2="{top + 5}" stroke="#000"/>'
        yield text(x, top + 19, f"{number * spacing:g} s", anchor="middle", size=11)


def _legend(top: int, used: set[str]) -> Iterator[str]:
    shown = [(what, name) for what, name in LEGEND.items() if what in used]
    for number, (what, name) in enumerate(shown):
        x, y = LEFT + (number % 4) * 205, top + (number // 4) * 20
        yield f'<rect x="{x}" y="{y - 10}" width="12" height="12" fill="{COLOURS[what]}"/>'
        yield text(x + 18, y, name, size=12)


def _caption(panels: list[Panel]) -> list[str]:
    on = panels[0].facts
    if on["GPU"] != "none":
        lines = [f"One recorded step of each on {on['GPU']} beside {on['CPU']}."]
    else:
        lines = [
            f"One recorded step of each WITHOUT a GPU, on {on['CPU']}: all lanes share the same cores, so that this",
            "shows what overlaps and in which order, and not how fast. Stock's copies are inside its compute here.",
        ]
    return lines + [panel.command for panel in panels]


def text(
    x: float,
    y: float,
    words: str,
    *,
    size: int = 12,
    anchor: str = "start",
    weight: str = "normal",
    colour: str = "#000",
) -> str:
    return (
        f'<text x="{x:.2f}" y="{y:.2f}" font-size="{size}" text-anchor="{anchor}" font-weight="{weight}" '
        f'fill="{colour}">{html.escape(words)}</text>'
    )
