"""Checkpoints of an engine that runs DS-Slide: crash-safe, and in bounded memory however large the model.

The files are DeepSpeed's, for its tools and for stock ZeRO-3. `checkpoint_save` and `checkpoint_load` say what is done
when. Of `ds_slide.checkpoint`, `archive`, `pickle_writer`, `sums` and `mapped` write and read one file piece by piece;
`publish` and `manifest` make the files of all ranks one checkpoint, which is there or not.

The engine gets these as attributes of the object: the class, and with it every engine without the key, keeps
DeepSpeed's.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

from ds_slide.errors import SlideConfigError
from ds_slide.integration.checkpoint_files import SlideCheckpointEngine
from ds_slide.integration.checkpoint_load import load_checkpoint
from ds_slide.integration.checkpoint_save import save_checkpoint


def attach(engine: Any) -> None:
    """Give `engine`, whose optimizer is a SlideZeroOptimizer, DS-Slide's checkpoints. Raises SlideConfigError."""
    if type(engine.checkpoint_engine) is not TorchCheckpointEngine:
        raise SlideConfigError(
            f"the config asks for DeepSpeed's {type(engine.checkpoint_engine).__name__}, but DS-Slide writes "
            "checkpoints itself, piece by piece; remove checkpoint.writer and datastates_ckpt"
        )
    engine.checkpoint_engine = SlideCheckpointEngine()
    engine.save_checkpoint = _bound(engine, save_checkpoint, type(engine).save_checkpoint)
    engine.load_checkpoint = _bound(engine, load_checkpoint, type(engine).load_checkpoint)


def _bound(engine: Any, function: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    owner = weakref.ref(engine)  # not the engine itself, which would then own itself and outlive its last user

    @functools.wraps(original)
    def method(*args: Any, **kwargs: Any) -> Any:
        return function(owner(), *args, **kwargs)

    return method
