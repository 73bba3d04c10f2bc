"""Keys of the "ds_slide" block under their old names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ds_slide.errors import SlideConfigError
from ds_slide.report.log import log

NEW_NAMES = {"hold_gradients": "defer_updates"}

MOVED = {
    "speculate": "ds_slide.speculate",
    "update_passes": "ds_slide.update_passes",
    "mix": 'ds_slide.activations, where "whole_blocks" is what false was,',
}
"""Keys of "debug" that are now settings of their own."""

_said: set[str] = set()


def under_new_names(block: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """Return `block` with its old keys under their new names. Each old key is logged once in a process. Raises
    SlideConfigError where a setting has both names."""
    old = [key for key in NEW_NAMES if key in block]
    for key in old:
        new = NEW_NAMES[key]
        if new in block:
            raise SlideConfigError(
                f"ds_slide.{key} is the old name of ds_slide.{new}, which is set as well; leave it out"
            )
        if key not in _said:
            _said.add(key)
            log.warning("ds_slide.%s is called ds_slide.%s now; the old name will go", key, new)
    return {NEW_NAMES.get(key, key): value for key, value in block.items()} if old else block


def refuse_moved(block: Mapping[Any, Any]) -> None:
    """Raise SlideConfigError for a key that is no longer in "debug"."""
    debug = block.get("debug")
    for key in MOVED:
        if isinstance(debug, Mapping) and key in debug:
            raise SlideConfigError(f"ds_slide.debug.{key} is no test switch any more; set {MOVED[key]} in its place")
