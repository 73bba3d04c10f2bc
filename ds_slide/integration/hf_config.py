"""The first place where Trainer reads the JSON: TrainingArguments make an HfDeepSpeedConfig of accelerate."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from ds_slide.integration.as_written import as_written

_wrapped_classes: set[type] = set()


def install(module: ModuleType) -> None:
    """Wrap `HfDeepSpeedConfig` of the module `accelerate.utils.deepspeed`. Idempotent."""
    config_class = module.HfDeepSpeedConfig
    if config_class in _wrapped_classes:
        return
    original = config_class.__init__

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        given = as_written(args[0] if args else kwargs.get("config_file_or_dict"))
        if given is not None and "ds_slide" in given:
            from ds_slide.integration.early import check_types

            check_types(given, filled=False)  # which the constructor reads before anybody has looked at them
        original(self, *args, **kwargs)
        config = getattr(self, "config", None)
        # Without the key nothing of DS-Slide is imported, let alone run.
        if isinstance(config, Mapping) and "ds_slide" in config:
            from ds_slide.integration.early import check_json

            check_json(config)

    config_class.__init__ = __init__
    _wrapped_classes.add(config_class)
