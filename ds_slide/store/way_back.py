"""Host memory to take back a speculative update: an undo log, or spare state buffers.

undo log        For states in fp32 it holds the lowest byte of each old number. The rest is computed from the new
                numbers (csrc/update/undo.hpp): 3.25 bytes a parameter of AdamW. Shorter states, and masters of fp16
                weights, are copied.
spare buffers   The update writes its new numbers there and leaves the old ones. When it is confirmed, the unit
                exchanges its buffers with the spare ones. When it is taken back, nothing has to be done. It moves the
                same bytes as an update in place that writes an undo log too (csrc/update/out_of_place.hpp).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ds_slide.store.in_memory import InMemory
from ds_slide.store.state_buffers import StateBuffers, StateBufferSpec

SLICE = 16 * 1024
"""Elements of a slice of an update (csrc/update/types.hpp)."""
SLICE_BYTES = 4096
"""Bytes of a slice's log, which holds the numbers that cannot be computed."""
_LINE = 64
"""Bytes of a cache line. Each array begins at a new one."""


@dataclass(frozen=True)
class UndoLog:
    """The undo log of a unit, or of one of its `runs`. Each array holds the elements in their order."""

    memory: torch.Tensor
    """The memory that all arrays lie in."""
    runs: Sequence[slice]
    specs: Sequence[StateBufferSpec]
    new_weight: torch.Tensor | None
    """The new weights until the update is confirmed, where others read the old ones. None: they are replaced."""
    old: StateBuffers | None
    """Copies of the old numbers. The weights are copied only where they are replaced."""
    low: Sequence[torch.Tensor] = ()
    """The lowest bytes of the weights and the states."""
    slices: torch.Tensor | None = None
    first_slices: Mapping[int, int] | None = None
    """The slice that each run begins with, by its first element."""

    @classmethod
    def of(
        cls,
        memory: torch.Tensor,
        weight: torch.dtype,
        specs: Sequence[StateBufferSpec],
        runs: Sequence[slice],
        *,
        keeps_weight: bool,
    ) -> UndoLog:
        """Lay out a log in `memory` of `undo_log_bytes` bytes. `runs`: spans without gaps, each updated at once."""
        arrays, start = {}, 0
        for name, nbytes in _arrays(weight.itemsize, specs, runs, keeps_weight=keeps_weight).items():
            arrays[name] = memory[start : start + nbytes]
            start += _whole_lines(nbytes)
        new_weight = arrays.pop("new weight").view(weight) if keeps_weight else None
        if not _is_invertible(specs):
            copied = arrays.pop("weight").view(weight) if "weight" in arrays else torch.empty(0, dtype=weight)
            return cls(
                memory,
                runs,
                specs,
                new_weight,
                StateBuffers(copied, {s.name: arrays[s.name].view(s.dtype) for s in specs}),
            )
        slices, first_slices, number = arrays.pop("slices"), {}, 0
        for run in runs:
            first_slices[run.start] = number
            number += _slices(run)
        return cls(memory, runs, specs, new_weight, None, list(arrays.values()), slices, first_slices)

    def part(self, span: slice) -> UndoLog:
        """Return the log of one of the runs."""
        new_weight = None if self.new_weight is None else self.new_weight[span]
        old = None if self.old is None else self.old.part(span, self.specs)
        slices = None
        if self.slices is not None and self.first_slices is not None:
            slices = self.slices[self.first_slices[span.start] * SLICE_BYTES :]
        return UndoLog(self.memory, [span], self.specs, new_weight, old, [each[span] for each in self.low], slices)

    @property
    def nbytes(self) -> int:
        """Bytes that an update writes, without `slices`."""
        copied = 0 if self.old is None else self.old.nbytes()
        return copied + sum(each.nbytes for each in self.low)


def undo_log_bytes(
    weight_bytes: int, specs: Sequence[StateBufferSpec], runs: Sequence[slice], *, keeps_weight: bool
) -> int:
    """Return the bytes of a unit's undo log. `weight_bytes`: bytes of one weight."""
    return sum(map(_whole_lines, _arrays(weight_bytes, specs, runs, keeps_weight=keeps_weight).values()))


def _arrays(
    weight_bytes: int, specs: Sequence[StateBufferSpec], runs: Sequence[slice], *, keeps_weight: bool
) -> dict[str, int]:
    """Return the bytes of each array by name."""
    numel = runs[-1].stop
    arrays = {"new weight": weight_bytes * numel} if keeps_weight else {}
    if _is_invertible(specs):
        arrays |= {"weight": numel} | {spec.name: numel for spec in specs if spec.state is not None}
        return arrays | {"slices": sum(map(_slices, runs)) * SLICE_BYTES}
    if not keeps_weight:
        arrays["weight"] = weight_bytes * numel
    return arrays | {spec.name: spec.nbytes(numel) for spec in specs}


def _is_invertible(specs: Sequence[StateBufferSpec]) -> bool:
    """Whether the old numbers can be computed from the new ones. Nothing may be rounded stochastically, and an int16
    remainder is the only master part."""
    masters = [spec for spec in specs if spec.state is None]
    states = [spec for spec in specs if spec.state is not None]
    return all(spec.dtype == torch.int16 for spec in masters) and all(spec.dtype == torch.float32 for spec in states)


def _slices(run: slice) -> int:
    return -(-(run.stop - run.start) // SLICE)


def _whole_lines(nbytes: int) -> int:
    return -(-nbytes // _LINE) * _LINE


@dataclass(frozen=True)
class SpareBuffers:
    """The spare buffers of a unit in host memory. `own`, `spare`: the state buffers of the weights and of `specs`, by
    name. `runs`: spans of elements without gaps, each updated at once.

    The update lane writes to the spare buffers and exchanges them. It exchanges them while the update's future is
    pending: until that is done both belong to the update, and other users of the unit wait for it."""

    runs: Sequence[slice]
    specs: Sequence[StateBufferSpec]
    own: Mapping[str, InMemory]
    spare: Mapping[str, InMemory]

    def part(self, span: slice) -> StateBuffers:
        """Return views of the elements `span` in the buffers that are spare now."""
        optimizer = {spec.name: self.spare[spec.name].tensor[spec.cut(span)] for spec in self.specs}
        return StateBuffers(self.spare["weight"].tensor[span], optimizer)

    def exchange(self) -> None:
        """Exchange the unit's buffers with the spare ones, which have been written completely."""
        for name, own in self.own.items():
            own.exchange(self.spare[name])


WayBack = UndoLog | SpareBuffers
"""How a unit takes back a speculative update."""


def can_be_out_of_place(specs: Sequence[StateBufferSpec]) -> bool:
    """Whether these optimizer state buffers can be updated out of place: their states must be in fp32."""
    return all(spec.dtype == torch.float32 for spec in specs if spec.state is not None)
