"""Kernels in the model of an engine: put in before the runtime's hooks, taken out when the engine is closed."""

from __future__ import annotations

from deepspeed.accelerator import get_accelerator
from torch import nn

from ds_slide.patching.apply import Replaced, apply_kernels
from ds_slide.patching.kinds import Which
from ds_slide.report.log import log


def install_kernels(module: nn.Module, which: Which) -> Replaced:
    """Put the kernels `which` into `module` for the accelerator in use.

    Raises SlideConfigError where they are listed and cannot run.
    """
    replaced = apply_kernels(module, which, get_accelerator().device_name())
    log.debug("kernels: %s", replaced)
    return replaced
