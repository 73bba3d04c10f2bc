"""Pictures of a few shapes, as SVG or, by matplotlib, as PNG. Coordinates are pixels from the upper left corner."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ds_slide.errors import SlideError

FONT = "Helvetica, Arial, sans-serif"
PNG_PIXELS = 2
"""Of a PNG, for one of the picture."""


@dataclass(frozen=True)
class Rectangle:
    """`title`: shown where a viewer points at it, in an SVG."""

    x: float
    y: float
    width: float
    height: float
    fill: str
    title: str = ""


@dataclass(frozen=True)
class Line:
    """From one point to another."""

    x1: float
    y1: float
    x2: float
    y2: float
    width: float = 1


@dataclass(frozen=True)
class Text:
    """`x` is its begin, middle or end by `anchor`, `y` the line that it stands on."""

    x: float
    y: float
    text: str
    size: int = 12
    anchor: str = "start"
    weight: str = "normal"
    colour: str = "#000"


Shape = Rectangle | Line | Text


@dataclass(frozen=True)
class Picture:
    """Shapes on white; later ones cover earlier ones."""

    width: int
    height: int
    shapes: Sequence[Shape]


def svg(picture: Picture) -> str:
    """The picture as a file of its own."""
    size = f'width="{picture.width}" height="{picture.height}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {picture.width} {picture.height}" {size} '
            f'font-family="{FONT}">',
            f'<rect {size} fill="#ffffff"/>',
            *_elements(picture.shapes),
            "</svg>\n",
        ]
    )


def _elements(shapes: Sequence[Shape]) -> Iterator[str]:
    for shape in shapes:
        if isinstance(shape, Rectangle):
            place = f'x="{_number(shape.x)}" y="{_number(shape.y)}"'
            size = f'width="{_number(shape.width)}" height="{_number(shape.height)}"'
            end = f"><title>{html.escape(shape.title)}</title></rect>" if shape.title else "/>"
            yield f'<rect {place} {size} fill="{shape.fill}"{end}'
        elif isinstance(shape, Line):
            start = f'x1="{_number(shape.x1)}" y1="{_number(shape.y1)}"'
            end = f'x2="{_number(shape.x2)}" y2="{_number(shape.y2)}"'
            yield f'<line {start} {end} stroke="#000" stroke-width="{_number(shape.width)}"/>'
        else:
            yield (
                f'<text x="{_number(shape.x)}" y="{_number(shape.y)}" font-size="{shape.size}" '
                f'text-anchor="{shape.anchor}" font-weight="{shape.weight}" fill="{shape.colour}">'
                f"{html.escape(shape.text)}</text>"
            )


def _number(value: float) -> str:
    return f"{value:.2f}".removesuffix(".00")


def write_png(picture: Picture, path: Path) -> None:
    """SlideError where matplotlib is missing or the file cannot be written."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import Rectangle as Patch
    except ImportError as error:
        raise SlideError(
            f'a PNG needs matplotlib ({error}): pip install "ds-slide[plot]", or write an SVG, which needs nothing'
        ) from error
    dots = 100  # an inch; only its ratio to points, of which an inch has 72, matters
    figure = Figure(figsize=(picture.width / dots, picture.height / dots), dpi=dots * PNG_PIXELS)
    canvas, axes = FigureCanvasAgg(figure), figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, picture.width)
    axes.set_ylim(picture.height, 0)
    axes.axis("off")
    points = 72 / dots
    for shape in picture.shapes:
        if isinstance(shape, Rectangle):
            axes.add_patch(Patch((shape.x, shape.y), shape.width, shape.height, color=shape.fill, linewidth=0))
        elif isinstance(shape, Line):
            across, down = (shape.x1, shape.x2), (shape.y1, shape.y2)
            axes.plot(across, down, color="#000", linewidth=shape.width * points, scalex=False, scaley=False)
        else:
            axes.text(
                shape.x,
                shape.y,
                shape.text.replace("$", r"\$"),  # no formulas
                fontsize=shape.size * points,
                ha={"start": "left", "middle": "center", "end": "right"}[shape.anchor],
                va="baseline",
                fontweight=shape.weight,
                color=shape.colour,
            )
    try:
        canvas.print_png(str(path))
    except OSError as error:
        raise SlideError(f"{path} cannot be written: {error}") from error
