"""The lanes of an engine."""

from __future__ import annotations

from dataclasses import dataclass

from ds_slide.runtime.core.stream_lane import StreamWorker
from ds_slide.runtime.core.update_lane import UpdateWorker


@dataclass(frozen=True)
class Lanes:
    """The threads. `ds_slide.runtime.ended` ends them."""

    h2d: StreamWorker
    outer_h2d: StreamWorker
    """Brings updated outer modules up: in a lane of their own they do not hold up the blocks, nor the blocks them."""
    d2h: StreamWorker
    update: UpdateWorker
