"""Updates by Muon (`ds_slide.optim.muon`): whole matrices, on the accelerator, one after the other.

On one rank a task of the update lane has a unit to itself. For each matrix, gradient, momentum and master go up on a
stream of the lane, the products run there, and momentum and master come back. The task ends when they are in host
memory. The buffers have these owners, all by the length of one task:

    gradient, weights, remainders, momentum    host memory of the unit: the update lane, as for every rule (`Unit`)
    their copies and the products              GPU memory that torch gives to the lane's stream: the update lane

Several ranks each have a flat piece of a parameter. There, and where the norm of the updates is limited, the step first
calls `orthogonalize`: the compute thread owns all of the above, because no lane has work, and uses its own stream. Each
rank advances its piece of the momentum, the ranks gather the pieces of Nesterov's update, and each computes the whole
orthogonal update and keeps its piece, in the place of the gradient. The task of the lane then applies that.

The plan counts the GPU memory as `MATRIX_UPDATE`, enough for the largest matrix. Small matrices of one parameter
(experts, heads) go together as far as they fit into that. The model alone decides how many, so placement changes no
bit.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ds_slide.model.layout import Entry, piece
from ds_slide.optim.cpu import CpuUpdater
from ds_slide.optim.low_precision import CHUNK
from ds_slide.optim.muon import Matrices, MuonHyper, orthogonal
from ds_slide.optim.reference import encode_split
from ds_slide.optim.rounding import random_bits, round_bf16
from ds_slide.optim.rule import Part
from ds_slide.plan.allocations import MATRIX_UPDATE
from ds_slide.runtime.core.context import Context
from ds_slide.runtime.core.futures import synchronize
from ds_slide.runtime.core.unit import Unit
from ds_slide.runtime.updates.apply import HostUpdates, UpdateSpan, UpdateStep
from ds_slide.store.state_buffers import StateBuffers
from ds_slide.store.tiers import Held
from ds_slide.store.way_back import WayBack


class MatrixUpdates:
    """Takes the place of `HostUpdates`, which has the units that AdamW updates."""

    def __init__(self, context: Context) -> None:
        self._host = HostUpdates(context.updater)
        self._device, self._failures, self._ranks = context.device, context.failures, context.ranks
        self._stream = context.device.stream()
        self._scale = context.settings.slide.muon_scale
        self._most = max((unit.largest_matrix for unit in context.plan.units), default=0)
        if context.allocator.tier(MATRIX_UPDATE) is not None:
            context.allocator.begun(MATRIX_UPDATE)

    @property
    def updater(self) -> CpuUpdater:
        return self._host.updater

    def run(self, span: UpdateSpan, step: UpdateStep, part: Part = "whole", way_back: WayBack | None = None) -> int:
        """Update the elements of `span`, of which Muon takes whole units only. -> bytes moved. Called by the update
        lane."""
        if not any(isinstance(each.hyper, MuonHyper) for each in step.segments):
            return self._host.run(span, step, part, way_back)
        assert part == "whole" and way_back is None
        with self._device.on(self._stream):
            for entry, hyper, matrices in _parameters(span.unit, step):
                if hyper.factor is not None:
                    update = self._up(span.gradient[entry.place]).mul_(hyper.factor)
                    self._apply(span, entry.place, update, hyper)
                    continue
                for place, some in matrices.together(self._most):
                    run = slice(entry.offset + place.start, entry.offset + place.stop)
                    gradient = self._up(span.gradient[run]).mul_(step.grad_scale)
                    update = self._orthogonal(self._nesterov(span.unit, run, gradient, hyper), some, hyper)
                    self._apply(span, run, update, hyper)
            done = self._device.mark(self._stream, host_waits=True)
        synchronize(self._failures, done, f"the update of {span.unit.name}")
        return 2 * span.buffers.nbytes() + span.gradient.nbytes

    def orthogonalize(self, unit: Unit, step: UpdateStep) -> float:
        """Advance the momentum of a unit, and put its orthogonal update in the place of its held gradient. Return the
        square sum of this rank's part of the update. Called by the compute thread, on all ranks in the same order,
        while the lanes have no work."""
        assert isinstance(unit.state.gradient, Held)
        gradient, norms = unit.state.gradient.load(slice(0, unit.codec.numel)), []
        for entry, hyper, matrices in _parameters(unit, step):
            own = self._nesterov(unit, entry.place, self._up(gradient[entry.place]).mul_(step.grad_scale), hyper)
            whole = self._ranks.gather(own, f"the update of {entry.name}", in_step=True)
            for place, some in matrices.together(self._most):
                whole[place] = self._orthogonal(whole[place], some, hyper)
            start, stop = piece(entry, self._ranks.rank)
            update = whole[start:stop]
            norms.append(torch.linalg.vector_norm(update, dtype=torch.float64))
            gradient[entry.offset : entry.offset + stop - start].copy_(update.to(gradient.dtype))
        return sum(float(norm) ** 2 for norm in norms)

    def _apply(self, span: UpdateSpan, run: slice, update: torch.Tensor, hyper: MuonHyper) -> None:
        buffers = span.buffers.part(run, span.unit.state.specs)
        master = self._master(buffers).mul_(1.0 - hyper.lr * hyper.weight_decay)
        _store_master(buffers, master.add_(update, alpha=-hyper.lr))

    def _nesterov(self, unit: Unit, run: slice, gradient: torch.Tensor, hyper: MuonHyper) -> torch.Tensor:
        """Return Nesterov's update, and advance the momentum. `gradient`: a flat fp32 tensor, which becomes the update.
        A momentum in bf16 is rounded stochastically, by bits of (unit, step, element)."""
        stored = unit.state.raw("momentum_buffer", run)
        momentum = self._up(stored).lerp_(gradient, 1.0 - hyper.momentum)
        for start in range(0, stored.numel(), CHUNK):
            values, place = momentum[start : start + CHUNK], stored[start : start + CHUNK]
            if stored.dtype == torch.bfloat16:
                random = random_bits(unit.order, hyper.step, run.start + start, values.numel(), values.device) >> 16
                values = round_bf16(values, random)
            place.copy_(values, non_blocking=True)
        return gradient.lerp_(momentum, hyper.momentum)

    def _orthogonal(self, update: torch.Tensor, matrices: Matrices, hyper: MuonHyper) -> torch.Tensor:
        """Return the scaled orthogonal update, flat and in fp32."""
        found = orthogonal(update.view(matrices.shape), hyper.method, hyper.rule.dtypes[hyper.method])
        return found.reshape(-1).to(torch.float32).mul_(matrices.scale(self._scale))

    def _master(self, buffers: StateBuffers) -> torch.Tensor:
        """Return the fp32 masters on the accelerator, as a new tensor."""
        weight, remainder = buffers.weight, buffers.remainder
        if remainder is None or remainder.is_floating_point():
            return self._up(weight if remainder is None else remainder)
        bits = self._sent(weight).view(torch.int16).to(torch.int32)  # `join_split`, in one piece
        return bits.bitwise_left_shift_(16).add_(self._sent(remainder)).view(torch.float32)

    def _up(self, stored: torch.Tensor) -> torch.Tensor:
        """Return a new fp32 tensor on the accelerator. It is widened there: the copy has the bytes of `stored`."""
        return self._sent(stored).to(torch.float32, copy=stored.device == self._device.torch)

    def _sent(self, stored: torch.Tensor) -> torch.Tensor:
        return stored.to(self._device.torch, non_blocking=True)


def _parameters(unit: Unit, step: UpdateStep) -> Iterator[tuple[Entry, MuonHyper, Matrices]]:
    """Yield the parameters of a unit with their hyper-parameters and matrices. Parameters that are off are in no
    segment."""
    for parameter, entry in unit.trainable:
        for each in step.segments:
            hyper, segment = each.hyper, each.segment
            if segment.start <= entry.offset < segment.stop and isinstance(hyper, MuonHyper):
                yield entry, hyper, hyper.rule.matrices(parameter, entry.shape)


def _store_master(buffers: StateBuffers, master: torch.Tensor) -> None:
    weight, remainder = buffers.weight, buffers.remainder
    if remainder is None:
        weight.copy_(master, non_blocking=True)
    elif remainder.is_floating_point():
        remainder.copy_(master, non_blocking=True)
        weight.copy_(master.to(weight.dtype), non_blocking=True)
    else:
        high, low = encode_split(master)
        weight.view(torch.int16).copy_(high, non_blocking=True)
        remainder.copy_(low, non_blocking=True)
