"""Updates by Muon (`ds_slide.optim.muon`): whole matrices, on the accelerator.

On one rank a task of the update lane has a unit to itself. Its matrices follow each other on three streams: gradient,
momentum, weight and remainder of the next matrix go up, while the products of one run, and while momentum, weight and
remainder of the one before come back. A momentum comes back beside the products of its own matrix. The task ends when
all are in host memory. The buffers have these owners, all by the length of one task:

    gradient, weights, remainders, momentum    host memory of the unit: the update lane, as for every rule (`Unit`)
    their copies, of `COPIES` matrices         GPU memory that torch gives to the stream up, which takes it again when
                                               the way back of the matrix has passed
    the update and the products                GPU memory that torch gives to the stream of the products, used there
                                               alone

Several ranks each have a flat piece of a parameter. There, and where the norm of the updates is limited, the step first
calls `orthogonalize`: the compute thread owns all of the above, because no lane has work, and uses its own stream. Each
rank advances its piece of the momentum, the ranks gather the pieces of Nesterov's update, and each computes the whole
orthogonal update and keeps its piece, in the place of the gradient. The task of the lane then applies that.

The plan counts the GPU memory as `MATRIX_UPDATE`, enough for the largest matrix. Small matrices of one parameter
(experts, heads) go together as far as they fit into that. The model alone decides how many, so placement changes no
bit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from ds_slide.compression.codec import SegmentStep
from ds_slide.model.layout import Entry, piece
from ds_slide.optim.cpu import CpuUpdater
from ds_slide.optim.muon import Matrices, MuonHyper, orthogonal
from ds_slide.optim.muon_step import advance, apply
from ds_slide.optim.rule import Part
from ds_slide.plan.allocations import COPIES_OF_MATRICES, MATRIX_UPDATE
from ds_slide.runtime.core.context import Context
from ds_slide.runtime.core.device import Marker
from ds_slide.runtime.core.futures import synchronize
from ds_slide.runtime.core.unit import Unit
from ds_slide.runtime.updates.apply import HostUpdates, UpdateSpan, UpdateStep, on_gpu
from ds_slide.store.in_memory import KeptOnGpu
from ds_slide.store.state_buffers import StateBuffers
from ds_slide.store.tiers import Held
from ds_slide.store.way_back import WayBack

MOMENTUM = "momentum_buffer"


@dataclass(frozen=True)
class _Run:
    """Matrices of one parameter that are updated together: the elements `items` of the unit. `matrices` is None where
    the gradient is the orthogonal update already."""

    items: slice
    hyper: MuonHyper
    matrices: Matrices | None

    @property
    def numel(self) -> int:
        return self.items.stop - self.items.start


@dataclass(frozen=True)
class _UnderWay:
    """The copies of a run on the accelerator, which stay until `back`: then the new numbers are in host memory."""

    copies: StateBuffers
    gradient: torch.Tensor
    back: Marker


class MatrixUpdates:
    """Takes the place of `HostUpdates`, which has the units that AdamW updates."""

    def __init__(self, context: Context) -> None:
        self._host = HostUpdates(context.updater)
        self._device, self._failures, self._ranks = context.device, context.failures, context.ranks
        self._up, self._products, self._down = (context.device.stream() for _ in range(3))
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
        if not takes_matrices(step.segments):
            return self._host.run(span, step, part, way_back)
        assert part == "whole" and way_back is None
        under_way: deque[_UnderWay] = deque()
        # The largest first: nothing hides the products and the way back of the last one.
        for each in sorted(self._runs(span.unit, step), key=lambda run: run.numel, reverse=True):
            if len(under_way) == COPIES_OF_MATRICES:
                # Torch may give its memory to the next one, whose copies up wait as well.
                self._device.wait(under_way.popleft().back, self._up)
            under_way.append(self._update(span, each, step.grad_scale))
        if under_way:
            synchronize(self._failures, under_way[-1].back, f"the update of {span.unit.name}")
        return 2 * span.buffers.nbytes() + span.gradient.nbytes

    def run_on_gpu(self, unit: Unit, gradient: torch.Tensor, step: UpdateStep) -> None:
        """Update a unit whose states are on the GPU, in place, on the current stream."""
        if not takes_matrices(step.segments):
            self._host.run_on_gpu(unit, gradient, step)
            return
        span = on_gpu(unit, gradient)
        for run in self._runs(unit, step):
            here, part = span.buffers.part(run.items, unit.state.specs), gradient[run.items]
            self._apply(run, here, self._advanced(run, here, part, step.grad_scale, unit))

    def orthogonalize(self, unit: Unit, step: UpdateStep) -> float:
        """Advance the momentum of a unit, and put its orthogonal update in the place of its held gradient. Return the
        square sum of this rank's part of the update. Called by the compute thread, on all ranks in the same order,
        while the lanes have no work."""
        gradient, norms = self._waiting_gradient(unit), []
        for entry, hyper, matrices in _parameters(unit, step):
            stored = unit.state.raw(MOMENTUM, entry.place)
            momentum, here = self._sent(stored), self._sent(gradient[entry.place])
            own = advance(momentum, here, hyper, step.grad_scale, unit.order, entry.offset)
            stored.copy_(momentum, non_blocking=True)
            whole = self._ranks.gather(own, f"the update of {entry.name}", in_step=True)
            for place, some in matrices.together(self._most):
                found = orthogonal(whole[place].view(some.shape), hyper.method, hyper.rule.dtypes[hyper.method])
                whole[place] = found.reshape(-1).to(torch.float32).mul_(some.scale(self._scale))
            start, stop = piece(entry, self._ranks.rank)
            update = whole[start:stop]
            norms.append(torch.linalg.vector_norm(update, dtype=torch.float64))
            held = gradient[entry.offset : entry.offset + stop - start]
            held.copy_(update.to(gradient.dtype), non_blocking=True)
        return sum(float(norm) ** 2 for norm in norms)  # the first one waits for all of the above

    def _waiting_gradient(self, unit: Unit) -> torch.Tensor:
        """Return the gradient that waits for the step, in host memory or on the GPU."""
        match unit.state.gradient:
            case KeptOnGpu(gradient=kept):
                self._device.wait(unit.gradient.arrived.wait())
                return kept.tensor
            case Held() as held:
                return held.load(slice(0, unit.codec.numel))
        raise AssertionError(f"the gradient of {unit.name} has gone straight to its update")

    def _runs(self, unit: Unit, step: UpdateStep) -> Iterator[_Run]:
        for entry, hyper, matrices in _parameters(unit, step):
            if hyper.factor is not None:
                yield _Run(entry.place, hyper, None)
                continue
            for place, some in matrices.together(self._most):
                yield _Run(slice(entry.offset + place.start, entry.offset + place.stop), hyper, some)

    def _update(self, span: UpdateSpan, run: _Run, grad_scale: float) -> _UnderWay:
        device = self._device
        stored = span.buffers.part(run.items, span.unit.state.specs)
        names = [name for name in stored.optimizer if run.matrices is not None or name != MOMENTUM]
        with device.on(self._up):
            gradient = self._sent(span.gradient[run.items])
            here = StateBuffers(self._sent(stored.weight), {name: self._sent(stored.optimizer[name]) for name in names})
            up = device.mark()
        with device.on(self._products):
            device.wait(up)
            update = self._advanced(run, here, gradient, grad_scale, span.unit)
            if run.matrices is not None:
                self._back(stored.optimizer[MOMENTUM], here.optimizer[MOMENTUM])
            self._apply(run, here, update)
            back = self._back(stored.weight, here.weight)
            if stored.remainder is not None:
                assert here.remainder is not None
                back = self._back(stored.remainder, here.remainder)
        return _UnderWay(here, gradient, back)

    def _advanced(
        self, run: _Run, here: StateBuffers, gradient: torch.Tensor, grad_scale: float, unit: Unit
    ) -> torch.Tensor:
        """Advance the momentum, and return what `_apply` needs of it and the gradient."""
        if run.matrices is None:
            return gradient
        return advance(here.optimizer[MOMENTUM], gradient, run.hyper, grad_scale, unit.order, run.items.start)

    def _apply(self, run: _Run, here: StateBuffers, update: torch.Tensor) -> None:
        """Apply the orthogonal update to the masters."""
        hyper, factor = run.hyper, run.hyper.factor
        if run.matrices is not None:
            shaped = update.view(run.matrices.shape)
            update = orthogonal(shaped, hyper.method, hyper.rule.dtypes[hyper.method]).reshape(-1)
            factor = run.matrices.scale(self._scale)
        assert factor is not None
        apply(here.weight, here.remainder, update, factor, hyper)

    def _back(self, stored: torch.Tensor, new: torch.Tensor) -> Marker:
        """Copy what the current stream has made so far to host memory, on the stream down. -> the end of that."""
        made = self._device.mark()
        with self._device.on(self._down):
            self._device.wait(made)
            stored.copy_(new, non_blocking=True)
            return self._device.mark(host_waits=True)

    def _sent(self, stored: torch.Tensor) -> torch.Tensor:
        """Return a copy on the accelerator; on the CPU accelerator it is the tensor itself."""
        return stored.to(self._device.torch, non_blocking=True)


def takes_matrices(steps: Sequence[SegmentStep]) -> bool:
    """Whether Muon updates the unit of these steps."""
    return any(isinstance(each.hyper, MuonHyper) for each in steps)


def _parameters(unit: Unit, step: UpdateStep) -> Iterator[tuple[Entry, MuonHyper, Matrices]]:
    """Yield the parameters of a unit with their hyper-parameters and matrices. Parameters that are off are in no
    segment."""
    for parameter, entry in unit.trainable:
        for each in step.segments:
            hyper, segment = each.hyper, each.segment
            if segment.start <= entry.offset < segment.stop and isinstance(hyper, MuonHyper):
                yield entry, hyper, hyper.rule.matrices(parameter, entry.shape)
