"""Where the SSD tier is and what may go there: keys of "ds_slide" first, and then DeepSpeed's own."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_slide.config import SlideConfig, expanded_directory, shown
from ds_slide.config.json_types import SECTIONS
from ds_slide.errors import SlideConfigError
from ds_slide.store.ssd.extents import CHUNK_NUMEL, MOST_DEPTH, MOST_REQUEST_BYTES, PAGE


@dataclass(frozen=True)
class SsdSettings:
    """What DeepSpeed's own keys say of the SSD tier, with `ds_slide.nvme_path`. None is automatic."""

    parents: Sequence[tuple[str, Path]]
    """(JSON path for messages, directory) of every disk."""
    weights: bool
    """Whether weights may go there; only blocks' weights do."""
    states: bool
    """Whether optimizer states and held gradients may go there."""
    chunk_numel: int
    """Parameters of a chunk."""
    queue_depth: int | None
    request_bytes: int | None


def offload_device(ds_config: Mapping[str, Any], section: str) -> str:
    """ "none", "cpu" or "nvme" of `zero_optimization.<section>`."""
    settings = ds_config.get("zero_optimization", {}).get(section) or {}
    return str(getattr(settings.get("device", "none"), "value", settings.get("device", "none")))


def wants_ssd(ds_config: Mapping[str, Any]) -> bool:
    return any(offload_device(ds_config, section) == "nvme" for section in SECTIONS)


def named_directories(config: SlideConfig, ds_config: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(JSON path, directory as it is written) of every disk; empty where none is named."""
    if config.nvme_path is not None:
        many = len(config.nvme_path) > 1
        return [
            (f"ds_slide.nvme_path[{number}]" if many else "ds_slide.nvme_path", text)
            for number, text in enumerate(config.nvme_path)
        ]
    for section in SECTIONS:
        text = (ds_config.get("zero_optimization", {}).get(section) or {}).get("nvme_path")
        if offload_device(ds_config, section) == "nvme" and text:
            return [(f"zero_optimization.{section}.nvme_path", os.fspath(text))]
    return []


def ssd_parents(config: SlideConfig, ds_config: Mapping[str, Any]) -> list[tuple[str, Path]]:
    """(JSON path, directory) of every disk. Raises SlideConfigError for a text that names no directory."""
    return [(name, expanded_directory(text, name)) for name, text in named_directories(config, ds_config)]


def directory_problems(config: SlideConfig, ds_config: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is wrong with the directories: one cannot exist, or two are the same. Nothing is created."""
    try:
        parents = ssd_parents(config, ds_config)
    except SlideConfigError as error:
        yield str(error)
        return
    seen: dict[object, str] = {}
    for name, path in parents:
        try:
            real = os.path.realpath(path)
            keys: list[object] = [real]
            if os.path.exists(real):  # the same through another mount point, too
                status = os.stat(real)
                keys.append((status.st_dev, status.st_ino))
        except OSError as error:  # too many links, a name that is too long
            yield f"{name} is {shown(str(path))}, which cannot be looked at ({error.strerror}); name another directory"
            return
        first = next((seen[key] for key in keys if key in seen), None)
        if first is not None:
            yield (
                f"{name} is {shown(str(path))}, which is the same directory as {first}; name each directory once, and "
                "each on a disk of its own"
            )
            return
        seen.update(dict.fromkeys(keys, name))


def ssd_settings(config: SlideConfig, ds_config: Mapping[str, Any]) -> SsdSettings | None:
    """The SSD tier of the JSON; None where DeepSpeed's keys name no nvme device. The config has passed
    `ssd_problems`."""
    if not wants_ssd(ds_config):
        return None
    aio = ds_config.get("aio") or {}
    return SsdSettings(
        parents=ssd_parents(config, ds_config),
        weights=offload_device(ds_config, "offload_param") == "nvme",
        states=offload_device(ds_config, "offload_optimizer") == "nvme",
        chunk_numel=CHUNK_NUMEL,
        queue_depth=aio.get("queue_depth"),
        request_bytes=aio.get("block_size"),
    )


def ssd_problems(config: SlideConfig, ds_config: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is wrong with the settings of the SSD tier, one sentence each."""
    if not wants_ssd(ds_config):
        if config.nvme_path is not None:
            yield (
                'ds_slide.nvme_path is set, but no offload device is "nvme"; set '
                'zero_optimization.offload_optimizer.device to "nvme" or remove it'
            )
        return
    if not named_directories(config, ds_config):
        section = next(section for section in SECTIONS if offload_device(ds_config, section) == "nvme")
        yield (
            f'zero_optimization.{section}.device is "nvme", but no directory is named; set '
            f"zero_optimization.{section}.nvme_path or ds_slide.nvme_path"
        )
    yield from directory_problems(config, ds_config)
    aio = ds_config.get("aio") or {}
    if aio.get("use_gds"):
        yield "aio.use_gds is true, but DS-Slide moves states through host memory, where they are updated; remove it"
    block = aio.get("block_size")
    if block is not None and (not _is_integer(block) or block <= 0 or block % PAGE):
        yield (
            f"aio.block_size is {shown(block)}, but the SSD tier reads and writes whole pages; use a multiple of {PAGE}"
        )
    elif block is not None and block > MOST_REQUEST_BYTES:
        yield f"aio.block_size is {shown(block)}, but a request has {MOST_REQUEST_BYTES} bytes at most; lower it"
    depth = aio.get("queue_depth")
    if depth is not None and not (_is_integer(depth) and 0 < depth <= MOST_DEPTH):
        yield f"aio.queue_depth is {shown(depth)}; expected an integer from 1 to {MOST_DEPTH}"


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
