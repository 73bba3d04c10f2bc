"""The weights of units that stay on the GPU: always bound, and renewed there after each update.

    update on the host   `fetch_updated` submits a copy up, behind what compute has submitted
    update on the GPU    in place; where ranks have a part each, `gather` collects the others' parts
    next use             `bind` waits for either on the compute stream

From the update to the next use the parameters are partitioned: a script that reads them in between has to gather them,
and so cannot see the old weights.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ds_slide.compression.codec import Masters, SegmentStep
from ds_slide.runtime.core.calls import RootState, in_backward
from ds_slide.runtime.core.context import AS_THEY_ARE
from ds_slide.runtime.core.device import Marker
from ds_slide.runtime.core.futures import Future, wait_on_stream
from ds_slide.runtime.core.lanes import StreamWorker
from ds_slide.runtime.core.unit import Unit
from ds_slide.runtime.parts import Parts
from ds_slide.runtime.weights.bindings import Bindings


class ResidentWeights:
    """The resident weights of an engine. The compute thread calls all methods."""

    def __init__(self, parts: Parts, bindings: Bindings, root: RootState) -> None:
        self._parts = parts
        self._device = parts.context.device
        self._bindings = bindings
        self._root = root
        self._fetched: dict[int, Future] = {}
        """Uploads of new weights under way, by `Unit.order`."""

    # ---- binding -----------------------------------------------------------------------------------------------------

    def bind_all(self) -> None:
        """Bind all resident units."""
        for unit in self._parts.units:
            if unit.resident is not None:
                self.bind(unit)

    def bind(self, unit: Unit) -> None:
        """Bind one resident unit. The compute stream waits for a copy under way."""
        assert unit.resident is not None
        if (future := self._fetched.pop(unit.order, None)) is not None:
            recorder = self._parts.context.recorder
            if unit.is_gathered and unit.is_uploaded:
                with recorder.stalled(future.what):
                    self._device.wait(self._parts.gathers.into(unit, unit.resident, future.wait()))
            else:
                wait_on_stream(future, self._device, recorder)
        self._bindings.bind(unit, unit.slot_views(unit.resident))
        self._bindings.residents.bound(unit, computing=self._root.active or in_backward())

    @property
    def are_fetched(self) -> bool:
        """Whether an upload of new weights has not been bound yet."""
        return bool(self._fetched)

    def bind_if_fetched(self, unit: Unit) -> None:
        """Bind a unit with an upload under way, before a module that owns its parameters runs."""
        if unit.order in self._fetched:
            self.bind(unit)

    def bind_fetched(self) -> None:
        """Bind all units with an upload of new weights under way."""
        for unit in [unit for unit in self._parts.units if unit.order in self._fetched]:
            self.bind(unit)

    def unbind_all(self) -> None:
        """Empty the parameters of all resident units, as ZeRO-3 expects while checkpoints are saved and loaded."""
        for unit in self._parts.units:
            if unit.resident is not None:
                self._bindings.unbind(unit)

    # ---- after an update ---------------------------------------------------------------------------------------------

    def gather(self, unit: Unit) -> None:
        """Gather the other ranks' parts after an update on the GPU has changed this rank's part. This belongs to the
        step."""
        assert unit.resident is not None
        self._bindings.unbind(unit)
        gathered = self._parts.gathers.into(unit, unit.resident, self._device.mark(), in_step=True)
        self._fetched[unit.order] = Future.completed(
            self._parts.context.failures, gathered, f"the gathered weights of {unit.name}"
        )

    def bind_where_replaced(self, unit: Unit) -> None:
        """Bind a unit again after an update on the GPU, if its parameters are on other memory: `module.to` in a forward
        makes a copy, which the update has not changed."""
        assert unit.resident is not None
        own = unit.resident.untyped_storage().data_ptr()
        with AS_THEY_ARE():
            replaced = any(parameter.untyped_storage().data_ptr() != own for parameter in unit.parameters)
        if replaced:
            self.bind(unit)

    def fetch_updated(self) -> None:
        """Upload what updates on the host have written. The copies run after all work already on the compute stream."""
        h2d, free = self._parts.context.lanes.outer_h2d, self._device.mark()
        for unit in self._parts.units:
            if unit.resident is None or not unit.is_uploaded or not unit.layout.trainable_numel:
                continue
            if unit.updated is unit.applied:  # frozen, or without a gradient: no update, and nothing to upload
                continue
            unit.applied = unit.updated
            self._bindings.unbind(unit)
            self._fetched[unit.order] = self._fetch(unit, unit.resident, h2d, free)

    def _fetch(self, unit: Unit, resident: torch.Tensor, h2d: StreamWorker, free: Marker) -> Future:
        future = Future(self._parts.context.failures, f"the new weights of {unit.name} on the GPU")
        parts, version = list(zip(unit.spans, unit.span_updated, strict=True)), unit.version
        steps = unit.trained.latest
        if self._parts.context.ranks.world_size > 1 or unit.state.writes_change:
            parts = [(slice(0, unit.codec.numel), unit.updated)]  # as a whole
        masters = Masters(resident, unit.remainder_on_gpu)

        def job() -> None:
            h2d.wait(free, f"the buffer of {unit.name} on the GPU")
            for span, updated in parts:
                updated.wait()
                if unit.shared is not None:
                    unit.shared.await_others(unit, version)
                start = self._device.mark(h2d.stream, timed=True)
                moved = self._fill_span(unit, span, masters, steps)
                end = self._device.mark(h2d.stream, timed=True)
                h2d.meter.add_interval(start, end, moved, ("weights", unit.order))
            future.complete(end)

        h2d.submit(job)
        return future

    def _fill_span(self, unit: Unit, span: slice, masters: Masters, steps: Sequence[SegmentStep]) -> int:
        shared = self._parts.context.shared
        if unit.state.writes_change and shared is not None:
            return unit.codec.apply(shared.parts[unit.order], span, masters, steps)
        if self._parts.context.ranks.world_size > 1:
            return self._parts.uploads.fill(unit, masters.weight)
        # This is a view: the updates of a resident unit write to host memory.
        written = unit.state.written.buffer.read(slice(0, unit.codec.numel))
        return unit.codec.apply([written], span, masters, steps)

    # ---- written from outside ----------------------------------------------------------------------------------------

    def await_fetched(self, unit: Unit) -> None:
        """Wait for an upload of the unit's new weights that is under way."""
        if (future := self._fetched.get(unit.order)) is not None:
            future.synchronize()

    def renew(self, unit: Unit) -> None:
        """Upload the unit's weights after its state buffers have been written, while no lane works on it.
        Collective."""
        self._fetched.pop(unit.order, None)
        several = self._parts.context.ranks.world_size > 1
        if unit.resident is not None and (several or unit.resident is not unit.state.weights.buffer.tensor):
            self._parts.context.lanes.outer_h2d.drain()
            self._fill(unit, unit.resident)
            self._device.synchronize()

    def fill_all(self) -> None:
        """Fill the buffers, once, when the units of all ranks have their weights: each rank needs the others' parts."""
        for unit in self._parts.units:
            if self._parts.context.ranks.world_size > 1 and unit.resident is not None:
                self._fill(unit, unit.resident)
        self._device.synchronize()

    def _fill(self, unit: Unit, resident: torch.Tensor) -> None:
        if unit.state.writes_change:
            self._gather_masters(unit)
            return
        if unit.is_uploaded:
            if unit.shared is not None:
                unit.shared.await_others(unit, unit.version)
            self._parts.uploads.fill(unit, resident)
        if unit.is_gathered:
            self._device.wait(self._parts.gathers.into(unit, resident, self._device.mark()))

    def _gather_masters(self, unit: Unit) -> None:
        """Gather the other ranks' parts of weights that every rank keeps whole."""
        for buffer in (unit.state.weights.buffer, *unit.state.masters.values()):
            assert buffer.tensor is not None
            for entry in unit.layout.entries:
                own = buffer.read(slice(entry.offset, entry.offset + entry.partition_numel))
                whole = self._parts.context.ranks.gather(own, f"the weights of {entry.name}")
                buffer.tensor[entry.slot_offset : entry.slot_offset + entry.numel].copy_(whole[: entry.numel])
