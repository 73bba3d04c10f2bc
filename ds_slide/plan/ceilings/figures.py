"""The rates of a machine, and the files that hold them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ds_slide.config import shown
from ds_slide.errors import SlideError

PRESETS = Path(__file__).resolve().parents[2] / "configs" / "ceilings"
"""Files of machines that were measured before, by name."""


class _Figures(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class GpuCeilings(_Figures):
    """Of a GPU and its link. Rates in units of 10^9 bytes a second; a copy on the device reads and writes."""

    name: str
    memory_bytes: int = Field(gt=0)
    product_tflop_s: Mapping[str, float] = Field(min_length=1)
    """Of bf16 matrix products, by "ROWSxCOLUMNSxINNER"."""
    copy_gb_s: float = Field(gt=0)
    h2d_gb_s: float = Field(gt=0)
    d2h_gb_s: float = Field(gt=0)
    both_ways_gb_s: float = Field(gt=0)
    """Each way, when both carry at once."""

    def product_flops(self, shape: Sequence[int] | None) -> float:
        """Floating-point operations a second in products of `shape`: those of the nearest one that was measured."""
        rates = {tuple(map(int, name.split("x"))): rate * 1e12 for name, rate in self.product_tflop_s.items()}
        if shape is None:
            return max(rates.values())
        return rates[min(rates, key=lambda measured: _distance(measured, shape))]


class CpuCeilings(_Figures):
    """Of the processor and its memory. `update_gb_s`: read and written by the updates on all their threads."""

    name: str
    memory_bytes: int = Field(gt=0)
    update_gb_s: float = Field(gt=0)
    update_threads: int = Field(gt=0)
    copy_gb_s: float = Field(gt=0)
    product_tflop_s: float | None = None
    """Of bf16 matrix products, where there is no GPU."""


class DiskCeilings(_Figures):
    """Of the file system at `path`. `mixed_gb_s`: reads and writes together."""

    path: str
    read_gb_s: float = Field(gt=0)
    write_gb_s: float = Field(gt=0)
    mixed_gb_s: float = Field(gt=0)
    direct: bool
    """Whether it takes O_DIRECT."""
    backend: str


class Ceilings(_Figures):
    """Of one machine. `source`: when and how they were measured. `gpu`: None where there is none."""

    source: str
    cpu: CpuCeilings
    gpu: GpuCeilings | None = None
    disks: tuple[DiskCeilings, ...] = ()
    process_bytes: int | None = Field(default=None, gt=0)
    """Of host memory: a process that trains, with the GPU where there is one, before an engine is built. None: not
    measured, as in files of before."""
    engine_operation_s: float | None = Field(default=None, gt=0)
    """Seconds of the host under an engine for an operation of the GPU: Python, hooks and the launch. None: not
    measured, or no GPU."""

    def process_of(self, *, on_gpu: bool) -> int | None:
        """`process_bytes` where they are those of a process that computes there, None where it was the other one."""
        return self.process_bytes if on_gpu == (self.gpu is not None) else None

    def text(self) -> str:
        """As a file holds them."""
        return json.dumps(self.model_dump(), indent=2) + "\n"


def _distance(one: Sequence[int], other: Sequence[int]) -> float:
    return sum(abs(math.log(a / b)) for a, b in zip(one, other, strict=True))


def preset_names() -> list[str]:
    return sorted(path.stem for path in PRESETS.glob("*.json"))


def read_ceilings(name: str) -> Ceilings:
    """Of a preset, or of a file that `ds-slide doctor --json` has written. Raises SlideError for neither, and for a
    file with something else in it."""
    path = PRESETS / f"{name}.json"
    if not path.is_file():
        path = Path(name)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SlideError(
            f"--ceilings {shown(name)} is no preset ({', '.join(preset_names())}) and no file that can be read "
            f"({error.strerror}); name one, or leave it out for those of this machine"
        ) from error
    except ValueError as error:
        raise SlideError(f"--ceilings: {path} is not JSON ({error})") from error
    if isinstance(found, Mapping) and "ceilings" in found:  # the whole answer of `ds-slide doctor --json`
        found = found["ceilings"]
    return checked(found, str(path))


def checked(found: Any, where: str) -> Ceilings:
    """`found`, read from `where`. Raises SlideError for what are no ceilings."""
    try:
        return Ceilings.model_validate(found)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"])) or "the whole"
        raise SlideError(
            f"ceilings: {where} has no ceilings of a machine: {place}: {first['msg']}; measure with `ds-slide doctor`"
        ) from error
