"""Types of the sections of the DeepSpeed JSON that say where states go, checked before anybody reads them.

DeepSpeed's own parser answers a wrong one with a traceback of its frames, an `AttributeError` for some; and the checks
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


def type_problems(raw: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong, one sentence each. `raw`: the JSON as it was written."""
    zero = raw.get("zero_optimization")
    # A bool is the form of long ago, which DeepSpeed still reads: stage 1 or none.
    if not isinstance(zero, Mapping | bool | None):
        yield f'zero_optimization is {shown(zero)}; expected an object such as {{"stage": 3}}'
    if isinstance(zero, Mapping):
        for section in SECTIONS:
            yield from _offload_problems(f"zero_optimization.{section}", zero.get(section))
    aio = raw.get("aio")
    if not isinstance(aio, Mapping | None):
        yield f'aio is {shown(aio)}; expected an object such as {{"queue_depth": 32}}, or leave it out'


def _offload_problems(path: str, section: Any) -> Iterator[str]:
    if section is None:
        return
    if not isinstance(section, Mapping):
        yield f'{path} is {shown(section)}; expected an object such as {{"device": "cpu"}}, or leave it out'
        return
    if "device" in section:
        device = getattr(section["device"], "value", section["device"])
        if device not in DEVICES:
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
