"""Puts the SSD tier of a runtime together: the state files, every unit's place in them, the pools in front of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ds_slide.plan.memory import Plan
from ds_slide.report.statistics import LaneMeter
from ds_slide.report.trace import Requests
from ds_slide.runtime.gradients.ssd_gradients import SsdGradients
from ds_slide.runtime.ranks.collectives import Ranks
from ds_slide.runtime.settings import RuntimeSettings, UnitPlan
from ds_slide.runtime.transfers.handoff import Failures
from ds_slide.runtime.transfers.lane import Delay
from ds_slide.runtime.transfers.ssd import SsdStates
from ds_slide.runtime.unit import Unit
from ds_slide.runtime.weights.window import Announce
from ds_slide.store.ssd.page_sums import PageSums
from ds_slide.store.ssd.places import SUM_BYTES, UnitPlaces, place_unit, sum_table_bytes, whole_pages
from ds_slide.store.ssd.store import SsdStore
from ds_slide.store.ssd.unit import SsdUnit
from ds_slide.store.state import HostMemory


def open_store(
    unit_plans: Sequence[UnitPlan],
    plan: Plan,
    settings: RuntimeSettings,
    ranks: Ranks,
    memory: HostMemory,
    failures: Failures,
) -> tuple[SsdStore | None, dict[int, SsdUnit]]:
    """The state files, and the places of the units that have states there, by their order."""
    host = plan.host
    places, end = {}, 0
    for order, unit_plan in enumerate(unit_plans):
        if order in host.weights_on_ssd | host.records_on_ssd | host.gradients_on_ssd:
            assert settings.ssd is not None
            layout, held = unit_plan.layout, settings.held_of(unit_plan.spec.precision)
            places[order] = place_unit(
                end,
                settings.specs(unit_plan.dtype),
                weight_bytes=layout.local_numel * unit_plan.dtype.itemsize if order in host.weights_on_ssd else 0,
                records_of=layout.trainable_numel if order in host.records_on_ssd else 0,
                chunk_numel=settings.ssd.needs.chunk_numel,
                gradient_bytes=layout.trainable_numel * held.itemsize if held and order in host.gradients_on_ssd else 0,
            )
            end = places[order].end
    if not places or settings.ssd is None:
        return None, {}
    sums = None
    if settings.ssd.needs.checksums:
        table = memory.tensor(sum_table_bytes(end) // SUM_BYTES, torch.int32, transfers=False)
        sums = PageSums(table, settings.cpu_threads)
    store = SsdStore(
        settings.ssd.parents,
        end,
        rank=ranks.rank,
        fail=lambda error: failures.record("ssd", error),
        backend=settings.ssd.backend,
        queue_depth=settings.ssd.queue_depth,
        request_bytes=settings.ssd.request_bytes,
        sums=sums,
        what_lies_at=_what_lies_at([(unit_plans[order].spec.name, place) for order, place in places.items()]),
        delay=Delay(settings.delay_ms, settings.seed + 4),
        waiting=failures.waiting,
    )

    def unit_of(order: int) -> SsdUnit:
        unit_plan = unit_plans[order]
        held = settings.held_of(unit_plan.spec.precision)
        return SsdUnit(store, places[order], settings.specs(unit_plan.dtype), unit_plan.dtype, held)

    return store, {order: unit_of(order) for order in places}


def _what_lies_at(places: Sequence[tuple[str, UnitPlaces]]) -> Callable[[int], str]:
    """`places`: with the names of their units, in the order of their offsets."""

    def what(offset: int) -> str:
        name, place = next((name, place) for name, place in places if offset < place.end)
        return f"{place.what_lies_at(offset)} of {name}"

    return what


def make_ssd_states(
    units: Sequence[Unit],
    plan: Plan,
    settings: RuntimeSettings,
    store: SsdStore,
    memory: HostMemory,
    failures: Failures,
    requests: Requests,
) -> SsdStates:
    """The pools in front of the disk. Weights are page-locked, because the GPU copies from them."""
    records = [unit.state.ssd for unit in units if unit.state.ssd is not None]
    largest = max((chunk.nbytes for ssd in records for chunk in ssd.places.chunks), default=0)

    def buffers(nbytes: int, count: int, *, transfers: bool) -> list[torch.Tensor]:
        return _buffers(store, memory, nbytes, count, transfers=transfers)

    return SsdStates(
        units,
        store,
        buffers(largest, plan.host.record_buffers, transfers=False),
        buffers(max((ssd.places.weight_pages for ssd in records), default=0), plan.host.weight_buffers, transfers=True),
        failures,
        updates_under_backward=settings.held_dtype is None,
        requests=requests,
    )


def make_ssd_gradients(
    units: Sequence[Unit], store: SsdStore, memory: HostMemory, meter: LaneMeter
) -> SsdGradients | None:
    """What reads and writes held gradients on SSD; None where all are in memory. `meter`: of the update lane."""
    sizes = [
        unit.layout.trainable_numel * unit.state.dtype_of("gradient").itemsize
        for unit in units
        if unit.state.gradient_on_ssd
    ]
    if not any(sizes):
        return None
    return SsdGradients(_buffers(store, memory, whole_pages(max(sizes)), 1, transfers=False)[0], meter)


def _buffers(store: SsdStore, memory: HostMemory, nbytes: int, count: int, *, transfers: bool) -> list[torch.Tensor]:
    if not count:
        return []
    pool = memory.pool(nbytes, count, transfers=transfers)
    leases = [pool.lease(0.0) for _ in range(count)]
    tensors = [torch.frombuffer(lease, dtype=torch.uint8) for lease in leases]
    for tensor in tensors:
        store.register(tensor.data_ptr(), tensor.numel())
    return tensors


def announcer(ssd: SsdStates | None, settings: RuntimeSettings) -> tuple[Announce | None, int]:
    """How the window tells the SSD tier which blocks come next, and how many of them."""
    if ssd is None or not ssd.ahead:
        return None, 0
    under_backward = settings.held_dtype is None

    def announce(coming: Sequence[Unit], in_backward: Sequence[Unit]) -> None:
        if not under_backward:
            ssd.expect_weights(coming, ())
            return
        # Updated under backward, a block needs its weights in host memory soon after the GPU has used them, which may
        # have had them since forward.
        updated = [unit for unit in in_backward if unit.layout.trainable_numel]
        ssd.expect_weights([*updated, *(unit for unit in coming if unit not in updated)], updated)

    return announce, ssd.ahead
