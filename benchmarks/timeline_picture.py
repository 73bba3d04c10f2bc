"""Draws recorded steps of `timeline.py`: a panel for each system, a row for each lane, all on one scale of time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ds_slide.report import drawing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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


def picture(recorded: list[Panel]) -> Figure:
    """Stock above, DS-Slide below, or as they are given; the caption says on what they ran."""
    used = {bar["what"] for panel in recorded for bar in panel.bars}
    legend = [(COLOURS[what], name) for what, name in LEGEND.items() if what in used]
    return drawing.steps_side_by_side([_panel(panel) for panel in recorded], legend, _caption(recorded))


def _panel(panel: Panel) -> drawing.Panel:
    title = SYSTEMS[panel.system]
    if panel.facts["GPU"] != "none":
        title += f": {panel.step_s:.2f} s a step"
    bars = [Bar(**bar) for bar in panel.bars]
    shown = [drawing.Bar(bar.row, bar.begin, bar.end, COLOURS[bar.what]) for bar in bars]
    return drawing.Panel(title, ROWS, shown, max(bar.end for bar in bars if bar.row == "compute"))


def _caption(recorded: list[Panel]) -> list[str]:
    on = recorded[0].facts
    if on["GPU"] != "none":
        lines = [f"One recorded step of each on {on['GPU']} beside {on['CPU']}."]
    else:
        lines = [
            f"One recorded step of each WITHOUT a GPU, on {on['CPU']}: all lanes share the same cores, so that this",
            "shows what overlaps and in which order, and not how fast. Stock's copies are inside its compute here.",
        ]
    return lines + [panel.command for panel in recorded]
