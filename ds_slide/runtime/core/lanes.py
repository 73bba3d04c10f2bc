"""The lanes of an engine."""

from __future__ import annotations

from dataclasses import dataclass

from ds_slide.runtime.core.stream_lane import StreamWorker
from ds_slide.runtime.core.update_lane import UpdateWorker


@dataclass(frozen=True)
class Lanes:
    """The threads of an engine. `ds_slide.runtime.ended` ends them."""

    h2d: StreamWorker
    outer_h2d: StreamWorker
    """Uploads updated outer modules. In a lane of their own they do not delay the blocks, and the blocks do not delay
    them."""
    d2h: StreamWorker
    update: UpdateWorker
