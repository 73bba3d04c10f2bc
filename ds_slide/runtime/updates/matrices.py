"""Updates by Muon (`ds_slide.optim.muon`): whole matrices, on the accelerator.

States on the GPU are updated in place, on the compute stream (`run_on_gpu`), many matrices of a unit together where a
kernel takes them so (`ds_slide.optim.muon_batch`). That changes no bit. Their iterations are recorded (`iterations`),
and so are the products of single matrices, there and on the lane of products (`recorded_runs`).

States in host memory pass three threads, each with a stream, on one rank. The matrices of all units follow each other
without a gap: while the products of one run, the next ones go up, from the next unit too, and earlier ones come back.

    update lane       issues the copies up of one unit after the other, in the order of their deadlines
    products lane     the products; it knows where the copies are, and writes into them
    d2h of matrices   issues the copies down, the momentum beside the products of its own matrix; ends the unit's update

The buffers have these owners:

    gradient, weights, remainders, momentum    host memory of the unit: its update, as for every rule (`Unit`), from the
                                               task of the update lane to the last copy down
    their copies                               a lease of `ByteRing`, which goes from lane to lane with a marker, and
                                               back when the last copy down has passed
    the update and the products                memory of the recordings, or what torch gives to the stream of the
                                               products. It is used there alone, once the recordings are made

The update lane waits for the room of the oldest lease, on the host. So the order of units is decided as late as it can
be. The other two lanes wait for no lease, and only for the GPU.

Several ranks each have a flat piece of a parameter. There, and where the norm of the updates is limited, the step first
calls `orthogonalize`: the compute thread owns all of the above, because no lane has work, and uses its own stream. Each
rank advances its piece of the momentum, the ranks gather the pieces of Nesterov's update, and each computes the whole
orthogonal update and keeps its piece, in the place of the gradient. The update then applies that.

The plan counts the GPU memory as `MATRIX_COPIES` and `MATRIX_PRODUCTS`. Small matrices of one parameter (experts,
heads) go together up to the size of the model's largest matrix. The model alone decides how many, so placement changes
no bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import torch

from ds_slide.compression.codec import SegmentStep
from ds_slide.model.layout import Entry, piece
from ds_slide.optim.cpu import CpuUpdater
from ds_slide.optim.muon import Matrices, Method, MuonHyper
from ds_slide.optim.muon_batch import goes_together, orthogonal_together
from ds_slide.optim.muon_groups import batches
from ds_slide.optim.muon_step import advance, apply
from ds_slide.optim.rule import Hyper, Part
from ds_slide.plan.allocations import MATRIX_COPIES, MATRIX_PRODUCTS
from ds_slide.runtime.core.byte_ring import ByteRing
from ds_slide.runtime.core.context import Context
from ds_slide.runtime.core.device import Marker
from ds_slide.runtime.core.futures import synchronize
from ds_slide.runtime.core.lanes import Job
from ds_slide.runtime.core.unit import Unit
from ds_slide.runtime.updates.apply import HostUpdates, UpdateSpan, UpdateStep, on_gpu
from ds_slide.runtime.updates.iterations import Iterations
from ds_slide.runtime.updates.recorded_runs import Products, RecordedRun, RecordedRuns
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

    @property
    def shape(self) -> tuple[int, int, int]:
        assert self.matrices is not None
        return self.matrices.shape

    @property
    def dtype(self) -> torch.dtype:
        """The data type of the products."""
        return self.hyper.rule.dtypes[self.hyper.method]


@dataclass(frozen=True)
class _Sent:
    """A run on the accelerator: its state buffers in host memory (`stored`), and copies of them and of the gradient.
    `up`: behind the copies up. `order`: of the unit."""

    run: _Run
    stored: StateBuffers
    here: StateBuffers
    gradient: torch.Tensor
    up: Marker
    order: int


class MatrixUpdates:
    """Takes the place of `HostUpdates`, which has the units that AdamW updates."""

    def __init__(self, context: Context) -> None:
        self._host = HostUpdates(context.updater)
        self._device, self._failures, self._ranks = context.device, context.failures, context.ranks
        self._products, self._down = context.lanes.products, context.lanes.matrices_d2h
        self._before = (context.lanes.d2h, context.lanes.update, self._products, self._down)
        """The lanes that an update passes, in this order."""
        self._up = context.device.stream()
        self._scale = context.settings.slide.muon_scale
        self._most = max((unit.largest_matrix for unit in context.plan.units), default=0)
        self._has_kernel = context.settings.has_muon_kernel
        wanted = context.settings.slide.captured_blocks
        records = self._device.is_cuda if wanted == "auto" else wanted
        self.iterations = Iterations(self._device) if records else None
        """Of the thread that computes, as `alone`."""
        self.alone = RecordedRuns(self._device, self._most, first=False) if records else None
        self.streamed = RecordedRuns(self._device, self._most, first=True) if records else None
        """Of the lane of products."""
        self._methods: tuple[Method, ...] | None = None
        """The methods by parameter group for which all runs of the lane are recorded."""
        self._of_units: Mapping[Unit, Sequence[Products]] = {}
        """These runs."""
        self._copies: ByteRing | None = None
        """None where the states of all matrices are on the GPU from the start."""
        if context.allocator.tier(MATRIX_COPIES) is not None:
            buffer = context.allocator.tensor(MATRIX_COPIES, torch.uint8)
            self._copies = ByteRing(buffer, context.failures, MATRIX_COPIES)
        if context.allocator.tier(MATRIX_PRODUCTS) is not None:
            context.allocator.begun(MATRIX_PRODUCTS)

    @property
    def updater(self) -> CpuUpdater:
        return self._host.updater

    def run(self, span: UpdateSpan, step: UpdateStep, part: Part = "whole", way_back: WayBack | None = None) -> int:
        """Begin to update the elements of `span`, which is a whole unit for Muon. -> bytes moved. Called by the update
        lane."""
        if not takes_matrices(step.segments):
            return self._host.run(span, step, part, way_back)
        assert part == "whole" and way_back is None
        # The largest first: behind the last unit nothing hides the products and the way back of its last matrix.
        for each in sorted(self._runs(span.unit, step), key=lambda run: run.numel, reverse=True):
            self._send(span, each, step.grad_scale)
        return 2 * span.buffers.nbytes() + span.gradient.nbytes

    def then(self, step: UpdateStep, job: Job) -> None:
        if not takes_matrices(step.segments):
            self._host.then(step, job)
            return

        def end() -> None:
            synchronize(self._failures, self._device.mark(host_waits=True), "updated matrices in host memory")
            job()

        # Behind all copies down of this update: both lanes run their jobs in order.
        self._products.submit(lambda: self._down.submit(end))

    def prepare(self, units: Sequence[Unit], hypers: Sequence[Hyper]) -> None:
        """Record the products of all runs of the lane. Called by the compute thread in each step, before it queues
        updates. Where there is something to record, in the first step, it waits for those that are under way: a
        recording counts what memory changes, and torch frees no cached memory meanwhile."""
        methods = tuple(hyper.method for hyper in hypers if isinstance(hyper, MuonHyper))
        if self.streamed is None or self._copies is None or methods == self._methods:
            return
        self._methods = methods
        self._of_units = {unit: [*self._all_products(unit, hypers)] for unit in units}
        if not any(self._of_units.values()):
            return  # several ranks, or clipped updates: `orthogonalize` has made them
        for lane in self._before:
            lane.drain()
        self._device.release_cached()
        with self._own_dtypes():
            self.streamed.prepare(chain.from_iterable(self._of_units.values()), measures=True)

    def products_s(self) -> float | None:
        """Return the seconds that a GPU takes for the products of the lane in a step, with nothing beside them. None
        where they are not known."""
        total = 0.0
        for unit, all_products in self._of_units.items():
            for products in all_products if unit.is_uploaded else ():
                run = None if self.streamed is None else self.streamed.get(products)
                if run is None or run.seconds is None:
                    return None
                total += run.seconds
        return total if self._of_units else None

    def _all_products(self, unit: Unit, hypers: Sequence[Hyper]) -> Iterator[Products]:
        for run in self._runs(unit, UpdateStep(unit.trained.coming(hypers), 1.0)):
            if run.matrices is not None:
                yield self._products_of(run)

    def run_on_gpu(self, unit: Unit, gradient: torch.Tensor, step: UpdateStep) -> None:
        """Update a unit whose states are on the GPU, in place, on the current stream."""
        if not takes_matrices(step.segments):
            self._host.run_on_gpu(unit, gradient, step)
            return
        span = on_gpu(unit, gradient)
        for runs in self._batches(self._runs(unit, step)):
            places = [span.buffers.part(run.items, unit.state.specs) for run in runs]
            given = [gradient[run.items] for run in runs]
            if self._by_kernel(runs[0]):
                updates = (
                    self._advanced(*each, step.grad_scale, unit.order) for each in zip(runs, places, given, strict=True)
                )
                found = self._together(runs, updates)
            else:
                found = iter([self._update_alone(runs[0], places[0], given[0], step.grad_scale, unit.order)])
            for run, here, update in zip(runs, places, found, strict=True):
                self._apply(run, here, update)

    def close(self) -> None:
        """Free the recordings. No update runs any more."""
        for recorded in (self.iterations, self.alone, self.streamed):
            if recorded is not None:
                recorded.close()

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
                run = _Run(place, hyper, some)
                recorded = self._prepared(run)
                given = whole[place] if recorded is None else recorded.update.copy_(whole[place])
                found = self._orthogonal(run, given, recorded)
                whole[place] = found.to(torch.float32).mul_(some.scale(self._scale))
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

    def _send(self, span: UpdateSpan, run: _Run, grad_scale: float) -> None:
        """Copy a run up, and hand it to the next lane."""
        assert self._copies is not None
        stored, gradient = span.buffers.part(run.items, span.unit.state.specs), span.gradient[run.items]
        names = [name for name in stored.optimizer if run.matrices is not None or name != MOMENTUM]
        homes = [gradient, stored.weight, *(stored.optimizer[name] for name in names)]
        copies = self._copies.lease(homes)
        with self._device.on(self._up):
            for copy, home in zip(copies, homes, strict=True):
                copy.copy_(home, non_blocking=True)
            up = self._device.mark()
        here = StateBuffers(copies[1], dict(zip(names, copies[2:], strict=True)))
        sent = _Sent(run, stored, here, copies[0], up, span.unit.order)
        self._products.submit(lambda: self._update(sent, grad_scale))

    def _update(self, sent: _Sent, grad_scale: float) -> None:
        """Update a run. A job of the products lane."""
        lane, stored, here = self._products, sent.stored, sent.here
        lane.wait(sent.up, "matrices on their way up")
        start, recorded = self._device.mark(timed=True), self._recorded(self.streamed, sent.run)
        update = self._advanced(sent.run, here, sent.gradient, grad_scale, sent.order, recorded)
        masters = [(stored.weight, here.weight)]
        if sent.run.matrices is not None:
            self._send_back([(stored.optimizer[MOMENTUM], here.optimizer[MOMENTUM])], last=False)
        self._apply(sent.run, here, self._orthogonal(sent.run, update, recorded))
        lane.meter.add_interval(start, self._device.mark(timed=True), label=("products", sent.order))
        if stored.remainder is not None:
            assert here.remainder is not None
            masters.append((stored.remainder, here.remainder))
        self._send_back(masters, last=True)

    def _send_back(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], *, last: bool) -> None:
        """Copy to host memory what the products stream has made so far: pairs of a place there and its copy here.
        `last`: the lease of the copies ends with these."""
        made = self._device.mark()

        def job() -> None:
            self._down.wait(made, "products of matrices")
            for stored, new in pairs:
                stored.copy_(new, non_blocking=True)
            if last:
                assert self._copies is not None
                self._copies.give_back(self._device.mark(host_waits=True))

        self._down.submit(job)

    def _update_alone(
        self, run: _Run, here: StateBuffers, gradient: torch.Tensor, grad_scale: float, order: int
    ) -> torch.Tensor:
        """Return the orthogonal update of a run whose states are on the GPU. The next call overwrites it."""
        recorded = self._prepared(run)
        return self._orthogonal(run, self._advanced(run, here, gradient, grad_scale, order, recorded), recorded)

    def _advanced(
        self,
        run: _Run,
        here: StateBuffers,
        gradient: torch.Tensor,
        grad_scale: float,
        order: int,
        recorded: RecordedRun | None = None,
    ) -> torch.Tensor:
        """Advance the momentum, and return what `_orthogonal` needs of it and the gradient: in the place that
        `recorded` reads, or in a new tensor."""
        if run.matrices is None:
            return gradient
        out = None if recorded is None else recorded.update
        return advance(here.optimizer[MOMENTUM], gradient, run.hyper, grad_scale, order, run.items.start, out)

    def _apply(self, run: _Run, here: StateBuffers, update: torch.Tensor) -> None:
        """Apply the orthogonal update to the masters."""
        factor = run.hyper.factor if run.matrices is None else run.matrices.scale(self._scale)
        assert factor is not None
        apply(here.weight, here.remainder, update, factor, run.hyper)

    def _batches(self, runs: Iterable[_Run]) -> Iterator[list[_Run]]:
        """Yield all runs of a unit: in batches those that a kernel takes together, the others one by one."""
        taken: dict[tuple[Method, torch.dtype], list[_Run]] = {}
        for run in runs:
            if self._by_kernel(run):
                taken.setdefault((run.hyper.method, run.dtype), []).append(run)
            else:
                yield [run]
        for same in taken.values():
            for indices in batches([run.shape for run in same]):
                yield [same[index] for index in indices]

    def _by_kernel(self, run: _Run) -> bool:
        return self._has_kernel and run.matrices is not None and goes_together(run.shape, run.dtype)

    def _together(self, runs: Sequence[_Run], updates: Iterator[torch.Tensor]) -> Iterator[torch.Tensor]:
        """Yield the flat orthogonal updates of runs that a kernel takes together. The next call overwrites them."""
        shapes, method, dtype = [run.shape for run in runs], runs[0].hyper.method, runs[0].dtype
        with self._own_dtypes():
            if self.iterations is not None:
                yield from self.iterations.orthogonal(shapes, updates, method, dtype)
            else:
                yield from orthogonal_together(shapes, updates, method, dtype, self._device.torch)

    def _products_of(self, run: _Run) -> Products:
        return Products(run.shape, run.hyper.method, run.dtype, self._by_kernel(run))

    def _prepared(self, run: _Run) -> RecordedRun | None:
        """Return a recording of the thread that computes, which makes it first."""
        recorded = self._recorded(self.alone, run)
        if recorded is None and self.alone is not None and run.matrices is not None:
            with self._own_dtypes():
                self.alone.prepare([self._products_of(run)])
            recorded = self._recorded(self.alone, run)
        return recorded

    def _recorded(self, recordings: RecordedRuns | None, run: _Run) -> RecordedRun | None:
        return None if recordings is None or run.matrices is None else recordings.get(self._products_of(run))

    def _orthogonal(self, run: _Run, update: torch.Tensor, recorded: RecordedRun | None = None) -> torch.Tensor:
        """Return the flat orthogonal update of a run. A replay of `recorded` overwrites that of the one before."""
        if run.matrices is None:
            return update
        if recorded is not None:
            return recorded.replay()
        with self._own_dtypes():
            return self._products_of(run).of(update)

    def _own_dtypes(self) -> torch.autocast:
        """Return a context in which products have their own data type, also where a script calls `engine.step()` under
        autocast."""
        return torch.autocast(self._device.torch.type, enabled=False)

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
