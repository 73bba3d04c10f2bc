"""The parameters of a checkpoint and those of the model, compared by name before anything is changed.

DeepSpeed finds out in the middle of a save or a load that a parameter is not its own, and prints the whole tensor.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from deepspeed.checkpoint.constants import FROZEN_PARAM_SHAPES, PARAM_SHAPES

from ds_slide.checkpoint.mapped import MappedFiles
from ds_slide.errors import SlideError

_SHOWN = 4
"""Names in a sentence; a model with adapters has hundreds."""


def require_own_parameters(engine: Any) -> None:
    """SlideError for a save of a model that has got parameters since its engine started: they would not be in it."""
    places = engine.optimizer.protocol.places
    added = [name for name, parameter in engine.module.named_parameters() if parameter not in places]
    if added:
        raise SlideError(
            f"the checkpoint would not have {_listed(added)}, added to the model after deepspeed.initialize; add "
            "adapters and other parameters before it, or give the model to deepspeed.initialize again"
        )


def require_same_parameters(engine: Any, path: Path, file: str) -> None:
    """SlideError where the tag at `path`, whose model states are in `file`, has other parameters than the model."""
    content = MappedFiles().load(file, "cpu")
    groups, frozen = content.get(PARAM_SHAPES), content.get(FROZEN_PARAM_SHAPES)
    if groups is None:
        return
    # What was frozen for a while when it was saved is in both, and has optimizer states.
    saved = dict.fromkeys(frozen or (), False) | {name: True for group in groups for name in group}
    own = {
        engine.param_names[parameter]: place[1].trainable
        for parameter, place in engine.optimizer.protocol.places.items()
    }
    both = saved.keys() & own.keys()
    problems = [
        _clause("does not have {}", own.keys() - saved.keys(), own),
        _clause("has {}, and the model has not", saved.keys() - own.keys(), saved),
        _clause("trains {}, frozen in the model", {name for name in both if saved[name] and not own[name]}, own),
        _clause("has {} frozen, trained in the model", {name for name in both if own[name] and not saved[name]}, own),
    ]
    if any(problems):
        raise SlideError(
            f"the checkpoint {path} {' and '.join(filter(None, problems))}; load it with the model that it was saved "
            "with, before parameters are added, frozen or taken away"
        )


def _clause(text: str, names: Collection[str], order: Iterable[str]) -> str:
    return text.format(_listed([name for name in order if name in names])) if names else ""


def _listed(names: list[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
