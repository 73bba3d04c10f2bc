"""Checks the file for a record of steps at the start: it is written much later."""

from __future__ import annotations

import os

from ds_slide.config.schema import CONFIG_KEY, TraceConfig
from ds_slide.config.values import expanded_directory, shown
from ds_slide.errors import SlideConfigError
from ds_slide.report.trace import TraceRequest


def trace_request(config: TraceConfig) -> TraceRequest | None:
    """Return what to record; None without a path. Raises SlideConfigError where the file could not be written."""
    if config.path is None:
        return None
    name = f"{CONFIG_KEY}.trace.path"
    path = expanded_directory(config.path, name)
    if path.is_dir():
        raise SlideConfigError(f'{name} is {shown(config.path)}, which is a directory; name a file in it ("step.json")')
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise SlideConfigError(
            f"{name} is {shown(config.path)}, but no file can be written in {shown(str(path.parent))}; "
            "make that directory, or name another one"
        )
    return TraceRequest(path, *config.steps)
