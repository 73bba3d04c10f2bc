"""Kernels in the model of an engine: put in before the runtime's hooks, taken out when the engine is closed."""

from __future__ import annotations

import weakref
from typing import Any

from deepspeed.accelerator import get_accelerator
from deepspeed.utils import log_dist
from torch import nn

from ds_slide.patching.apply import Replaced, apply_kernels
from ds_slide.patching.kinds import Which

_installed: weakref.WeakKeyDictionary[nn.Module, Replaced] = weakref.WeakKeyDictionary()


def install_kernels(module: nn.Module, which: Which) -> None:
    """Put the kernels `which` into `module` for the accelerator in use, and log what was replaced on rank 0.

    Raises SlideConfigError where they are listed and cannot run.
    """
    replaced = apply_kernels(module, which, get_accelerator().device_name())
    _installed[module] = replaced
    if replaced.counts or replaced.reasons:
        log_dist(f"ds_slide: kernels: {replaced}", ranks=[0])


def kernel_report(module: nn.Module) -> dict[str, Any]:
    """What `install_kernels` replaced in `module`, for `slide_stats()["kernels"]` (see `Replaced.as_dict`)."""
    replaced = _installed.get(module)
    return {"replaced": {}, "not_replaced": {}} if replaced is None else dict(replaced.as_dict())


def remove_kernels(module: nn.Module) -> None:
    """Undo `install_kernels`. Harmless when there is nothing to undo."""
    replaced = _installed.pop(module, None)
    if replaced is not None:
        replaced.undo()
