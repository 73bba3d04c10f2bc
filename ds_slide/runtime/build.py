"""Puts a runtime together: allocates the planes unit by unit, fills them, starts the lanes."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import torch
from torch import nn
from tqdm import tqdm

from ds_slide.model.layout import Entry
from ds_slide.optim.cpu import CpuUpdater
from ds_slide.optim.reference import encode_planar
from ds_slide.plan.memory import Plan, Taken
from ds_slide.report.statistics import OUTER_H2D, STREAM_LANES, StepRecorder
from ds_slide.report.trace import Trace
from ds_slide.runtime import running
from ds_slide.runtime.build_ssd import announcer, make_ssd_gradients, make_ssd_states, open_store
from ds_slide.runtime.device import Device
from ds_slide.runtime.engine import Lanes, Parts, SlideRuntime
from ds_slide.runtime.gradients.norm import square_sum
from ds_slide.runtime.gradients.route import GradientRoute, Gradients
from ds_slide.runtime.gradients.sources import Staging
from ds_slide.runtime.ranks.collectives import Ranks
from ds_slide.runtime.ranks.peers import Peers
from ds_slide.runtime.ranks.watchdog import Watchdog
from ds_slide.runtime.settings import RuntimeSettings, UnitPlan
from ds_slide.runtime.transfers.handoff import Failures, Ticket
from ds_slide.runtime.transfers.lane import Delay, Lane
from ds_slide.runtime.transfers.ring import HostRing
from ds_slide.runtime.transfers.ssd import moved_bytes
from ds_slide.runtime.transfers.uploads import Uploads
from ds_slide.runtime.unit import Availability, Empty, Unit
from ds_slide.runtime.updates.apply import host_update
from ds_slide.runtime.updates.update_lane import UpdateLane
from ds_slide.runtime.updates.updating import Updating
from ds_slide.runtime.weights.gathers import Gathers
from ds_slide.runtime.weights.rows import MakeRows, RowBuffers, RowEvents, StreamedRows
from ds_slide.runtime.weights.shared_weights import SharedWeights
from ds_slide.runtime.weights.sharing import Sharing
from ds_slide.runtime.weights.window import Window
from ds_slide.store.ssd.places import whole_pages
from ds_slide.store.ssd.store import SsdStore
from ds_slide.store.ssd.unit import SsdUnit, page_buffer
from ds_slide.store.state import HostMemory, gpu_state, memory_state

SPLIT_NUMEL = 1 << 22
"""Of narrowed weights that are split at once: 16 MiB a temporary."""
STAGINGS = 2
"""GPU staging buffers for gradients: one that is packed while the other is copied down."""


TakeWeights = Callable[[nn.Parameter, Entry], torch.Tensor]
"""This rank's elements of a parameter, flat, on any device ([<= partition_numel])."""
Adopt = Callable[[Unit], None]
"""Called when a unit's planes hold its weights: the source may be freed."""


def build_runtime(
    module: nn.Module,
    unit_plans: Sequence[UnitPlan],
    plan: Plan,
    settings: RuntimeSettings,
    ranks: Ranks,
    device: Device,
    take_weights: TakeWeights,
    adopt: Adopt,
    availability: Availability,
    sharing: Sharing | None = None,
) -> SlideRuntime:
    """Build and start. Raises SlideError when memory cannot be had. `sharing`: of several ranks whose weights in host
    memory all of them are to read; closed when these are mapped, and by the caller when that fails."""
    failures = Failures()
    ranks.watched_by(failures)
    if ranks.world_size > 1:
        ranks.require_equal(_choices(unit_plans, plan, settings), "what is to be where")
    trace = None
    if settings.trace is not None:
        names = [unit_plan.spec.name for unit_plan in unit_plans]
        trace = Trace(settings.trace.of_rank(ranks.rank, ranks.world_size), names, STREAM_LANES)
    recorder = StepRecorder(device, trace, rank=ranks.rank)
    memory = HostMemory(page_lock=device.is_cuda, huge_pages=settings.huge_pages)
    empty = Empty.on(device.torch, {unit_plan.spec.precision.parameter for unit_plan in unit_plans})
    store, on_ssd = open_store(unit_plans, plan, settings, ranks, memory, failures)
    shared = None
    if sharing is not None:
        shared = SharedWeights(ranks, sharing, memory, len(unit_plans), failures)
    units: list[Unit] = []
    started = ExitStack()
    try:
        progress = tqdm(unit_plans, desc="ds_slide: placing states", disable=None, leave=False)
        for order, unit_plan in enumerate(progress):
            ssd = on_ssd.get(order)
            on_gpu = order in plan.on_gpu
            units.append(_make_unit(unit_plan, order, on_gpu, ssd, settings, ranks, device, memory, shared, failures))
            _load_weights(units[-1], ranks, take_weights)
            adopt(units[-1])
        _join_parts(units)
        if shared is not None:
            shared.map_others([unit for unit in units if not unit.is_gathered])
        runtime = _wire(
            module,
            units,
            plan,
            settings,
            store,
            ranks,
            device,
            memory,
            shared,
            empty,
            failures,
            recorder,
            availability,
            started,
        )
    except BaseException:
        # No lane has been given anything yet, so none waits for another one, or for the disk.
        started.close()
        if store is not None:
            store.close()
            store.undo()
        raise
    try:
        # The buffers were zeroed on this thread's stream; the lanes' streams know nothing of it.
        device.synchronize()
        runtime.fill_residents()
        if runtime.parts.watchdog is not None:
            runtime.parts.watchdog.start()
        runtime.start()
        running.enter(runtime)
    except BaseException:
        runtime.close()
        started.close()
        if store is not None:
            store.undo()
        raise
    return runtime


def _choices(unit_plans: Sequence[UnitPlan], plan: Plan, settings: RuntimeSettings) -> dict[str, object]:
    """What all ranks have to have decided alike, because it sets which collectives they call in which order."""
    host, model = plan.host, repr([(unit.spec.name, unit.spec.precision, unit.layout) for unit in unit_plans])
    return {
        "the digest of the model's layout": f"{zlib.crc32(model.encode()):08x}",
        "the units whose states are on the GPU": sorted(plan.on_gpu),
        "the units whose weights are on SSD": sorted(host.weights_on_ssd),
        "the number of slots": plan.window,
        "the dtype of gradients": str(settings.gradient_dtype),
        "the dtype of held gradients": str(settings.held_dtype),
    }


def _make_unit(
    unit_plan: UnitPlan,
    order: int,
    on_gpu: bool,
    ssd: SsdUnit | None,
    settings: RuntimeSettings,
    ranks: Ranks,
    device: Device,
    memory: HostMemory,
    shared: SharedWeights | None,
    failures: Failures,
) -> Unit:
    layout, dtype, stays = unit_plan.layout, unit_plan.dtype, unit_plan.spec.kind != "block"
    reduced, held = settings.gradient_of(unit_plan.spec.precision), settings.held_of(unit_plan.spec.precision)
    specs = settings.specs(dtype)
    if on_gpu:
        state = gpu_state(device.torch, layout, specs, dtype, held or reduced)
    else:
        weights = None if shared is None else shared.memory
        state = memory_state(memory, layout, specs, dtype, held, ssd, weights)
    first = Ticket.kept(failures)
    unit = Unit(unit_plan.spec, layout, unit_plan.parameters, state, order, first, reduced, held)
    unit.chunk_rows = unit_plan.chunk_rows
    unit.is_gathered = ranks.world_size > 1 and (shared is None or on_gpu or state.weight is None)
    if on_gpu and ranks.world_size == 1:
        unit.resident = state.weight
    elif on_gpu or (stays and not unit_plan.chunk_rows):
        numel = layout.slot_numel + (layout.local_numel if unit.is_gathered and not on_gpu else 0)
        unit.resident = torch.zeros(numel, dtype=dtype, device=device.torch)
    return unit


def _join_parts(units: Sequence[Unit]) -> None:
    """Tell blocks which units are parts of them."""
    block_of = {unit.spec.module: unit for unit in units if unit.spec.kind == "block"}
    for unit in units:
        if unit.spec.kind == "part":
            block_of[unit.spec.module].parts.append(unit)


def _load_weights(unit: Unit, ranks: Ranks, take_weights: TakeWeights) -> None:
    """Fill the weight plane, and what completes it to the masters: of fp16 weights these themselves, of narrowed ones
    the remainders. Other planes start at zero and are zero already: new memory, and the unwritten parts of a
    preallocated file."""
    state, ssd = unit.state, unit.state.ssd
    weight = state.weight
    if weight is None:
        assert ssd is not None
        plane = page_buffer(ssd.places.weight_bytes)
        weight = ssd.weight_view(plane)
    for parameter, entry in zip(unit.parameters, unit.layout.entries, strict=True):
        own = take_weights(parameter, entry).detach().reshape(-1)
        if unit.spec.precision.narrowed:
            _load_narrowed(unit, entry.offset, own, weight)
        else:
            weight[entry.offset : entry.offset + own.numel()].copy_(own)
    if state.weight is None:
        assert ssd is not None
        ssd.write("weight", slice(0, weight.numel()), weight)
    if any(spec.name == "remainder" and spec.dtype.is_floating_point for spec in state.specs):
        state.write("remainder", slice(0, unit.layout.trainable_numel), weight[: unit.layout.trainable_numel].float())
    if unit.resident is not None and ranks.world_size == 1:
        unit.resident.copy_(weight)


def _load_narrowed(unit: Unit, offset: int, values: torch.Tensor, weight: torch.Tensor) -> None:
    """Split fp32 `values` into weights and remainders, in pieces: the encoding works in 32-bit integers."""
    for start in range(0, values.numel(), SPLIT_NUMEL):
        piece = values[start : start + SPLIT_NUMEL].float()
        high, low = encode_planar(piece)
        place = slice(offset + start, offset + start + piece.numel())
        weight[place].copy_(high.view(weight.dtype))
        unit.state.write("remainder", place, low)


def _wire(
    module: nn.Module,
    units: list[Unit],
    plan: Plan,
    settings: RuntimeSettings,
    store: SsdStore | None,
    ranks: Ranks,
    device: Device,
    memory: HostMemory,
    shared: SharedWeights | None,
    empty: Empty,
    failures: Failures,
    recorder: StepRecorder,
    availability: Availability,
    started: ExitStack,
) -> SlideRuntime:
    """`started`: gets what ends the threads, for a caller that is left with them when this fails."""
    meters = recorder.meters
    delays = [Delay(settings.delay_ms, settings.seed + number) for number in range(4)]
    idle = not settings.trains
    updater = CpuUpdater(settings.cpu_threads, settings.cpu_cores, idle=idle)
    started.callback(updater.end_threads)
    ssd = None if store is None else make_ssd_states(units, plan, settings, store, memory, failures, recorder.requests)
    for unit in units:
        if ssd is not None and unit.state.ssd is not None:
            unit.bring_forward = ssd.press
    h2d = Lane("h2d", device, failures, meters["h2d"], delays[0])
    lanes = Lanes(
        h2d=h2d,
        # Without updates it has the chunks of a streamed head to bring.
        edges=Lane(
            "h2d of edges",
            device,
            failures,
            meters[OUTER_H2D],
            delays[3],
            idle=idle and not any(unit.chunk_rows for unit in units),
        ),
        d2h=Lane("d2h", device, failures, meters["d2h"], delays[1], idle=idle),
        update=UpdateLane(device, failures, meters["update"], delays[2], idle=idle),
    )
    for lane in (lanes.h2d, lanes.edges, lanes.d2h, lanes.update):
        started.callback(lane.close)
    uploads = Uploads(device, units, {} if shared is None else shared.parts, ssd, failures)
    streamed = [unit for unit in units if unit.is_streamed]
    updating = Updating(lanes.update, host_update(updater), ssd)
    window = None
    if streamed:
        nbytes = max(unit.layout.slot_numel * unit.dtype.itemsize for unit in streamed)
        own = (unit.layout.local_numel * unit.dtype.itemsize for unit in streamed if unit.is_gathered)
        nbytes += max(own, default=0)
        buffers = [
            torch.zeros(nbytes, dtype=torch.uint8, device=device.torch) for _ in range(min(plan.window, len(streamed)))
        ]
        window = Window(device, lanes.h2d, failures, streamed, buffers, uploads.fill, *announcer(ssd, settings))
    stagings = _stagings(units, ranks, device, failures)
    ranks.connect(stagings[0].packed, stagings[0].own, settings.gradient_dtype)
    gradients = Gradients(
        device=device,
        ranks=ranks,
        d2h=lanes.d2h,
        updates=lanes.update,
        updater=updater,
        failures=failures,
        route=GradientRoute(held=settings.held_dtype is not None),
        stagings=stagings,
        ring=_rings(units, settings, memory, failures),
        num_units=len(units),
        square_sum=square_sum,
        updating=updating,
        on_ssd=None if store is None else make_ssd_gradients(units, store, memory, meters["update"]),
    )
    if ssd is not None:
        recorder.watch_ssd(ssd.statistics)
    passing = [RowBuffers.on(device, unit, unit.chunk_rows) for unit in units if unit.chunk_rows]
    parts = Parts(
        device=device,
        ranks=ranks,
        failures=failures,
        recorder=recorder,
        lanes=lanes,
        memory=memory,
        units=units,
        window=window,
        empty=empty,
        held=settings.held_dtype is not None,
        trains=settings.trains,
        gradients=gradients,
        uploads=uploads,
        shared=shared,
        gathers=Gathers.on(device, ranks, units, all_fit=plan.window >= len(streamed)),
        updating=updating,
        ssd=ssd,
        make_rows=_make_rows(passing[0], device, lanes, failures, gradients) if passing else None,
        watchdog=_watchdog(settings, ranks, device, failures, store),
        memory_report=_memory_report(units, plan, window, passing, memory),
        taken=Taken(
            plan.gpu_bytes,
            plan.gpu_state_bytes,
            0 if window is None else window.nbytes(),
            plan.host.state_bytes,
        ),
    )
    return SlideRuntime(module, parts, availability)


def _watchdog(
    settings: RuntimeSettings, ranks: Ranks, device: Device, failures: Failures, store: SsdStore | None
) -> Watchdog | None:
    # Its thread must not keep the engine alive, so it knows the store, and not what that is used for.
    if not settings.hang_timeout_s:
        return None
    peers = Peers.of(ranks.rank, ranks.exchange) if ranks.world_size > 1 else None
    if ranks.world_size > 1 and peers is None:
        return None
    return Watchdog(
        failures,
        device,
        settings.hang_timeout_s,
        progress=[] if store is None else [functools.partial(moved_bytes, store)],
        peers=peers,
        last=(lambda: None) if store is None else store.remove_files,
    )


def _stagings(units: Sequence[Unit], ranks: Ranks, device: Device, failures: Failures) -> list[Staging]:
    if ranks.world_size > 1:
        passing = list(units)
    else:
        passing = [unit for unit in units if unit.state.tier != "gpu" and unit.spec.kind != "edge"]
    nbytes = max((_gradient_bytes(unit) for unit in passing), default=0)

    def staging() -> Staging:
        packed = torch.zeros(ranks.world_size * nbytes, dtype=torch.uint8, device=device.torch)
        own = packed if ranks.world_size == 1 else torch.zeros(nbytes, dtype=torch.uint8, device=device.torch)
        return Staging(packed, own, failures)

    return [staging() for _ in range(STAGINGS)]


def _gradient_bytes(unit: Unit) -> int:
    return unit.layout.trainable_numel * unit.gradient_dtype.itemsize


def _rings(
    units: Sequence[Unit], settings: RuntimeSettings, memory: HostMemory, failures: Failures
) -> Callable[[Unit], HostRing]:
    """Blocks and their parts share a ring. Edges, a few and each larger than many blocks, have one buffer between
    them."""
    host = [unit for unit in units if unit.state.tier != "gpu" and unit.layout.trainable_numel]
    needed = settings.held_dtype is None or settings.accumulates or any(unit.converts_gradient for unit in host)
    to_ssd = any(unit.state.gradient_on_ssd for unit in host)

    def ring(count: int, nbytes: int) -> HostRing:
        def buffer() -> torch.Tensor:
            return memory.tensor(nbytes, torch.uint8, transfers=True)

        return HostRing([buffer() for _ in range(count)], failures, spare=buffer)

    def largest(*kinds: str) -> int:
        return max((_gradient_bytes(unit) for unit in host if unit.spec.kind in kinds), default=0)

    blocks, edges = largest("block", "part"), largest("edge")
    if to_ssd:
        blocks = whole_pages(blocks)  # written from where they have arrived
    rings = {
        "block": ring(settings.gradient_buffers if (needed or to_ssd) and blocks else 0, blocks),
        "edge": ring(1 if needed and edges else 0, edges),
    }
    return lambda unit: rings["edge" if unit.spec.kind == "edge" else "block"]


def _make_rows(buffers: RowBuffers, device: Device, lanes: Lanes, failures: Failures, gradients: Gradients) -> MakeRows:
    def make(events: RowEvents) -> StreamedRows:
        return StreamedRows(buffers, device, lanes.edges, lanes.d2h, failures, gradients, events)

    return make


def _memory_report(
    units: Sequence[Unit], plan: Plan, window: Window | None, passing: Sequence[RowBuffers], memory: HostMemory
) -> dict[str, int]:
    on_gpu = [unit for unit in units if unit.state.tier == "gpu"]
    slots = 0 if window is None else window.nbytes()
    resident = sum(
        unit.resident.numel() * unit.resident.element_size()
        for unit in units
        if unit.resident is not None and unit.resident is not unit.state.weight
    )
    rows = sum(buffers.nbytes() for buffers in passing)
    return {
        "gpu_bytes": slots + resident + rows + sum(unit.state.nbytes() for unit in on_gpu),
        "gpu_state_bytes": sum(unit.state.nbytes() for unit in on_gpu),
        "window_bytes": slots,
        "host_bytes": memory.total_bytes,
        "host_state_bytes": plan.host.state_bytes,
        "ssd_bytes": plan.host.ssd_bytes,
        "ssd_units": len(plan.host.weights_on_ssd | plan.host.records_on_ssd | plan.host.gradients_on_ssd),
        "ssd_gradient_units": len(plan.host.gradients_on_ssd),
        "pinned_bytes": memory.pinned_bytes,
        "parameters": sum(entry.numel for unit in units for entry in unit.layout.entries),
        "gpu_units": len(on_gpu),
        "units": len(units),
        "blocks": sum(unit.spec.kind == "block" for unit in units),
        "slots": 0 if window is None else len(window.slots),
    }
