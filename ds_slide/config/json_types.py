"""Checks the types of the sections of the DeepSpeed JSON that say where states go, before other code reads them.

DeepSpeed's own parser answers a wrong type with a traceback of its frames, sometimes an `AttributeError`. The checks
that run before that parser would read a list as an object.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from ds_slide.config import check_directory_text, shown
from ds_slide.errors import SlideConfigError

SECTIONS = ("offload_optimizer", "offload_param")
DEVICES = ("none", "cpu", "nvme")
AUTO = "auto"
"""A value that accelerate's DeepSpeedPlugin replaces, but only once HfDeepSpeedConfig has read the JSON."""
# That plugin fills this in where no directory is named.
_NO_DIRECTORY = "none"


def type_problems(raw: Mapping[str, Any], *, filled: bool = True) -> Iterator[str]:
    """Yield what is wrong, one sentence each. `raw`: the JSON as it was written. `filled`: no "auto" is replaced
    later."""
    zero = raw.get("zero_optimization")
    # A bool is an old form, which DeepSpeed still reads: stage 1 or none.
    if not isinstance(zero, Mapping | bool | None):
        yield f'zero_optimization is {shown(zero)}; expected an object such as {{"stage": 3}}'
    if isinstance(zero, Mapping):
        if filled and zero.get("stage") == AUTO:
            yield 'zero_optimization.stage is "auto", but nothing has filled it in; set it to 3'
        for section in SECTIONS:
            path = f"zero_optimization.{section}"
            yield from _offload_problems(path, zero.get(section), filled)
            if not _directory_in_block(raw):
                yield from _placeholder_problems(path, zero.get(section), filled)
    clip = raw.get("gradient_clipping", 0.0)
    if not isinstance(clip, int | float) and (filled or clip != AUTO):
        yield f"gradient_clipping is {shown(clip)}; expected a number such as 1.0, or 0 for none"
    aio = raw.get("aio")
    if not isinstance(aio, Mapping | None):
        yield f'aio is {shown(aio)}; expected an object such as {{"queue_depth": 32}}, or leave it out'


def device_of(section: Any) -> Any:
    """Return the name of a section's device, as it is written; None where there is none."""
    device = section.get("device") if isinstance(section, Mapping) else None
    return getattr(device, "value", device)


def _directory_in_block(raw: Mapping[str, Any]) -> bool:
    """Whether "ds_slide" names directories, so that directories in DeepSpeed's sections are not read."""
    block = raw.get("ds_slide")
    return isinstance(block, Mapping) and block.get("nvme_path") is not None


def _placeholder_problems(path: str, section: Any, filled: bool) -> Iterator[str]:
    """Yield what is wrong with texts that would be taken for directories below the present one."""
    placeholders = (_NO_DIRECTORY, AUTO) if filled else (_NO_DIRECTORY,)
    if device_of(section) == "nvme" and section.get("nvme_path") in placeholders:
        yield (
            f"{path}.nvme_path is {shown(section['nvme_path'])}, which is no directory but says that none is named; "
            f"set {path}.nvme_path or ds_slide.nvme_path"
        )


def _offload_problems(path: str, section: Any, filled: bool) -> Iterator[str]:
    if section is None:
        return
    if not isinstance(section, Mapping):
        yield f'{path} is {shown(section)}; expected an object such as {{"device": "cpu"}}, or leave it out'
        return
    if "device" in section:
        device = device_of(section)
        if device not in DEVICES and (filled or device != AUTO):
            yield f'{path}.device is {shown(device)}; expected "none", "cpu" or "nvme"'
    directory = section.get("nvme_path")
    if directory is None or directory == "":
        return
    if not isinstance(directory, str | os.PathLike):
        yield (
            f"{path}.nvme_path is {shown(directory)}; expected a directory, or name several in ds_slide.nvme_path "
            "as a list"
        )
        return
    try:
        check_directory_text(os.fspath(directory), f"{path}.nvme_path")
    except SlideConfigError as error:
        yield str(error)
