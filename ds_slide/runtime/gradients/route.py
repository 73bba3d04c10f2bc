"""The way of a gradient: from the parameters of a finished unit into its held gradient's buffer or straight into its
update.

    compute stream   pack into a flat GPU staging buffer with its square sum
    collectives      several ranks: average over the ranks, then the square sum, while backward goes on
    d2h lane         one contiguous copy into page-locked host memory
    update lane      accumulate (later micro-batches), or the update at once (gradients not held)

GPU-tier units skip the way down: their gradient stays in a flat device state buffer until the step, which waits for
`arrived`. The sink of a gradient decides its way (`ds_slide.store.tiers.GradientSink`). Held gradients that have no
room in host memory go on to SSD.

A unit with a GPU sum (`GradientStatus.gpu_sum`) adds up the micro-batches there, and sends the sum down once: in the
last backward, or before anyone needs it (`bring_down`). Gradients of the same step that follow are added on the host.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ds_slide.compression.codec import square_sum
from ds_slide.optim.rule import Hyper
from ds_slide.runtime.core.context import AS_THEY_ARE, Context
from ds_slide.runtime.core.device import PASSED, Marker
from ds_slide.runtime.core.futures import Future, wait_on_stream
from ds_slide.runtime.core.lanes import HOLDING
from ds_slide.runtime.core.pool import BufferLease
from ds_slide.runtime.core.unit import PackedGradient, Unit
from ds_slide.runtime.core.update import SquareSum, Update
from ds_slide.runtime.gradients.sources import Averaged, GpuSum, GradientSource, Packed, Scattered, Staging
from ds_slide.runtime.gradients.totals import SquareSums
from ds_slide.runtime.updates.apply import UpdateStep
from ds_slide.runtime.updates.speculation import Speculation
from ds_slide.runtime.updates.updating import UnitUpdate, Updating
from ds_slide.store.in_memory import KeptOnGpu, NotHeld
from ds_slide.store.tiers import Held


@dataclass(frozen=True)
class _Arrival:
    """A gradient on its way down, as the d2h lane gets it. It lies in `source` after `packed_at`, and at its
    destination when `arrived` is complete."""

    unit: Unit
    source: GradientSource
    packed_at: Marker
    arrived: Future
    earlier_arrived: Future
    """The unit's gradient before this one has arrived."""
    latest_completed: Future
    """The unit's latest update has been completed: it may still be reading the held gradient."""
    first: bool
    """Whether it is the first gradient of an accumulation."""
    final: bool
    adds: bool
    """Whether the CPU converts it to the data type of the held gradient, or adds it to the held gradient."""
    square_sum: SquareSum
    """Of this gradient. The unit's own attribute may belong to a later gradient when the lanes come to this one."""
    speculation: Speculation | None
    """The update that may begin when it is held."""

    def await_buffer(self) -> None:
        """Wait until the held gradient's buffer may be written. On the d2h lane: an earlier gradient has come down its
        stream before this one, and an update completes its future when it has run."""
        self.earlier_arrived.wait()
        self.latest_completed.wait()


@dataclass
class _InRing:
    """A gradient in a ring buffer. The lane that ends the update, which alone uses it, gives it back after `left` more
    spans."""

    lease: BufferLease
    whole: torch.Tensor
    left: int

    def load(self, span: slice) -> torch.Tensor:
        return self.whole[span]

    def used(self) -> None:
        self.left -= 1
        if not self.left:
            self.lease.release()


class Gradients:
    """Moves gradients. The compute thread calls `send` when a gradient of a unit is complete."""

    def __init__(
        self,
        context: Context,
        stagings: Sequence[Staging],
        num_units: int,
        updating: Updating,
    ) -> None:
        self._recorder = context.recorder
        self._device = context.device
        self._ranks = context.ranks
        self._d2h = context.lanes.d2h
        self._updates = context.lanes.update
        self._updater = context.updater
        self._failures = context.failures
        self._context = context
        self._stagings = list(stagings)
        self._turn = 0
        self._early: set[Staging] = set()
        """Staging buffers with gradients that were packed early and are not averaged yet."""
        self._unpacked: dict[int, Scattered | Averaged] = {}
        """The latest source of each outer module's gradients, by `Unit.order`, which may still be on the GPU."""
        self._updating = updating
        self.hypers: Sequence[Hyper] = ()
        """Hyper-parameters, by parameter group, of updates that start as soon as a gradient arrives."""
        self.grad_scale = 1.0
        """The factor of speculative updates: the step's if nothing is clipped. Direct updates have none."""
        self.sums = torch.zeros(3, num_units, dtype=torch.float64, device=context.device.torch)
        """Square sums by `Unit.order`. First row: this rank's part of every unit's gradient; `SquareSum.place` says
        which entries count. Written on the collectives stream where there are several ranks. Other rows, for units
        whose gradients are compressed: this rank's own gradients before and after compression, of all micro-batches of
        a step added up. Written on the compute stream."""
        self.square_sums = self.sums[0]

    def free_buffers(self) -> None:
        """Let go of the buffers on the GPU. The engine has ended."""
        self._stagings, self._unpacked = [], {}

    def send(self, unit: Unit, *, final: bool, source: GradientSource | None = None) -> None:
        """Take the gradients out of the unit's parameters. `final`: the last micro-batch before the step.

        Parameters without a gradient (unused since the last step) count as zero, as in ZeRO-1 and 2 and in ZeRO-3's
        leaf modules. Elsewhere ZeRO-3 updates them once more from their last gradient, which its partition buffer still
        holds. `source`: the gradient's source if it does not come from the parameters.
        """
        unit.gradient.finalized = True
        if not unit.codec.numel or (source is None and self._is_left_out(unit)):
            return
        if final:
            self._updating.speculating.begin(unit, self.hypers, self.grad_scale)

        match unit.state.gradient:
            case KeptOnGpu(gradient=kept):
                self._keep_on_gpu(unit, kept.tensor, accumulate=unit.gradient.has_sum, final=final)
            case Held() as held:
                if source is None and _goes_to_gpu_sum(unit, final=final):
                    self._add_on_gpu(unit, final=final)
                else:
                    self.bring_down(unit)
                    self._send_to_host(unit, final, source or self._prepare(unit), held, _adds(unit))
            case NotHeld():
                self._send_to_host(unit, final, source or self._prepare(unit), None, _adds(unit))
            case other:
                raise AssertionError(other)
        unit.drop_gradients()
        unit.gradient.has_sum = True

    def _is_left_out(self, unit: Unit) -> bool:
        """Whether the unit is frozen and has no gradient, so that nothing has to come down. Several ranks leave no unit
        out: all of them have to call the same collectives, whatever their flags are."""
        if self._ranks.world_size > 1 or not unit.trained.is_off or any(each is not None for each in unit.gradients()):
            return False
        if not unit.gradient.has_sum and unit.gradient.square_sum.place is not None:
            self.sums[:, unit.order] = 0.0  # it was an earlier step's
            unit.gradient.square_sum = SquareSum()
        return True

    def use(self, stagings: Sequence[Staging]) -> None:
        """Pack gradients in these buffers from now on. No gradient is on its way."""
        self._stagings, self._turn = list(stagings), 0

    @property
    def on_their_way(self) -> int:
        """Bytes of outer modules' gradients on the GPU that are still to be copied to host memory."""
        return sum(each.nbytes for each in self._unpacked.values())

    def holds(self, packed: int, own: int) -> bool:
        """Whether the buffers take `packed` bytes of gradients, and `own` of this rank's part."""
        return all(each.packed.numel() >= packed and each.own.numel() >= own for each in self._stagings)

    def square_sums_of(self, unit: Unit, on_device: torch.Tensor) -> SquareSums:
        """The square sums of a unit's held gradient, once the lanes have drained; `on_device`: `sums`."""
        if not unit.gradient.has_sum:
            return SquareSums(0.0, 0.0, 0.0)
        found = SquareSums(*on_device[:, unit.order].tolist())
        known = unit.gradient.square_sum
        if known.place == "device":
            return found
        return found._replace(held=self._held_square_sum(unit) if known.place is None else known.on_host)

    def _held_square_sum(self, unit: Unit) -> float:
        gradient = unit.state.read("gradient", slice(0, unit.codec.numel))
        return self._updater.sum_of_squares(gradient) if unit.is_uploaded else float(square_sum(gradient))

    def _add_on_gpu(self, unit: Unit, *, final: bool) -> None:
        """Add the gradient to the unit's GPU sum, with the bits of a sum on the host. `final`: send the sum down."""
        total, first = unit.gradient.gpu_sum, not unit.gradient.has_sum
        assert total is not None
        if first:
            # The last step's sum has been copied down. A gradient that was dropped on its way has arrived, too: it
            # would be written over this step's.
            wait_on_stream(unit.gradient.arrived, self._device, self._recorder)
        if first and unit.converts_gradient:
            total.zero_()  # the CPU adds to zeros, too: -0.0 becomes 0.0
        elif not first and self._ranks.world_size == 1:
            # The CPU adds zeros for a parameter without a gradient: -0.0 becomes 0.0.
            given = zip(unit.codec.entries, unit.gradients(), strict=True)
            if without := [total[entry.place] for entry, gradient in given if gradient is None]:
                torch._foreach_add_(without, 0.0)
        self._keep_on_gpu(unit, total, accumulate=not first or unit.converts_gradient, final=final)
        unit.gradient.is_in_gpu_sum = True
        if final:
            self.bring_down(unit)

    def bring_down(self, unit: Unit) -> None:
        """Send the unit's GPU sum, if its gradient is there, to the held gradient. It has arrived with
        `gradient.arrived`. Called by the compute thread, at any time."""
        if not unit.gradient.is_in_gpu_sum:
            return
        held, total = unit.state.gradient, unit.gradient.gpu_sum
        assert isinstance(held, Held) and total is not None
        summed = self.square_sums[unit.order] if unit.gradient.square_sum.place == "device" else None
        with AS_THEY_ARE():
            self._send_to_host(unit, True, GpuSum(total, summed), held, False)
        unit.gradient.is_in_gpu_sum = False

    def _keep_on_gpu(self, unit: Unit, state_buffer: torch.Tensor, *, accumulate: bool, final: bool) -> None:
        # From here on the gradient may be there in part if something fails.
        unit.gradient.arrived = Future.completed(self._failures)
        if self._ranks.world_size == 1:
            # Only the norm of the step needs the sum. A backward that is the last one unknowingly leaves it to
            # `square_sums_of`.
            summed = unit.codec.encode(unit.gradients(), state_buffer, accumulate=accumulate, sums=final)
            if final:
                self.square_sums[unit.order] = square_sum(state_buffer) if summed is None else summed
        else:
            reduced = self._reduced(unit)
            with self._ranks.on_stream():
                try:
                    state_buffer.add_(reduced.own) if accumulate else state_buffer.copy_(reduced.own)
                finally:
                    reduced.release(self._device.mark())
                if final:
                    self.square_sums[unit.order] = square_sum(state_buffer)
            unit.gradient.arrived = Future.completed(self._failures, self._ranks.mark())
        unit.gradient.square_sum = SquareSum("device" if final else None)

    def add_square_sum(self, unit: Unit, part: torch.Tensor) -> None:
        """Add the square sum of one more part of a gradient whose source had no sum when its transfer began."""
        if unit.gradient.square_sum.place == "device":
            self.square_sums[unit.order] += square_sum(part)

    def _send_to_host(self, unit: Unit, final: bool, source: GradientSource, held: Held | None, adds: bool) -> None:
        """`held`: where the gradient waits for the step, None where it goes straight to its update. `adds`: see
        `_Arrival`."""
        unit.gradient.square_sum = SquareSum(None if adds else "device")
        try:
            with self._ranks.on_stream():
                if not adds:
                    self.square_sums[unit.order] = source.square_sum()
                packed = self._device.mark()
        except BaseException:
            source.release(self._device.mark())
            raise
        try:
            earlier, latest = unit.gradient.arrived, unit.completed
            unit.gradient.arrived = Future(self._failures, f"the gradient of {unit.name} in host memory")
            first = not unit.gradient.has_sum
            arrived, held_sum = unit.gradient.arrived, unit.gradient.square_sum
            ahead = self._updating.speculating.of(unit)
            arrival = _Arrival(unit, source, packed, arrived, earlier, latest, first, final, adds, held_sum, ahead)
            if held is None:
                self._submit_update(arrival)
            else:
                self._submit_held(held, arrival)
        except BaseException as error:  # an interrupt: whether the lane has the gradient is not known
            self._failures.record("compute", error)
            raise

    def _add_square_sums(self, unit: Unit, of_gradient: torch.Tensor | None, encoded: torch.Tensor) -> torch.Tensor:
        """Add the square sum of a gradient, which its codec has given, and of its encoding. -> the encoding's."""
        assert of_gradient is not None
        of_encoded = square_sum(encoded)
        sums, new = self.sums[1:, unit.order], (of_gradient, of_encoded)
        if unit.gradient.has_sum:
            sums += torch.stack(new)
        else:
            torch.stack(new, out=sums)
        return of_encoded

    def _submit_update(self, arrival: _Arrival) -> None:
        unit = arrival.unit
        unit.state.reserve(len(unit.spans))
        # Gradients that are not held are not clipped either.
        futures, step = unit.open_update(self._failures), UpdateStep(tuple(unit.trained.begin(self.hypers)), 1.0)
        self._d2h.submit(lambda: self._update_on_arrival(arrival, futures, step))

    def _submit_held(self, held: Held, arrival: _Arrival) -> None:
        way = self._add_on_arrival if arrival.adds else self._hold
        self._d2h.submit(lambda: way(arrival, held))

    # The ways of a gradient down. Each runs on the d2h lane.

    def _hold(self, arrival: _Arrival, held: Held) -> None:
        arrival.await_buffer()

        def store(_: slice, buffer: torch.Tensor) -> int:  # called once: a ring buffer takes a whole gradient here
            held.store(buffer)
            return 0

        if (target := held.tensor) is None:
            self._through_ring(arrival, store)
            return
        end = self._copy_all(arrival, target)
        arrival.arrived.complete(end)
        self._is_held(arrival, end)

    def _add_on_arrival(self, arrival: _Arrival, held: Held) -> None:
        # Here, not on the update lane: the last step's update may not have come to that lane yet, from the SSD.
        if arrival.first:
            arrival.await_buffer()

        def add(piece: slice, buffer: torch.Tensor) -> int:
            return self._accumulate(arrival, held, piece, buffer[: piece.stop - piece.start])

        self._through_ring(arrival, add)

    def _through_ring(self, arrival: _Arrival, use: Callable[[slice, torch.Tensor], int]) -> None:
        """Copy the gradient to a ring buffer, piece by piece where the buffer cannot take it as a whole. `use` runs for
        each piece on the update lane, in order; then the gradient has arrived."""
        unit, ring = arrival.unit, self._context.ring(arrival.unit)
        # What the CPU neither adds nor converts has the data type of the held gradient: a GPU sum may have another.
        dtype = unit.codec.dtype if arrival.adds else unit.state.dtype_of("gradient")
        numel, most = unit.codec.numel, ring.buffer_bytes // dtype.itemsize
        marker = PASSED

        def run(lease: BufferLease, piece: slice, gradient: torch.Tensor) -> int:
            moved = use(piece, gradient)
            lease.release()
            if piece.stop == numel:
                arrival.arrived.complete()
                self._is_held(arrival, PASSED)
            return moved

        for start in range(0, numel, most):
            lease, piece = ring.lease(), slice(start, min(start + most, numel))
            gradient = _of_dtype(lease.buffer, dtype)
            marker = self._copy(arrival, piece, gradient, start)
            self._updates.submit(unit.order, marker, functools.partial(run, lease, piece, gradient), HOLDING)
        arrival.source.release(marker)

    def _is_held(self, arrival: _Arrival, end: Marker) -> None:
        if arrival.speculation is not None:
            self._updating.speculating.submit(arrival.speculation, end)

    def _update_on_arrival(self, arrival: _Arrival, futures: Update, step: UpdateStep) -> None:
        unit, lease = arrival.unit, self._context.ring(arrival.unit).lease()
        gradient = _InRing(lease, _of_dtype(lease.buffer, unit.codec.dtype), len(unit.spans))
        update, marker = UnitUpdate(self._updating, unit, futures, gradient, step), PASSED
        for index, span in enumerate(unit.spans):
            marker = self._copy(arrival, span, gradient.whole)
            update.start(index, marker, reserved=True)
        arrival.source.release(marker)
        arrival.arrived.complete(marker)

    def _copy_all(self, arrival: _Arrival, target: torch.Tensor) -> Marker:
        """Copy the whole gradient to `target`, and release its source on the GPU."""
        marker = PASSED
        for span in arrival.unit.spans:
            marker = self._copy(arrival, span, target)
        arrival.source.release(marker)
        return marker

    def _copy(self, arrival: _Arrival, span: slice, target: torch.Tensor, target_start: int = 0) -> Marker:
        """Copy `span` of the gradient to `target`, whose first element is element `target_start` of the gradient."""
        self._d2h.wait(arrival.packed_at, f"the gradient of {arrival.unit.name} on the GPU")
        end = PASSED
        for part in arrival.source.parts(span):
            start = self._device.mark(self._d2h.stream, timed=True)
            arrival.source.copy(part, target[part.start - target_start : part.stop - target_start])
            end = self._device.mark(self._d2h.stream, timed=True, host_waits=True)
            moved = (part.stop - part.start) * target.element_size()
            self._d2h.meter.add_interval(start, end, moved, ("gradient", arrival.unit.order))
        return end

    def _prepare(self, unit: Unit) -> GradientSource:
        """Return the source of the unit's gradient. Blocks are packed, which frees the parameters' gradients at once.
        An outer module's few large gradients go down from where autograd left them: packing a vocabulary matrix would
        take a staging buffer of its size. Several ranks average them from there, where they can (`_reduced`)."""
        if unit.spec.kind == "outer" and self._ranks.world_size == 1:
            source = self._unpacked[unit.order] = Scattered.of(unit, self._d2h)
            return source
        return self._reduced(unit)

    def _reduced(self, unit: Unit) -> Packed | Averaged:
        """Run `_reduce` in the next staging buffer, which is given back where that fails: memory may be short. A
        gradient that need not be packed is averaged where it lies."""
        if unit.is_averaged_in_place:
            source = self._unpacked[unit.order] = Averaged.of(unit, self._device, self._ranks, self._d2h)
            return source
        staging = unit.gradient.staging or self._take_staging()
        self._early.discard(staging)
        try:
            return self._reduce(unit, staging)
        except BaseException:
            staging.free.complete(self._device.mark())
            raise

    def pack_early(self, unit: Unit) -> Staging | None:
        """Pack the gradients of a unit that is averaged later, to free the memory that autograd has allocated for
        them. None where it is not packed at all, where no staging buffer is free at once, or where none would be left
        for units that are averaged before."""
        if (
            unit.state.writes_change
            or unit.is_averaged_in_place
            or len(self._early) + 1 >= len(self._stagings)
            or not self._next_staging().free.is_complete
        ):
            return None
        staging = self._take_staging()
        self._early.add(staging)
        try:
            self._encode_for_ranks(unit, staging)
        except BaseException:
            self.drop(staging)
            raise
        return staging

    def drop(self, staging: Staging) -> None:
        """Give back a staging buffer that was packed early: its gradient is not averaged."""
        self._early.discard(staging)
        staging.free.complete(self._device.mark())

    def _accumulate(self, arrival: _Arrival, held: Held, piece: slice, gradient: torch.Tensor) -> int:
        """Add the elements `piece` of a gradient to the held gradient; pieces come in order."""
        with held.sum(first=arrival.first and not piece.start) as total:
            self._updater.accumulate_(total[piece], gradient)
        if arrival.final and piece.stop == total.numel():
            arrival.square_sum.on_host = self._updater.sum_of_squares(total)
            arrival.square_sum.place = "host"
        return (2 * total.element_size() + gradient.element_size()) * gradient.numel()

    def _next_staging(self) -> Staging:
        """Return the next staging buffer in turn. A buffer that was packed early waits for other ranks, and is left
        out."""
        while self._stagings[self._turn] in self._early:
            self._turn = (self._turn + 1) % len(self._stagings)
        return self._stagings[self._turn]

    def _take_staging(self) -> Staging:
        staging = self._next_staging()
        self._turn = (self._turn + 1) % len(self._stagings)
        wait_on_stream(staging.free, self._device, self._recorder)
        staging.free = Future(self._failures, "a GPU buffer for a gradient")
        return staging

    def _reduce(self, unit: Unit, staging: PackedGradient) -> Packed:
        """Put this rank's share of the unit's gradient, averaged over the ranks, into the staging buffer. With several
        ranks the collectives stream makes it, and the compute stream does not wait for it."""
        codec, ranks = unit.codec, self._ranks.world_size
        own = _of_dtype(staging.own, codec.dtype)[: codec.numel]
        if ranks == 1:
            sums = unit.state.writes_change or not _adds(unit)
            summed = codec.encode(unit.gradients(), own, accumulate=False, sums=sums)
            if unit.state.writes_change:
                summed = self._add_square_sums(unit, summed, own)
            return Packed(own, summed, staging.free)
        packed = self._packed(unit, staging)
        if unit.gradient.staging is None:
            self._encode_for_ranks(unit, staging)
        reduce = self._ranks.reduce_gradients if packed.dtype == own.dtype else self._ranks.reduce_in_place
        reduce(unit.name, packed, own, self._device.mark())
        return Packed(own, None, staging.free)

    def _packed(self, unit: Unit, staging: PackedGradient) -> torch.Tensor:
        codec, ranks = unit.codec, self._ranks.world_size
        is_narrow = codec.packed_itemsize(unit.dtype.itemsize) < codec.dtype.itemsize
        return _of_dtype(staging.packed, unit.dtype if is_narrow else codec.dtype)[: ranks * codec.numel]

    def _encode_for_ranks(self, unit: Unit, staging: PackedGradient) -> None:
        packed = self._packed(unit, staging)
        summed = unit.codec.encode_for_ranks(unit.gradients(), packed)
        if unit.state.writes_change:
            self._add_square_sums(unit, summed, packed)


def _goes_to_gpu_sum(unit: Unit, *, final: bool) -> bool:
    """Whether the coming gradient is added to the unit's GPU sum: the sum so far is there, or it is the first gradient
    and others follow."""
    status = unit.gradient
    return status.gpu_sum is not None and (status.is_in_gpu_sum if status.has_sum else not final)


def _adds(unit: Unit) -> bool:
    """Whether the CPU adds the coming gradient to the held gradient, or converts it, so that its own square sum does
    not count."""
    return unit.gradient.has_sum or unit.converts_gradient


def _of_dtype(buffer: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a buffer of bytes, which serves gradients of all data types, as elements of `dtype`."""
    return buffer[: buffer.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
