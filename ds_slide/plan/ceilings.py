"""The rates of a machine, and the files that hold them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError, model_validator

from ds_slide.config import shown
from ds_slide.errors import SlideError
from ds_slide.plan.rank_ceilings import Figures, RanksCeilings, Rate

PRESETS = Path(__file__).resolve().parents[1].joinpath("configs", "ceilings")
"""Files of machines that were measured before, by name."""


ATTENTION_WIDTH = 128
"""Elements of each head in the attention that is measured."""
_Keys = Annotated[str, Field(pattern=r"^[1-9][0-9]*$")]


class GpuCeilings(Figures):
    """The ceilings of a GPU and its link, in 10^9 bytes a second. A copy on the device counts reads and writes."""

    name: str
    memory_bytes: int = Field(gt=0)
    product_tflop_s: Mapping[str, float] = Field(min_length=1)
    """Rates of bf16 matrix products, by "ROWSxCOLUMNSxINNER"."""
    copy_gb_s: float = Field(gt=0)
    h2d_gb_s: float = Field(gt=0)
    d2h_gb_s: float = Field(gt=0)
    both_ways_gb_s: float = Field(gt=0)
    """The rate of each way, when data moves in both."""
    attention_tflop_s: Mapping[_Keys, Rate] = {}
    attention_backward_tflop_s: Mapping[_Keys, Rate] = {}
    """Rates of causal attention, by the number of keys. Empty: not measured, for instance in older files."""

    def product_flops(self, shape: Sequence[int] | None) -> float:
        """Return the FLOP a second of products of `shape`: the rate of the nearest shape that was measured."""
        rates = {tuple(map(int, name.split("x"))): rate * 1e12 for name, rate in self.product_tflop_s.items()}
        if shape is None:
            return max(rates.values())
        return rates[min(rates, key=lambda measured: _distance(measured, shape))]

    def attention_flops(self, keys: int, width: int, *, backward: bool) -> float | None:
        """Return the FLOP a second of attention over `keys` keys with heads of `width` elements; None where it was not
        measured with two lengths. The seconds of one FLOP are a constant, and a part divided by the number of keys.
        Both are fitted to the shortest and the longest sequence that were measured."""
        given = self.attention_backward_tflop_s if backward else self.attention_tflop_s
        seconds = sorted((int(name), 1e-12 / rate) for name, rate in given.items())
        if len(seconds) < 2:
            return None
        (short, of_short), (long, of_long) = seconds[0], seconds[-1]
        shared = max(0.0, of_short - of_long) / (1 / short - 1 / long)
        constant = max(0.0, of_long - shared / long)
        # Heads of 64 elements have the same exponentials, and reach 0.70 to 0.85 of the rate of heads of 128, with 512
        # to 32,768 tokens (benchmarks/results/2026-11-26_nvidia-h100_host-and-kernels.md).
        return min(1.0, width / ATTENTION_WIDTH) ** 0.4 / (constant + shared / max(1, keys))


class CpuCeilings(Figures):
    """The ceilings of the processor and its memory. `update_gb_s`: read and written by updates on all their threads."""

    name: str
    memory_bytes: int = Field(gt=0)
    update_gb_s: float = Field(gt=0)
    update_threads: int = Field(gt=0)
    copy_gb_s: float = Field(gt=0)
    product_tflop_s: float | None = None
    """The rate of bf16 matrix products, where there is no GPU."""


class DiskCeilings(Figures):
    """The ceilings of the file system at `path`. `mixed_gb_s`: reads and writes together."""

    path: str
    read_gb_s: float = Field(gt=0)
    write_gb_s: float = Field(gt=0)
    mixed_gb_s: float = Field(gt=0)
    direct: bool
    """Whether it takes O_DIRECT."""
    backend: str

    def at(self, part: float) -> DiskCeilings:
        """Return the ceilings of a part of this disk."""
        rates = {name: part * getattr(self, name) for name in ("read_gb_s", "write_gb_s", "mixed_gb_s")}
        return self.model_copy(update=rates)


class Ceilings(Figures):
    """The ceilings of one machine. `source`: when and how they were measured. `gpu`: None where there is none."""

    source: str
    cpu: CpuCeilings
    gpu: GpuCeilings | None = None
    disks: tuple[DiskCeilings, ...] = ()
    process_bytes: int | None = Field(default=None, gt=0)
    """Host bytes of a process that trains (with the GPU if there is one) before an engine is built. None: not measured,
    for instance in older files."""
    of_ranks: tuple[RanksCeilings, ...] = ()
    """What each of several ranks gets, one entry for each number of ranks that was measured."""

    @model_validator(mode="before")
    @classmethod
    def _of_before(cls, found: Any) -> Any:
        """Leave out the host's times, which older files have."""
        of_host = ("operation_s", "engine_operation_s", "engine_visit_s")
        return {key: found[key] for key in found if key not in of_host} if isinstance(found, Mapping) else found

    def process_of(self, *, on_gpu: bool) -> int | None:
        """Return `process_bytes` where the measured process computed there (GPU or host); otherwise None."""
        return self.process_bytes if on_gpu == (self.gpu is not None) else None

    def measured(self, ranks: int) -> RanksCeilings | None:
        """Return what each of `ranks` ranks gets; None where it was not measured."""
        return next((each for each in self.of_ranks if each.ranks == ranks), None)

    def with_measured(self, found: RanksCeilings) -> Ceilings:
        others = [each for each in self.of_ranks if each.ranks != found.ranks]
        return self.model_copy(update={"of_ranks": (*others, found)})

    def of_rank(self, ranks: int) -> Ceilings:
        """Return the ceilings of one of `ranks` ranks while all work.

        Rates that were measured with this number are those of the slowest rank. Other rates of the processor, of host
        memory and of disks are divided by the number. Other rates of the link are not: most GPUs have one of their own.
        """
        if ranks == 1:
            return self
        measured = self.measured(ranks)
        least = {} if measured is None else measured.least.named()

        def of(figures: Figures, *names: str, by: int = ranks) -> dict[str, float]:
            whole = {name: getattr(figures, name) for name in names}
            return {name: least.get(name, rate / by) for name, rate in whole.items() if rate is not None}

        cpu = self.cpu.model_copy(update=of(self.cpu, "update_gb_s", "copy_gb_s", "product_tflop_s"))
        gpu = self.gpu
        if gpu is not None:
            gpu = gpu.model_copy(update=of(gpu, "h2d_gb_s", "d2h_gb_s", "both_ways_gb_s", by=1))
        parts = [least.get(disk.path, disk.mixed_gb_s / ranks) / disk.mixed_gb_s for disk in self.disks]
        disks = tuple(disk.at(part) for disk, part in zip(self.disks, parts, strict=True))
        return self.model_copy(update={"cpu": cpu, "gpu": gpu, "disks": disks})

    def text(self) -> str:
        """Return the text of a file that holds them."""
        return json.dumps(self.model_dump(), indent=2) + "\n"


def _distance(one: Sequence[int], other: Sequence[int]) -> float:
    return sum(abs(math.log(a / b)) for a, b in zip(one, other, strict=True))


def preset_names() -> list[str]:
    return sorted(path.stem for path in PRESETS.glob("*.json"))


def read_ceilings(name: str) -> Ceilings:
    """Return the ceilings of a preset, or of a file that `ds-slide doctor --json` has written. Raises SlideError for
    neither, and for a file with other contents."""
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
    """Return `found`, read from `where`, as ceilings. Raises SlideError where it is none."""
    try:
        return Ceilings.model_validate(found)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"])) or "the whole"
        raise SlideError(
            f"ceilings: {where} has no ceilings of a machine: {place}: {first['msg']}; measure with `ds-slide doctor`"
        ) from error
