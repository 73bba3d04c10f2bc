"""The first place where Trainer reads the JSON: TrainingArguments make an HfDeepSpeedConfig of accelerate."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import ModuleType
from typing import Any

_wrapped_classes: set[type] = set()


def install(module: ModuleType) -> None:
    """Wrap `HfDeepSpeedConfig` of the module `accelerate.utils.deepspeed`. Idempotent."""
    config_class = module.HfDeepSpeedConfig
    if config_class in _wrapped_classes:
        return
    original = config_class.__init__

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        config = getattr(self, "config", None)
        # Without the key nothing of DS-Slide is imported, let alone run.
        if isinstance(config, Mapping) and "ds_slide" in config:
            from ds_slide.integration.early import check_json

            check_json(config)

    config_class.__init__ = __init__
    _wrapped_classes.add(config_class)
