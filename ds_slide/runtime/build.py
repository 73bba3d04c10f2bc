"""Puts a runtime together: allocates the state buffers unit by unit, fills them, starts the lanes."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import torch
from torch import nn
from tqdm import tqdm

from ds_slide.config.trace_file import trace_request
from ds_slide.optim.cpu import CpuUpdater
from ds_slide.optim.square_sum import square_sum
from ds_slide.plan.allocations import (
    BLOCK_RING,
    GATHERED,
    OUTER_RING,
    PIECES_RING,
    SLOTS,
    STAGED,
    STAGED_PARTS,
    UPLOADED,
    row_gradients_of,
    rows_of,
)
from ds_slide.plan.memory import Plan
from ds_slide.plan.probe.local_ranks import local_ranks
from ds_slide.plan.step_model import Schedules
from ds_slide.report.statistics import OUTER_H2D, STREAM_LANES, StepRecorder
from ds_slide.report.trace import Trace
from ds_slide.report.waits import Waits
from ds_slide.runtime import running
from ds_slide.runtime.activations.states import RunningStates
from ds_slide.runtime.allocator import Allocator
from ds_slide.runtime.build_activations import make_spare_memory
from ds_slide.runtime.build_context import BuildContext
from ds_slide.runtime.build_ssd import announcer, open_ssd, provide_buffers
from ds_slide.runtime.build_units import TakeWeights, begin_codecs, join_parts, load_weights, make_unit
from ds_slide.runtime.device import Device
from ds_slide.runtime.engine import SlideRuntime
from ds_slide.runtime.gradients.agreement import Agreement
from ds_slide.runtime.gradients.route import Gradients
from ds_slide.runtime.gradients.sources import Staging
from ds_slide.runtime.parts import Parts
from ds_slide.runtime.ranks.board import open_board
from ds_slide.runtime.ranks.collectives import Ranks
from ds_slide.runtime.ranks.conductor import Conductor
from ds_slide.runtime.ranks.peers import Peers
from ds_slide.runtime.ranks.watchdog import Watchdog
from ds_slide.runtime.settings import RuntimeSettings, UnitPlan
from ds_slide.runtime.transfers.handoff import Failures
from ds_slide.runtime.transfers.pool import BufferPool
from ds_slide.runtime.transfers.ssd import SsdParts, SsdStates, moved_bytes
from ds_slide.runtime.transfers.stream_worker import Delay, StreamWorker
from ds_slide.runtime.transfers.uploads import Uploads
from ds_slide.runtime.unit import Empty, Unit
from ds_slide.runtime.updates.apply import host_update
from ds_slide.runtime.updates.passes import Passes
from ds_slide.runtime.updates.speculation import Speculating
from ds_slide.runtime.updates.threads import update_cores
from ds_slide.runtime.updates.update_worker import UpdateWorker
from ds_slide.runtime.updates.updating import Updating
from ds_slide.runtime.weights.gathers import Gathers
from ds_slide.runtime.weights.residents import Availability
from ds_slide.runtime.weights.rows import MakeRows, RowBuffers, RowEvents, StreamedRows
from ds_slide.runtime.weights.shared_weights import SharedWeights
from ds_slide.runtime.weights.sharing import Sharing
from ds_slide.runtime.weights.window import Window
from ds_slide.runtime.workers import Workers
from ds_slide.store.host_memory import HostMemory
from ds_slide.store.ssd.store import SsdStore

Adopt = Callable[[Unit], None]
"""Called when a unit's state buffers hold its weights: the source may be freed."""


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
    waits = Waits(device)
    failures = Failures(waits)
    ranks.watched_by(failures)
    device.expand_segments()
    if ranks.world_size > 1:
        ranks.require_equal(_choices(unit_plans, plan, settings), "what is to be where")
    recorder = StepRecorder(device, waits, _trace(unit_plans, settings, ranks, device), rank=ranks.rank)
    memory = HostMemory(page_lock=device.is_cuda, huge_pages=settings.slide.huge_pages)
    allocator = Allocator(plan.allocations, memory, device)
    empty = Empty.on(device.torch, {unit_plan.spec.precision.parameter for unit_plan in unit_plans})
    shared = None
    if sharing is not None:
        shared = SharedWeights(ranks, sharing, memory, len(unit_plans), failures)
    threads, cores = _update_threads(settings)
    conductor = Conductor.of(ranks)
    announcements = None
    if conductor is not None and settings.trains:
        announcements = open_board(ranks, Agreement.width(len(unit_plans)))
    context = BuildContext(plan, settings, ranks, device, failures, recorder, memory, allocator, shared, threads, cores)
    ssd = open_ssd(context, unit_plans)
    on_ssd = SsdParts() if ssd is None else ssd.parts
    units: list[Unit] = []
    started = ExitStack()
    try:
        begin_codecs(context, unit_plans)
        progress = tqdm(unit_plans, desc="ds_slide: placing states", disable=None, leave=False)
        for order, unit_plan in enumerate(progress):
            units.append(make_unit(context, unit_plan, order, on_ssd))
            load_weights(units[-1], ranks, take_weights)
            adopt(units[-1])
        join_parts(units)
        if shared is not None:
            shared.map_others([unit for unit in units if not unit.is_gathered])
        parts = _wire(module, context, units, adopt, ssd, empty, started)
        parts.announcements = announcements
        allocator.require_all_given()
        runtime = SlideRuntime(module, parts, availability)
        if settings.slide.gpu_states == "auto":
            parts.spare.states = RunningStates(runtime)
    except BaseException:
        # No lane has been given anything yet, so none waits for another one, or for the disk.
        started.close()
        if ssd is not None:
            ssd.close()
            ssd.store.undo()
        raise
    try:
        # The buffers were zeroed on this thread's stream; the lanes' streams know nothing of it.
        device.synchronize()
        runtime.resident_weights.fill_all()
        if runtime.parts.watchdog is not None:
            runtime.parts.watchdog.start()
        runtime.start()
        running.enter(runtime)
    except BaseException:
        runtime.close()
        started.close()
        if ssd is not None:
            ssd.store.undo()
        raise
    return runtime


def _trace(unit_plans: Sequence[UnitPlan], settings: RuntimeSettings, ranks: Ranks, device: Device) -> Trace | None:
    """The record of the steps that the settings choose, with a file of its own for every rank. Without an optimizer
    there are no steps, and the file is that of the engine that trains with the same JSON."""
    request = trace_request(settings.slide.trace) if settings.trains else None
    if request is None:
        return None
    names = [unit_plan.spec.name for unit_plan in unit_plans]
    return Trace(request.of_rank(ranks.rank, ranks.world_size), names, STREAM_LANES, device)


def _update_threads(settings: RuntimeSettings) -> tuple[int, Sequence[int]]:
    """How many threads update, and the cores that they are pinned to."""
    if not settings.trains:
        return 0, ()
    slide, local_rank = settings.slide, int(os.environ.get("LOCAL_RANK", "0"))
    return update_cores(slide.cpu_threads, slide.cpu_cores, local_rank, local_ranks())


def _choices(unit_plans: Sequence[UnitPlan], plan: Plan, settings: RuntimeSettings) -> dict[str, object]:
    """What all ranks have to have decided alike, because it sets which collectives they call in which order."""
    placement, model = plan.placement, repr([(unit.spec.name, unit.spec.precision, unit.layout) for unit in unit_plans])
    return {
        "the digest of the model's layout": f"{zlib.crc32(model.encode()):08x}",
        "the units whose states are on the GPU": sorted(placement.on_gpu),
        "the units whose weights are on SSD": sorted(placement.weights_on_ssd),
        "the number of slots": placement.window,
        "the dtype of gradients": str(settings.gradient_dtype),
        "the dtype of held gradients": str(settings.held_dtype),
        "ds_slide.compression": settings.slide.compression,
        "whether masters of compressed matrices are their bf16 weights": plan.needs.rounds_masters,
    }


def _wire(
    module: nn.Module,
    context: BuildContext,
    units: list[Unit],
    adopt: Adopt,
    ssd: SsdStates | None,
    empty: Empty,
    started: ExitStack,
) -> Parts:
    """`started`: gets what ends the threads, for a caller that is left with them when this fails."""
    settings, ranks, device, failures = context.settings, context.ranks, context.device, context.failures
    shared, allocator = context.shared, context.allocator
    updater = CpuUpdater(context.cpu_threads, context.cpu_cores, idle=not settings.trains)
    started.callback(updater.end_threads)
    if ssd is not None:
        provide_buffers(context, ssd)
    workers = _make_workers(context, units)
    for worker in (workers.h2d, workers.outer_h2d, workers.d2h, workers.update):
        started.callback(worker.close)
    uploads = Uploads({} if shared is None else shared.parts, _scratch(context, UPLOADED), device, failures)
    streamed = [unit for unit in units if unit.is_streamed]
    updating = _updating(settings, workers.update, updater, failures)
    window, slots = None, allocator.buffers(SLOTS)
    if streamed:
        announce = announcer(ssd, settings)
        window = Window(device, workers.h2d, failures, streamed, slots, uploads.fill, *announce)
    stagings = make_stagings(allocator, ranks.world_size, failures)
    ranks.connect(stagings[0].packed, stagings[0].own, settings.gradient_dtype)
    gradients = Gradients(
        device=device,
        ranks=ranks,
        d2h=workers.d2h,
        updates=workers.update,
        updater=updater,
        failures=failures,
        stagings=stagings,
        ring=_rings(context),
        num_units=len(units),
        square_sum=square_sum,
        updating=updating,
        stalled=context.recorder.stalled,
    )
    if ssd is not None:
        context.recorder.watch_ssd(ssd.statistics)
    all_fit = context.plan.placement.window >= len(streamed)
    return Parts(
        plan=context.plan,
        device=device,
        ranks=ranks,
        failures=failures,
        recorder=context.recorder,
        workers=workers,
        updater=updater,
        memory=context.memory,
        pools=context.allocator.pools,
        units=units,
        adopt=adopt,
        window=window,
        empty=empty,
        trains=settings.trains,
        gradients=gradients,
        uploads=uploads,
        shared=shared,
        gathers=Gathers(ranks, _scratch(context, GATHERED), all_fit=all_fit),
        updating=updating,
        spare=make_spare_memory(module, context, units, lambda: _schedules(updating)),
        ssd=ssd,
        make_rows=_make_rows(context, units, workers, gradients),
        watchdog=_watchdog(settings, ranks, device, failures, context.stores),
    )


def _make_workers(context: BuildContext, units: Sequence[Unit]) -> Workers:
    settings, device, failures = context.settings, context.device, context.failures
    meters, idle = context.recorder.meters, not settings.trains
    debug = settings.slide.debug
    delays = [Delay(debug.lane_delay_ms, debug.seed + number) for number in range(4)]
    # Without updates it has the chunks of a streamed head to bring.
    nothing_for_outer = idle and not any(unit.chunk_rows for unit in units)
    return Workers(
        h2d=StreamWorker("h2d", device, failures, meters["h2d"], delays[0]),
        outer_h2d=StreamWorker(
            "h2d of outer modules", device, failures, meters[OUTER_H2D], delays[3], idle=nothing_for_outer
        ),
        d2h=StreamWorker("d2h", device, failures, meters["d2h"], delays[1], idle=idle),
        update=UpdateWorker(device, failures, meters["update"], delays[2], idle=idle),
    )


def _updating(settings: RuntimeSettings, lane: UpdateWorker, updater: CpuUpdater, failures: Failures) -> Updating:
    debug, update = settings.slide.debug, host_update(updater)
    passes = Passes(debug.update_passes)
    speculating = Speculating(
        lane, update, updater, passes, failures, wanted=debug.speculate, in_vain=debug.take_back, seed=debug.seed
    )
    return Updating(lane, update, passes, speculating, failures, deferred=settings.held_dtype is not None)


def _schedules(updating: Updating) -> Schedules:
    """Updates that are done ahead count as deferred."""
    passes = updating.passes
    if not updating.deferred:
        return Schedules("under backward", "under backward")
    return Schedules(
        measured="two passes" if passes.did_two else "deferred", coming="two passes" if passes.two else "deferred"
    )


def _scratch(context: BuildContext, what: str) -> torch.Tensor | None:
    """A buffer of bytes in which weights of several ranks meet; None where none do."""
    if context.ranks.world_size == 1:
        return None
    (buffer,) = context.allocator.buffers(what)
    return buffer if buffer.numel() else None


def _watchdog(
    settings: RuntimeSettings, ranks: Ranks, device: Device, failures: Failures, stores: Sequence[SsdStore]
) -> Watchdog | None:
    if not settings.slide.hang_timeout:
        return None
    peers = Peers.of(ranks.rank, ranks.exchange) if ranks.world_size > 1 else None
    if ranks.world_size > 1 and peers is None:
        return None

    def remove_files() -> None:
        for store in stores:
            store.remove_files()

    # Its thread must not keep the engine alive, so it knows the store, which may come later, and not what that is for.
    return Watchdog(
        failures,
        device,
        settings.slide.hang_timeout,
        progress=[lambda: sum(map(moved_bytes, stores))],
        peers=peers,
        last=remove_files,
    )


def make_stagings(allocator: Allocator, world_size: int, failures: Failures) -> list[Staging]:
    """GPU buffers for gradients, as the plan of `allocator` has them."""
    packed = allocator.buffers(STAGED)
    own = packed if world_size == 1 else allocator.buffers(STAGED_PARTS)
    return [Staging(*buffers, failures) for buffers in zip(packed, own, strict=True)]


def _rings(context: BuildContext) -> Callable[[Unit], BufferPool]:
    """Through which buffers the gradient of a unit passes. Looked up each time: a larger pool may take the place of one
    when more is trained (`ds_slide.runtime.unfreezing`)."""
    for what in (BLOCK_RING, OUTER_RING, PIECES_RING):
        context.allocator.pool(what, context.failures)
    pools = context.allocator.pools

    def ring(unit: Unit) -> BufferPool:
        pool = pools[OUTER_RING if unit.spec.kind == "outer" else BLOCK_RING]
        return pool if pool.addresses else pools[PIECES_RING]

    return ring


def _make_rows(context: BuildContext, units: Sequence[Unit], workers: Workers, gradients: Gradients) -> MakeRows | None:
    """The rows of the outer module whose weight passes through the GPU, None where there is none."""
    unit = next((unit for unit in units if unit.chunk_rows), None)
    if unit is None:
        return None
    weights = context.allocator.buffers(rows_of(unit.name))
    trained = context.allocator.buffers(row_gradients_of(unit.name)) if unit.trainable else []
    buffers = RowBuffers.of(unit, weights, trained)

    def make(events: RowEvents) -> StreamedRows:
        return StreamedRows(
            buffers, context.device, workers.outer_h2d, workers.d2h, context.failures, gradients, events
        )

    return make
