"""The files of a checkpoint for the projectors and the moments in their subspaces, which DeepSpeed's files cannot hold.

Each rank saves its part of the moments in its own file. The file of rank 0 has the projectors as well.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ds_slide.checkpoint.archive import PIECE, Planned
from ds_slide.checkpoint.restricted import MappedFiles
from ds_slide.checkpoint.state_buffers import pieces
from ds_slide.compression.lsp.codec import Lsp, Pair
from ds_slide.compression.lsp.projector import Projector
from ds_slide.errors import SlideError
from ds_slide.report.log import log
from ds_slide.runtime.core.unit import Unit
from ds_slide.runtime.engine import SlideRuntime
from ds_slide.runtime.gradients.learning import MOMENTS

NAME = "ds_slide_compression.pt"
"""The file of rank 0."""
_FORMAT = 1

Compressed = Sequence[tuple[Unit, Lsp]]
"""Units whose gradients are compressed, with their codecs."""


def compressed_units(units: Sequence[Unit]) -> Compressed:
    return [(unit, unit.codec) for unit in units if isinstance(unit.codec, Lsp)]


def name_of(rank: int) -> str:
    """Return the name of a rank's file."""
    return NAME if rank == 0 else f"ds_slide_compression_{rank}.pt"


def planned(runtime: SlideRuntime) -> dict[str, Any] | None:
    """Return the content of this rank's file: for each unit the moments, [numel] in the layout of its codec. The file
    of rank 0 also has both projectors of each matrix, the step of each unit's next check, and how masters were kept.
    None where no gradient is compressed."""
    if not (units := compressed_units(runtime.units)):
        return None
    if runtime.parts.context.ranks.rank:
        return {"format": _FORMAT, "units": {unit.name: _moments(unit) for unit, _ in units}}
    return {
        "format": _FORMAT,
        "master_dtype": _master_dtype(runtime),
        "next_check": dict(runtime.parts.learning.next_check),
        "units": {unit.name: {"projectors": _projectors(codec), **_moments(unit)} for unit, codec in units},
    }


def _master_dtype(runtime: SlideRuntime) -> str:
    """Return "bf16" where weights are masters with stochastic rounding (`ds_slide.compression.master_dtype`), else
    "fp32"."""
    return "bf16" if runtime.parts.plan.rounded_masters else "fp32"


def _projectors(codec: Lsp) -> dict[str, list[torch.Tensor]]:
    return {
        # A copy, because a view is pickled with its whole stack.
        matrix.entry.name: [
            each.to("cpu", copy=True) for side in (pair.left, pair.right) for each in (side.indices, side.values)
        ]
        for matrix, pair in zip(codec.matrices, codec.pairs, strict=True)
    }


def _moments(unit: Unit) -> dict[str, Planned]:
    def read(name: str, start: int, stop: int) -> torch.Tensor:
        return unit.state.read(name, slice(start, stop))

    return {name: Planned(unit.codec.numel, torch.float32, functools.partial(read, name)) for name in MOMENTS}


def check(units: Compressed, saved: Any, path: str) -> None:
    """Raise SlideError where `saved`, the content of the file at `path`, has other subspaces than these units."""
    known = isinstance(saved, Mapping) and saved.get("format") == _FORMAT
    found = dict(_sizes_of_file(saved["units"])) if known else None
    wanted = {
        (unit.name, matrix.entry.name): (unit.codec.numel, *matrix.entry.shape, codec.r_of(matrix))
        for unit, codec in units
        for matrix in codec.matrices
    }
    if found != wanted:
        raise SlideError(
            f"{path} does not hold the subspaces of this run; load it with the model, the number of ranks and the "
            "ds_slide.compression (d and r) that it was saved with, or pass load_optimizer_states=False to "
            "load_checkpoint for its weights"
        )


def _sizes_of_file(units: Mapping[str, Any]) -> Iterator[tuple[tuple[str, str], tuple[int, ...]]]:
    for unit, own in units.items():
        numel = own["exp_avg"].numel()
        for name, (left, _, right, _) in own["projectors"].items():
            yield (unit, name), (numel, left.shape[0], right.shape[0], left.shape[1])


def load(runtime: SlideRuntime, saved: Mapping[str, Any], mine: Mapping[str, Any], files: MappedFiles) -> None:
    """Set projectors and moments of the settled units. `saved`: the content of rank 0's file. `mine`: the content of
    this rank's file."""
    was, now = saved.get("master_dtype", "fp32"), _master_dtype(runtime)
    if was != now:
        log.warning(
            "the masters of compressed matrices were %s when this checkpoint was saved, and are %s now: the run does "
            "not go on with the same bits (ds_slide.compression.master_dtype)",
            was,
            now,
        )
    runtime.parts.learning.resume(saved["next_check"])
    device = runtime.device.torch
    for unit, codec in compressed_units(runtime.units):
        own = saved["units"][unit.name]
        for number, matrix in enumerate(codec.matrices):
            saved_pair = [each.clone().to(device) for each in own["projectors"][matrix.entry.name]]
            codec.replace(number, _pair(saved_pair, matrix.d))
        for name in MOMENTS:
            moment = mine["units"][unit.name][name]
            for span in pieces(codec.numel, PIECE):
                with files.using(moment[span]) as values:
                    unit.state.write(name, span, values)
        unit.state.drain()


def _pair(tensors: Sequence[torch.Tensor], d: int) -> Pair:
    left, left_values, right, right_values = tensors
    return Pair(Projector(left, left_values, d), Projector(right, right_values, d))
