"""The way of a gradient: from the parameters of a finished unit into its held gradient's buffer or straight into its
update.

    compute stream   pack into a flat GPU staging buffer with its square sum
    collectives      several ranks: average over the ranks, then the square sum, behind what backward goes on with
    d2h lane         one contiguous copy into page-locked host memory
    update lane      accumulate (later micro-batches), or the update at once (gradients not held)

GPU-tier units skip the way down: their gradient stays in a flat device state buffer until the step, which waits for
`arrived`. Held gradients that have no room in host memory go on to SSD (`ds_slide.runtime.gradients.ssd_gradients`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ds_slide.model.layout import piece
from ds_slide.optim.cpu import CpuUpdater
from ds_slide.optim.rule import Hyper
from ds_slide.runtime.device import PASSED, Device, Marker
from ds_slide.runtime.gradients.sources import Packed, Scattered, Source, Staging, collect
from ds_slide.runtime.gradients.ssd_gradients import SsdGradients
from ds_slide.runtime.ranks.collectives import Ranks
from ds_slide.runtime.transfers.handoff import Failures, Future
from ds_slide.runtime.transfers.pool import BufferPool, Lease
from ds_slide.runtime.transfers.stream_worker import StreamWorker
from ds_slide.runtime.unit import Unit, Update
from ds_slide.runtime.updates.update_worker import UpdateWorker
from ds_slide.runtime.updates.updating import Updating


@dataclass(frozen=True)
class GradientRoute:
    """What happens to a gradient that has arrived, fixed for the run."""

    deferred: bool
    """Gradients wait in `UnitState.gradient`, or on SSD, for the step; otherwise a unit is updated as soon as its own
    has arrived."""


class Gradients:
    """Moves gradients. `finalize` is called by the compute thread, once per unit and backward."""

    def __init__(
        self,
        device: Device,
        ranks: Ranks,
        d2h: StreamWorker,
        updates: UpdateWorker,
        updater: CpuUpdater,
        failures: Failures,
        route: GradientRoute,
        stagings: Sequence[Staging],
        ring: Callable[[Unit], BufferPool],
        num_units: int,
        square_sum: Callable[[torch.Tensor], torch.Tensor],
        updating: Updating,
        on_ssd: SsdGradients | None = None,
    ) -> None:
        self._device = device
        self._ranks = ranks
        self._d2h = d2h
        self._updates = updates
        self._updater = updater
        self._failures = failures
        self._route = route
        self._stagings = list(stagings)
        self._turn = 0
        self._ring = ring
        self._square_sum = square_sum
        self._updating = updating
        self._on_ssd = on_ssd
        self.hypers: Sequence[Hyper] = ()
        """Hyper-parameters, by parameter group, of updates that start as soon as a gradient arrives."""
        self.square_sums = torch.zeros(num_units, dtype=torch.float64, device=device.torch)
        """Square sum of every unit's gradient on this rank, by `Unit.order`; `Unit.square_sum_on`
        says which entries count. Written on the collectives stream where there are several ranks."""

    def finalize(self, unit: Unit, *, final: bool, source: Source | None = None) -> None:
        """Take the gradients out of the unit's parameters. `final`: the last micro-batch before the step.

        Parameters without a gradient (unused since the last step) count as zero, as in ZeRO-1 and 2 and in ZeRO-3's
        leaf modules; elsewhere ZeRO-3 updates them once more from the last gradient that they had, which its partition
        buffer still holds. `source`: where the gradient comes from if not from the parameters.
        """
        unit.finalized = True
        if not unit.layout.trainable_numel:
            return
        if unit.state.tier == "gpu":
            self._keep_on_gpu(unit)
        else:
            self._send_to_host(unit, final, source or self._prepare(unit))
        for parameter, _ in unit.trainable:
            parameter.grad = None
        unit.gradient_ready = True

    def square_sum_of(self, unit: Unit, on_device: torch.Tensor) -> float:
        """Square sum of a unit's held gradient, once the lanes have drained; `on_device`: `square_sums`."""
        if not unit.gradient_ready:
            return 0.0
        if unit.square_sum_on is None:
            gradient = unit.state.read("gradient", slice(0, unit.layout.trainable_numel))
            if unit.state.tier == "gpu":
                return float(self._square_sum(gradient))
            return self._updater.sum_of_squares(gradient)
        return float(on_device[unit.order]) if unit.square_sum_on == "device" else unit.host_square_sum

    def held(self, unit: Unit, span: slice) -> Callable[[], torch.Tensor]:
        """What gives the update lane the elements `span` of a held gradient, from wherever it is."""
        if not unit.state.gradient_on_ssd:
            return lambda: unit.state.read("gradient", span)
        on_ssd = self._on_ssd
        assert on_ssd is not None
        return lambda: on_ssd.load(unit, span)

    def _keep_on_gpu(self, unit: Unit) -> None:
        assert unit.state.gradient is not None
        accumulate, state_buffer = unit.gradient_ready, unit.state.gradient
        if self._ranks.world_size == 1:
            summed = collect(unit, state_buffer, accumulate=accumulate)
            self.square_sums[unit.order] = self._square_sum(state_buffer) if summed is None else summed
        else:
            reduced = self._reduced(unit)
            with self._ranks.on_stream():
                try:
                    state_buffer.add_(reduced.own) if accumulate else state_buffer.copy_(reduced.own)
                finally:
                    reduced.release(self._device.mark())
                self.square_sums[unit.order] = self._square_sum(state_buffer)
            unit.arrived = Future.kept(self._failures, self._ranks.mark())
        unit.square_sum_on = "device"

    def add_square_sum(self, unit: Unit, part: torch.Tensor) -> None:
        """Of one more part of a gradient whose source had none when it set out."""
        if unit.square_sum_on == "device":
            self.square_sums[unit.order] += self._square_sum(part)

    def _send_to_host(self, unit: Unit, final: bool, source: Source) -> None:
        accumulate = unit.gradient_ready or unit.converts_gradient
        unit.square_sum_on = None if accumulate else "device"
        try:
            with self._ranks.on_stream():
                if not accumulate:
                    self.square_sums[unit.order] = source.square_sum(self._square_sum)
                packed = self._device.mark()
        except BaseException:
            source.release(self._device.mark())
            raise
        try:
            self._hand_over(unit, final, source, packed, accumulate)
        except BaseException as error:  # an interrupt: whether the lane has the gradient is not known
            self._failures.record("compute", error)
            raise

    def _hand_over(self, unit: Unit, final: bool, source: Source, packed: Marker, accumulate: bool) -> None:
        before = unit.arrived, unit.updated
        unit.arrived = Future(self._failures, f"the gradient of {unit.name} in host memory")
        arrived, first = unit.arrived, not unit.gradient_ready
        if not self._route.deferred:
            self._updating.reserve(unit)
            update, hypers = unit.open_update(self._failures), self.hypers
            self._d2h.submit(lambda: self._update_on_arrival(unit, source, packed, update, hypers, arrived))
        elif accumulate:
            self._d2h.submit(lambda: self._add_on_arrival(unit, source, packed, before, arrived, first, final))
        elif unit.state.gradient_on_ssd:
            self._d2h.submit(lambda: self._hold_on_ssd(unit, source, packed, before, arrived))
        else:
            self._d2h.submit(lambda: self._hold(unit, source, packed, before, arrived))

    # The four ways of a gradient down. Each runs on the d2h lane.

    def _hold(self, unit: Unit, source: Source, packed: Marker, before: tuple[Future, Future], arrived: Future) -> None:
        for future in before:  # the state buffer may still be read by the last step's update
            future.wait()
        assert unit.state.gradient is not None
        marker = PASSED
        for span in unit.spans:
            marker = self._copy(unit, source, span, unit.state.gradient, packed)
        source.release(marker)
        arrived.keep(marker)

    def _hold_on_ssd(
        self, unit: Unit, source: Source, packed: Marker, before: tuple[Future, Future], arrived: Future
    ) -> None:
        for future in before:  # the last step's update reads the same place
            future.wait()
        on_ssd = self._on_ssd
        assert on_ssd is not None

        def store(_: slice, buffer: torch.Tensor) -> int:  # whole gradients: their buffers are for that
            on_ssd.store(unit, buffer)
            return 0

        self._through_ring(unit, source, packed, arrived, store)

    def _add_on_arrival(
        self,
        unit: Unit,
        source: Source,
        packed: Marker,
        before: tuple[Future, Future],
        arrived: Future,
        first: bool,
        final: bool,
    ) -> None:
        # Here, not on the update lane: the last step's update may not have come to that lane yet, from the SSD.
        for future in before if first else ():
            future.wait()
        numel = unit.layout.trainable_numel

        def add(piece: slice, buffer: torch.Tensor) -> int:
            gradient = buffer[: piece.stop - piece.start]
            final_piece = final and piece.stop == numel
            return self._accumulate(unit, piece, gradient, before=before, first=first, final=final_piece)

        self._through_ring(unit, source, packed, arrived, add)

    def _through_ring(
        self, unit: Unit, source: Source, packed: Marker, arrived: Future, use: Callable[[slice, torch.Tensor], int]
    ) -> None:
        """Copy the gradient to a ring buffer, piece by piece where that cannot take it as a whole; `use` each piece on
        the update lane, in order; then it has arrived."""
        ring, numel = self._ring(unit), unit.layout.trainable_numel
        marker, most = PASSED, ring.buffer_bytes // unit.gradient_dtype.itemsize

        def run(lease: Lease, piece: slice, gradient: torch.Tensor) -> int:
            moved = use(piece, gradient)
            lease.release()
            if piece.stop == numel:
                arrived.keep()
            return moved

        for start in range(0, numel, most):
            lease, piece = ring.lease(), slice(start, min(start + most, numel))
            gradient = _of_dtype(lease.buffer, unit.gradient_dtype)
            marker = self._copy(unit, source, piece, gradient, packed, start)
            self._updates.submit(unit.order, marker, functools.partial(run, lease, piece, gradient), "gradient kept")
        source.release(marker)

    def _update_on_arrival(
        self,
        unit: Unit,
        source: Source,
        packed: Marker,
        update: Update,
        hypers: Sequence[Hyper],
        arrived: Future,
    ) -> None:
        lease = self._ring(unit).lease()
        whole = _of_dtype(lease.buffer, unit.gradient_dtype)
        left = len(unit.spans)

        def span_is_done() -> None:  # on the update lane, one thread
            nonlocal left
            left -= 1
            if not left:
                lease.release()

        marker = PASSED
        for index, span in enumerate(unit.spans):
            marker = self._copy(unit, source, span, whole, packed)
            gradient = functools.partial(whole.__getitem__, span)
            self._updating.start(unit, index, update, marker, gradient, hypers, 1.0, span_is_done, reserved=True)
        source.release(marker)
        arrived.keep(marker)

    def _copy(
        self, unit: Unit, source: Source, span: slice, target: torch.Tensor, packed: Marker, target_start: int = 0
    ) -> Marker:
        """`target_start`: the element of the gradient that `target` begins with."""
        self._device.wait(packed, self._d2h.stream)
        end = PASSED
        for part in source.parts(span):
            start = self._device.mark(self._d2h.stream, timed=True)
            source.copy(part, target[part.start - target_start : part.stop - target_start])
            end = self._device.mark(self._d2h.stream, timed=True, host_waits=True)
            moved = (part.stop - part.start) * target.element_size()
            self._d2h.meter.add_interval(start, end, moved, ("gradient", unit.order))
        return end

    def _prepare(self, unit: Unit) -> Source:
        """Blocks are packed, which frees the parameters' gradients at once. An outer module's few large gradients go
        down from where autograd left them: packing a vocabulary matrix would take a staging buffer of its size."""
        if unit.spec.kind == "outer" and self._ranks.world_size == 1:
            return Scattered.of(unit, self._d2h)
        return self._reduced(unit)

    def _reduced(self, unit: Unit) -> Packed:
        """`_reduce` in the next staging buffer, which is given back where that fails: memory may be short."""
        staging = self._take_staging()
        try:
            return self._reduce(unit, staging)
        except BaseException:
            staging.free.keep(self._device.mark())
            raise

    def _accumulate(
        self,
        unit: Unit,
        piece: slice,
        gradient: torch.Tensor,
        *,
        before: tuple[Future, Future],
        first: bool,
        final: bool,
    ) -> int:
        """Add the elements `piece` of a gradient to those that are held. `final`: no more come before the step."""
        if first:
            for future in before:
                future.synchronize()
        on_ssd = self._on_ssd if unit.state.gradient_on_ssd else None
        if on_ssd is not None:
            state_buffer = on_ssd.zeros(unit) if first else on_ssd.load(unit, piece)
        else:
            state_buffer = unit.state.read("gradient", piece)
            if first:
                state_buffer.zero_()
        self._updater.accumulate_(state_buffer, gradient)
        if on_ssd is not None:
            on_ssd.store(unit)
        if final:
            whole = unit.state.read("gradient", slice(0, unit.layout.trainable_numel)) if piece.start else state_buffer
            unit.host_square_sum = self._updater.sum_of_squares(whole)
            unit.square_sum_on = "host"
        return 2 * state_buffer.numel() * state_buffer.element_size() + gradient.numel() * gradient.element_size()

    def _take_staging(self) -> Staging:
        staging = self._stagings[self._turn]
        self._turn = (self._turn + 1) % len(self._stagings)
        self._device.wait(staging.free.wait())
        staging.free = Future(self._failures, "a GPU buffer for a gradient")
        return staging

    def _reduce(self, unit: Unit, staging: Staging) -> Packed:
        """This rank's share of the unit's gradient in the staging buffer, averaged over the ranks. With several ranks
        the collectives stream makes it, and the compute stream does not wait for it."""
        numel = unit.layout.trainable_numel
        if self._ranks.world_size == 1:
            own = _of_dtype(staging.own, unit.gradient_dtype)[:numel]
            return Packed(staging.free, own, collect(unit, own, accumulate=False))
        packed = _of_dtype(staging.packed, unit.gradient_dtype)[: self._ranks.world_size * numel]
        own = _of_dtype(staging.own, unit.gradient_dtype)[:numel]
        packed.zero_()
        targets, sources = [], []
        for (_, entry), flat in zip(unit.trainable, unit.gradients(), strict=True):
            if flat is None:
                continue
            for rank in range(self._ranks.world_size):
                start, stop = piece(entry, rank)
                if stop > start:
                    place = rank * numel + entry.offset
                    targets.append(packed[place : place + stop - start])
                    sources.append(flat[start:stop])
        if targets:
            torch._foreach_copy_(targets, sources)
        self._ranks.reduce_gradients(unit, packed, own, self._device.mark())
        return Packed(staging.free, own, None)


def _of_dtype(buffer: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A buffer of bytes, one for gradients of all data types, as elements of `dtype`."""
    return buffer[: buffer.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
