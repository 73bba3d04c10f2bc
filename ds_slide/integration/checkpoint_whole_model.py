"""The whole model in fp32 out of a ZeRO-3 checkpoint of any number of ranks, as DeepSpeed's `zero_to_fp32` makes it.

DeepSpeed's own load calls that module, whose torch.load runs whatever a file says, on the tag that `latest` names. Here
a second copy of the module reads, restricted, the tag that is asked for.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch

from ds_slide.checkpoint import restricted

_MODULE = "deepspeed.utils.zero_to_fp32"


class _Torch(ModuleType):
    """torch with another `load`."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def load(path: str, map_location: Any = None, *_others: Any, mmap: bool | None = False, **_options: Any) -> Any:
        return restricted.load(path, map_location, mapped=bool(mmap))


@contextmanager
def whole_model_loaded(engine: Any, load_dir: str, tag: str) -> Iterator[None]:
    """Let what `engine` loads into its module is the whole model out of `tag`."""
    owner = type(engine)

    def load_module_state_dict(checkpoint: dict[str, Any], **options: Any) -> None:
        checkpoint = {**checkpoint, "module": _state_dict(load_dir, tag)}
        owner.load_module_state_dict(engine, checkpoint, **{**options, "fetch_z3_params": True})

    engine.load_module_state_dict = load_module_state_dict
    try:
        yield
    finally:
        del engine.load_module_state_dict


def _state_dict(load_dir: str, tag: str) -> dict[str, Any]:
    result: dict[str, Any] = _zero_to_fp32().get_fp32_state_dict_from_zero_checkpoint(load_dir, tag)
    return result


@functools.cache
def _zero_to_fp32() -> Any:
    spec = importlib.util.find_spec(_MODULE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)  # not in sys.modules: everybody else's is as it was
    spec.loader.exec_module(module)
    module.torch = _Torch("torch")  # type: ignore[attr-defined]
    return module
