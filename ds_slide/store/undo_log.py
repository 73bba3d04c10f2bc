"""Host memory for what an update overwrites while nobody knows yet whether it counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ds_slide.store.state_buffers import StateBuffers, StateBufferSpec

_LINE = 64
"""Bytes: each array begins in a cache line of its own, so that streaming stores fill whole ones."""


@dataclass(frozen=True)
class UndoLog:
    """Arrays as large as a unit's weights and optimizer state buffers ([trainable elements]), for their old bytes.

    `keeps_weight`: others read the weights, so the update leaves these alone and puts the new ones here, in place of
    the old ones, from where they are copied when it counts."""

    arrays: StateBuffers
    keeps_weight: bool

    @classmethod
    def of(
        cls,
        memory: torch.Tensor,
        weight: torch.dtype,
        specs: Sequence[StateBufferSpec],
        numel: int,
        *,
        keeps_weight: bool,
    ) -> UndoLog:
        """In `memory`, of `undo_log_bytes` bytes."""
        start = 0

        def array(dtype: torch.dtype, items: int) -> torch.Tensor:
            nonlocal start
            taken = memory[start : start + items * dtype.itemsize].view(dtype)
            start += _whole_lines(taken.nbytes)
            return taken

        old = array(weight, numel)
        return cls(StateBuffers(old, {spec.name: array(spec.dtype, spec.items(numel)) for spec in specs}), keeps_weight)


def undo_log_bytes(weight_bytes: int, specs: Sequence[StateBufferSpec], numel: int) -> int:
    """Bytes of an undo log of `numel` elements. `weight_bytes`: of one weight."""
    return _whole_lines(weight_bytes * numel) + sum(_whole_lines(spec.nbytes(numel)) for spec in specs)


def _whole_lines(nbytes: int) -> int:
    return -(-nbytes // _LINE) * _LINE
