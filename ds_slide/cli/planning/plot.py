"""A picture of a plan: what every tier holds, and how long every lane is busy."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ds_slide.errors import SlideConfigError


def require_matplotlib() -> None:
    """Raise SlideConfigError where there is none, before anything is planned."""
    from importlib.util import find_spec

    if find_spec("matplotlib") is None:
        raise SlideConfigError('--plot needs matplotlib, which is not installed; `pip install "ds-slide[plot]"`')


def draw(answer: Mapping[str, Any], name: str, path: Path) -> None:
    """Write a picture of the answer; its format is that of the name's ending."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    tiers, lanes = figure.subplots(2, 1)
    for tier, found in answer["tiers"].items():
        left = 0.0
        for what, nbytes in found["entries"].items():
            if nbytes:
                tiers.barh(tier, nbytes / 1e9, left=left, edgecolor="white")
                tiers.text(left + nbytes / 2e9, tier, what, ha="center", va="center", fontsize=7)
                left += nbytes / 1e9
        if found["available"]:
            tiers.plot([found["available"] / 1e9] * 2, [tier, tier], "k|", markersize=28)
    tiers.set_xlabel("GB; a black line: what is there")
    tiers.invert_yaxis()
    busy = {lane: seconds for lane, seconds in answer["lanes"].items() if seconds}
    lanes.barh(list(busy), list(busy.values()))
    lanes.axvline(answer["step_s"], color="black")
    lanes.set_xlabel(f"busy seconds of a step; the line: the step, {answer['step_s']:.3f} s")
    lanes.invert_yaxis()
    figure.suptitle(f"{name}, {answer['batch']} x {answer['seq']} tokens")
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise SlideConfigError(f"--plot {path} cannot be written ({error})") from error
