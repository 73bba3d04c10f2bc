"""Builds a runtime: allocates the state buffers unit by unit, fills them, starts the lanes."""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from contextlib import ExitStack

import torch
from torch import nn
from tqdm import tqdm

from ds_slide.optim.cpu import CpuUpdater
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
from ds_slide.plan.host_room import local_ranks
from ds_slide.plan.memory import Plan
from ds_slide.report.statistics import OUTER_H2D, STREAM_LANES, StepRecorder
from ds_slide.report.trace import Trace
from ds_slide.report.waits import Waits
from ds_slide.runtime.build_activations import make_spare_memory
from ds_slide.runtime.build_ssd import open_ssd, provide_buffers, read_ahead
from ds_slide.runtime.build_units import begin_codecs, join_parts, load_weights, make_unit
from ds_slide.runtime.core import running
from ds_slide.runtime.core.allocator import Allocator
from ds_slide.runtime.core.clients import Clients
from ds_slide.runtime.core.context import Context
from ds_slide.runtime.core.device import Device
from ds_slide.runtime.core.futures import Failures
from ds_slide.runtime.core.lanes import Lanes
from ds_slide.runtime.core.ranks.board import open_board
from ds_slide.runtime.core.ranks.collectives import Ranks
from ds_slide.runtime.core.ranks.conductor import Conductor
from ds_slide.runtime.core.ranks.peers import Peers
from ds_slide.runtime.core.ranks.shared_weights import SharedWeights
from ds_slide.runtime.core.ranks.sharing import Sharing
from ds_slide.runtime.core.ranks.watchdog import Watchdog
from ds_slide.runtime.core.settings import RuntimeSettings, UnitPlan
from ds_slide.runtime.core.stream_lane import Delay, StreamWorker
from ds_slide.runtime.core.unit import Empty, Unit
from ds_slide.runtime.core.update_lane import UpdateWorker
from ds_slide.runtime.engine import SlideRuntime
from ds_slide.runtime.gradients.agreement import Agreement
from ds_slide.runtime.gradients.route import Gradients
from ds_slide.runtime.gradients.sources import Staging
from ds_slide.runtime.memory.states import RunningStates
from ds_slide.runtime.parts import Parts
from ds_slide.runtime.ssd.ssd import SsdParts, SsdStates, moved_bytes
from ds_slide.runtime.updates.threads import update_cores
from ds_slide.runtime.updates.updating import Updating
from ds_slide.runtime.weights.gathers import Gathers
from ds_slide.runtime.weights.rows import RowBuffers
from ds_slide.runtime.weights.uploads import Uploads
from ds_slide.runtime.weights.window import Window
from ds_slide.store.host_memory import HostMemory


def build_runtime(
    module: nn.Module,
    unit_plans: Sequence[UnitPlan],
    plan: Plan,
    settings: RuntimeSettings,
    ranks: Ranks,
    device: Device,
    clients: Clients,
    sharing: Sharing | None = None,
) -> SlideRuntime:
    """Build and start a runtime. Raises SlideError when an allocation fails. `sharing`: the memory files of several
    ranks that share weights in host memory. It is closed when the weights are mapped, and by the caller when that
    fails."""
    failures = Failures(Waits(device))
    ranks.watched_by(failures)
    device.expand_segments()
    if ranks.world_size > 1:
        ranks.require_equal(_choices(unit_plans, plan, settings), "what is to be where")
    conductor, announcements = Conductor.of(ranks), None
    if conductor is not None and settings.trains:
        announcements = open_board(ranks, Agreement.width(len(unit_plans)))
    started = ExitStack()
    ssd: SsdStates | None = None
    try:
        context = _context(unit_plans, plan, settings, ranks, device, clients, failures, sharing, started)
        ssd = open_ssd(context, unit_plans)
        units = _make_units(context, unit_plans, ssd)
        parts = _wire(module, context, units, ssd)
        parts.announcements = announcements
        context.allocator.require_all_given()
        runtime = SlideRuntime(module, parts)
        if settings.slide.gpu_states == "auto":
            parts.spare.states = RunningStates(runtime)
    except BaseException:
        # No lane has a job yet, so none waits for another lane, or for the disk.
        started.close()
        if ssd is not None:
            ssd.close()
            ssd.store.undo()
        raise
    try:
        # The buffers were zeroed on this thread's stream, and the lanes' streams do not wait for it.
        device.synchronize()
        runtime.resident_weights.fill_all()
        if parts.watchdog is not None:
            parts.watchdog.start()
        runtime.start()
        running.enter(runtime)
    except BaseException:
        runtime.close()
        started.close()
        if ssd is not None:
            ssd.store.undo()
        raise
    return runtime


def _context(
    unit_plans: Sequence[UnitPlan],
    plan: Plan,
    settings: RuntimeSettings,
    ranks: Ranks,
    device: Device,
    clients: Clients,
    failures: Failures,
    sharing: Sharing | None,
    started: ExitStack,
) -> Context:
    """Make the context. `started`: gets the functions that end the threads, for the caller to use when the rest
    fails."""
    recorder = StepRecorder(device, failures.traced, _trace(unit_plans, settings, ranks, device), rank=ranks.rank)
    memory = HostMemory(page_lock=device.is_cuda, huge_pages=settings.slide.huge_pages)
    shared = None if sharing is None else SharedWeights(ranks, sharing, memory, len(unit_plans), failures)
    threads, cores = _update_threads(settings)
    updater = CpuUpdater(threads, cores, idle=not settings.trains)
    started.callback(updater.end_threads)
    lanes = _make_lanes(settings, device, failures, recorder, unit_plans)
    for lane in (lanes.h2d, lanes.outer_h2d, lanes.d2h, lanes.update):
        started.callback(lane.close)
    allocator = Allocator(plan.allocations, memory, device)
    return Context(
        plan, settings, clients, ranks, device, failures, recorder, memory, allocator, shared, lanes, updater, threads
    )


def _make_units(context: Context, unit_plans: Sequence[UnitPlan], ssd: SsdStates | None) -> list[Unit]:
    """Make the units with their weights, which the clients then free."""
    units: list[Unit] = []
    begin_codecs(context, unit_plans)
    on_ssd = SsdParts() if ssd is None else ssd.parts
    progress = tqdm(unit_plans, desc="ds_slide: placing states", disable=None, leave=False)
    for order, unit_plan in enumerate(progress):
        units.append(make_unit(context, unit_plan, order, on_ssd))
        load_weights(units[-1], context)
        context.clients.adopt(units[-1])
    join_parts(units)
    if context.shared is not None:
        context.shared.map_others([unit for unit in units if not unit.is_gathered])
    return units


def _trace(unit_plans: Sequence[UnitPlan], settings: RuntimeSettings, ranks: Ranks, device: Device) -> Trace | None:
    """Return the trace of the steps that the settings choose, with a file for every rank. Without an optimizer there
    are no steps, and the file belongs to the engine that trains with the same JSON."""
    request = settings.slide.trace.request() if settings.trains else None
    if request is None:
        return None
    names = [unit_plan.spec.name for unit_plan in unit_plans]
    return Trace(request.of_rank(ranks.rank, ranks.world_size), names, STREAM_LANES, device)


def _update_threads(settings: RuntimeSettings) -> tuple[int, Sequence[int]]:
    """Return the number of update threads, and the cores that they are pinned to."""
    if not settings.trains:
        return 0, ()
    slide, local_rank = settings.slide, int(os.environ.get("LOCAL_RANK", "0"))
    return update_cores(slide.cpu_threads, slide.cpu_cores, local_rank, local_ranks())


def _choices(unit_plans: Sequence[UnitPlan], plan: Plan, settings: RuntimeSettings) -> dict[str, object]:
    """Return the decisions that all ranks must share, because they determine the collectives and their order."""
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


def _wire(module: nn.Module, context: Context, units: list[Unit], ssd: SsdStates | None) -> Parts:
    ranks, device, failures = context.ranks, context.device, context.failures
    shared, allocator, lanes = context.shared, context.allocator, context.lanes
    if ssd is not None:
        provide_buffers(context, ssd)
        context.recorder.watch_ssd(ssd)
    # Weights are uploaded into slots of the window, or into buffers that stay on the GPU.
    uploads = Uploads({} if shared is None else shared.parts, _scratch(context, UPLOADED), device, failures)
    streamed = [unit for unit in units if unit.is_streamed]
    window, slots = None, allocator.buffers(SLOTS)
    if streamed:
        window = Window(device, lanes.h2d, failures, streamed, slots, uploads, read_ahead(ssd, context.settings))
    # Gradients leave the GPU through staging buffers and the pools.
    stagings = make_stagings(allocator, ranks.world_size, failures)
    ranks.connect(stagings[0].packed, stagings[0].own, context.settings.gradient_dtype)
    for what in (BLOCK_RING, OUTER_RING, PIECES_RING):
        allocator.pool(what, failures)
    updating = Updating(context)
    gradients = Gradients(context, stagings, len(units), updating)
    all_fit = context.plan.placement.window >= len(streamed)
    return Parts(
        context=context,
        plan=context.plan,
        units=units,
        window=window,
        empty=Empty.on(device.torch, {unit.parameter_dtype for unit in units}),
        gradients=gradients,
        uploads=uploads,
        gathers=Gathers(ranks, _scratch(context, GATHERED), all_fit=all_fit),
        updating=updating,
        spare=make_spare_memory(module, context, units, updating),
        ssd=ssd,
        rows=_row_buffers(context, units),
        watchdog=_watchdog(context),
    )


def _make_lanes(
    settings: RuntimeSettings,
    device: Device,
    failures: Failures,
    recorder: StepRecorder,
    unit_plans: Sequence[UnitPlan],
) -> Lanes:
    meters, debug, idle = recorder.meters, settings.slide.debug, not settings.trains
    delays = [Delay(debug.lane_delay_ms, debug.seed + number) for number in range(4)]
    # Without updates this lane still uploads the chunks of a streamed head.
    nothing_for_outer = idle and not any(unit_plan.chunk_rows for unit_plan in unit_plans)
    return Lanes(
        h2d=StreamWorker("h2d", device, failures, meters["h2d"], delays[0]),
        outer_h2d=StreamWorker(
            "h2d of outer modules", device, failures, meters[OUTER_H2D], delays[3], idle=nothing_for_outer
        ),
        d2h=StreamWorker("d2h", device, failures, meters["d2h"], delays[1], idle=idle),
        update=UpdateWorker(device, failures, meters["update"], delays[2], idle=idle),
    )


def _scratch(context: Context, what: str) -> torch.Tensor | None:
    """Return a buffer of bytes for the weights of several ranks; None with one rank, or where the plan has none."""
    if context.ranks.world_size == 1:
        return None
    (buffer,) = context.allocator.buffers(what)
    return buffer if buffer.numel() else None


def _watchdog(context: Context) -> Watchdog | None:
    timeout, ranks, stores = context.settings.slide.hang_timeout, context.ranks, context.stores
    if not timeout:
        return None
    peers = Peers.of(ranks) if ranks.world_size > 1 else None

    # Its thread must not keep the engine alive. So it refers to the list of stores, which may be filled later, and not
    # to the parts that use them.
    return Watchdog(
        context.failures,
        context.device,
        timeout,
        progress=[lambda: sum(map(moved_bytes, stores))],
        peers=peers,
    )


def make_stagings(allocator: Allocator, world_size: int, failures: Failures) -> list[Staging]:
    """Make the GPU buffers for gradients that the plan of `allocator` has."""
    packed = allocator.buffers(STAGED)
    own = packed if world_size == 1 else allocator.buffers(STAGED_PARTS)
    return [Staging(*buffers, failures) for buffers in zip(packed, own, strict=True)]


def _row_buffers(context: Context, units: Sequence[Unit]) -> RowBuffers | None:
    """Make the buffers of the outer module whose weight is streamed through the GPU; None where there is none."""
    unit = next((unit for unit in units if unit.chunk_rows), None)
    if unit is None:
        return None
    weights = context.allocator.buffers(rows_of(unit.name))
    trained = context.allocator.buffers(row_gradients_of(unit.name)) if unit.trainable else []
    return RowBuffers.of(unit, weights, trained)
