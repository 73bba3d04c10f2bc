"""Builds a runtime: allocates the state buffers unit by unit, fills them, starts the lanes."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field

import torch
from torch import nn
from tqdm import tqdm

from ds_slide.optim.cpu import CpuUpdater
from ds_slide.optim.muon import MuonRule
from ds_slide.plan.allocations import (
    AVERAGED,
    BLOCK_RING,
    EXPERTS,
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
from ds_slide.plan.cores import Share
from ds_slide.plan.memory import Plan
from ds_slide.report.statistics import OUTER_H2D, PRODUCTS, STREAM_LANES, LaneMeter, StepRecorder
from ds_slide.report.trace import Trace
from ds_slide.report.waits import Waits
from ds_slide.runtime.activations.activations import Activations
from ds_slide.runtime.activations.checkpointing import may_be_unasked
from ds_slide.runtime.build_units import begin_codecs, join_parts, load_weights, make_unit
from ds_slide.runtime.core import running
from ds_slide.runtime.core.allocator import Allocator
from ds_slide.runtime.core.context import Clients, Context
from ds_slide.runtime.core.device import Device
from ds_slide.runtime.core.futures import Failures
from ds_slide.runtime.core.lanes import Delay, Lanes, StreamWorker, UpdateWorker
from ds_slide.runtime.core.ranks.board import open_board
from ds_slide.runtime.core.ranks.collectives import Ranks
from ds_slide.runtime.core.ranks.conductor import Conductor
from ds_slide.runtime.core.ranks.distant_peers import DistantPeers
from ds_slide.runtime.core.ranks.peers import Peers
from ds_slide.runtime.core.ranks.shared_weights import SharedWeights
from ds_slide.runtime.core.ranks.sharing import Sharing
from ds_slide.runtime.core.ranks.watchdog import Watchdog
from ds_slide.runtime.core.settings import RuntimeSettings, UnitPlan
from ds_slide.runtime.core.unit import Empty, Unit
from ds_slide.runtime.engine import SlideRuntime
from ds_slide.runtime.gradients.agreement import Agreement
from ds_slide.runtime.gradients.learning import Learning
from ds_slide.runtime.gradients.route import Gradients
from ds_slide.runtime.gradients.sources import Staging
from ds_slide.runtime.memory.gpu_room import Budget
from ds_slide.runtime.memory.spare_memory import SpareMemory
from ds_slide.runtime.memory.tier_moves import RunningStates
from ds_slide.runtime.parts import Parts
from ds_slide.runtime.ssd.ssd import SsdStates, UnitsOnSsd, open_ssd, provide_buffers, space_for_inputs
from ds_slide.runtime.updates.threads import running_on, update_cores
from ds_slide.runtime.updates.updating import Updating
from ds_slide.runtime.weights.experts import ExpertRing
from ds_slide.runtime.weights.rows import RowBuffers
from ds_slide.runtime.weights.uploads import Gathers, Uploads
from ds_slide.runtime.weights.window import Window
from ds_slide.store.host_memory import HostMemory


@dataclass(frozen=True)
class Blueprint:
    """What an engine is built from. The host framework has divided the model, and the plan fits all budgets."""

    unit_plans: Sequence[UnitPlan]
    plan: Plan
    settings: RuntimeSettings
    ranks: Ranks
    device: Device
    clients: Clients
    sharing: Sharing | None = None
    """The memory files of several ranks that share weights in host memory. They are closed when the weights are mapped,
    and by the caller of `build_runtime` when that fails."""
    cores: Share = field(default_factory=Share.whole)
    """The cores of this rank."""


def build_runtime(module: nn.Module, blueprint: Blueprint) -> SlideRuntime:
    """Build and start a runtime, with its memory and its threads on the memory nodes of this rank's cores. Raises
    SlideError when an allocation fails."""
    pinned = blueprint.settings.slide.cpu_cores == "auto"
    with running_on(blueprint.cores.around) if pinned else nullcontext():
        return _build_here(module, blueprint)


def _build_here(module: nn.Module, blueprint: Blueprint) -> SlideRuntime:
    unit_plans, settings, ranks = blueprint.unit_plans, blueprint.settings, blueprint.ranks
    device, failures = blueprint.device, Failures(Waits(blueprint.device))
    ranks.watched_by(failures)
    device.expand_segments()
    if ranks.world_size > 1:
        ranks.require_equal(_choices(blueprint), "what is to be where")
    conductor, announcements = Conductor.of(ranks), None
    if conductor is not None and settings.trains:
        announcements = open_board(ranks, Agreement.width(len(unit_plans)))
    started = ExitStack()
    ssd: SsdStates | None = None
    try:
        context = _context(blueprint, failures, started)
        ssd = open_ssd(context, unit_plans)
        units = _make_units(context, unit_plans, ssd)
        parts = _parts(module, context, units, ssd)
        parts.announcements = announcements
        context.allocator.require_all_given()
        runtime = SlideRuntime(module, parts)
        if settings.slide.gpu_states == "auto":
            parts.spare.room.states = RunningStates(runtime)
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


def _context(blueprint: Blueprint, failures: Failures, started: ExitStack) -> Context:
    """Make the context. `started`: gets the functions that end the threads, for the caller to use when the rest
    fails."""
    settings, ranks, device = blueprint.settings, blueprint.ranks, blueprint.device
    recorder = StepRecorder(device, failures.traced, _trace(blueprint), rank=ranks.rank)
    memory = HostMemory(page_lock=device.is_cuda, huge_pages=settings.slide.huge_pages)
    shared = None
    if blueprint.sharing is not None:
        shared = SharedWeights(ranks, blueprint.sharing, memory, len(blueprint.unit_plans), failures)
    threads, cores = 0, list[int]()
    if settings.trains:
        threads, cores = update_cores(settings.slide.cpu_threads, settings.slide.cpu_cores, blueprint.cores.cores)
    updater = CpuUpdater(threads, cores, idle=not settings.trains)
    started.callback(updater.end_threads)
    lanes = _make_lanes(blueprint, failures, recorder)
    for lane in (lanes.h2d, lanes.outer_h2d, lanes.d2h, lanes.update, lanes.products, lanes.matrices_d2h):
        started.callback(lane.close)
    return Context(
        plan=blueprint.plan,
        settings=settings,
        clients=blueprint.clients,
        ranks=ranks,
        device=device,
        failures=failures,
        recorder=recorder,
        memory=memory,
        allocator=Allocator(blueprint.plan.allocations, memory, device),
        shared=shared,
        lanes=lanes,
        updater=updater,
        cpu_threads=threads,
    )


def _make_lanes(blueprint: Blueprint, failures: Failures, recorder: StepRecorder) -> Lanes:
    settings, device, meters = blueprint.settings, blueprint.device, recorder.meters
    debug, idle = settings.slide.debug, not settings.trains
    delays = [Delay(debug.lane_delay_ms, debug.seed + number) for number in (0, 1, 2, 3, 6, 7)]
    # Without updates this lane still uploads the chunks of a streamed head.
    outer_idle = idle and not any(unit_plan.chunk_rows for unit_plan in blueprint.unit_plans)
    no_matrices = not isinstance(settings.rule, MuonRule)
    return Lanes(
        h2d=StreamWorker("h2d", device, failures, meters["h2d"], delays[0]),
        outer_h2d=StreamWorker("h2d of outer modules", device, failures, meters[OUTER_H2D], delays[3], idle=outer_idle),
        d2h=StreamWorker("d2h", device, failures, meters["d2h"], delays[1], idle=idle),
        update=UpdateWorker(device, failures, meters["update"], delays[2], idle=idle),
        # Each product waits for the one before. Behind a kernel of the model it would wait for that as well.
        products=StreamWorker("products", device, failures, meters[PRODUCTS], delays[4], idle=no_matrices, first=True),
        matrices_d2h=StreamWorker("d2h of matrices", device, failures, LaneMeter(), delays[5], idle=no_matrices),
    )


def _make_units(context: Context, unit_plans: Sequence[UnitPlan], ssd: SsdStates | None) -> list[Unit]:
    """Make the units and copy the weights into them. The clients then free what the parameters held before."""
    units: list[Unit] = []
    begin_codecs(context, unit_plans)
    on_ssd = UnitsOnSsd() if ssd is None else ssd.units
    progress = tqdm(unit_plans, desc="ds_slide: placing states", disable=None, leave=False)
    for order, unit_plan in enumerate(progress):
        units.append(make_unit(context, unit_plan, order, on_ssd))
        load_weights(units[-1], context)
        context.clients.adopt(units[-1])
    join_parts(units)
    if context.shared is not None:
        context.shared.map_others([unit for unit in units if not unit.is_gathered])
    return units


def _trace(blueprint: Blueprint) -> Trace | None:
    """Return the trace of the steps that the settings choose, with a file for every rank. Without an optimizer there
    are no steps, and the file belongs to the engine that trains with the same JSON."""
    settings, ranks = blueprint.settings, blueprint.ranks
    request = settings.slide.trace.request() if settings.trains else None
    if request is None:
        return None
    names = [unit_plan.spec.name for unit_plan in blueprint.unit_plans]
    lanes = [lane for lane in STREAM_LANES if lane != PRODUCTS or isinstance(settings.rule, MuonRule)]
    return Trace(request.of_rank(ranks.rank, ranks.world_size), names, lanes, blueprint.device)


def _choices(blueprint: Blueprint) -> dict[str, object]:
    """Return the decisions that all ranks must share, because they determine the collectives and their order."""
    plan, settings, placement = blueprint.plan, blueprint.settings, blueprint.plan.placement
    model = repr([(unit.spec.name, unit.spec.precision, unit.layout) for unit in blueprint.unit_plans])
    return {
        "the digest of the model's layout": f"{zlib.crc32(model.encode()):08x}",
        "the units whose states are on the GPU": sorted(placement.on_gpu),
        "the units whose weights are on SSD": sorted(placement.weights_on_ssd),
        "the number of slots": placement.window,
        "the dtype of gradients": str(settings.gradient_dtype),
        "the dtype of held gradients": str(settings.held_dtype),
        "ds_slide.compression": settings.slide.compression,
        "whether a kernel makes Muon's symmetric products": settings.has_muon_kernel,
        "whether masters of compressed matrices are their bf16 weights": plan.needs.rounds_masters,
    }


def _parts(module: nn.Module, context: Context, units: list[Unit], ssd: SsdStates | None) -> Parts:
    """Make the parts, which share the context."""
    ranks, device, failures = context.ranks, context.device, context.failures
    shared, allocator = context.shared, context.allocator
    if ssd is not None:
        provide_buffers(context, ssd)
        context.recorder.watch_ssd(ssd.store)
    # Weights are uploaded into slots of the window, or into buffers that stay on the GPU.
    uploads = Uploads({} if shared is None else shared.parts, _scratch(context, UPLOADED), device, failures)
    streamed = [unit for unit in units if unit.is_streamed]
    window, slots = None, allocator.buffers(SLOTS)
    if streamed:
        ahead = ssd if ssd is not None and ssd.horizon else None
        window = Window(context, streamed, slots, uploads, ahead)
    # Gradients leave the GPU through staging buffers and the pools.
    stagings = make_stagings(allocator, ranks.world_size, failures)
    if ranks.world_size > 1:
        allocator.begun(AVERAGED)
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
        empty=Empty.on(device.torch, {dtype for unit in units for dtype in unit.dtypes}),
        gradients=gradients,
        learning=Learning(units, context),
        uploads=uploads,
        gathers=Gathers(ranks, _scratch(context, GATHERED), all_fit=all_fit),
        updating=updating,
        spare=make_spare_memory(module, context, units, updating),
        ssd=ssd,
        rows=_row_buffers(context, units),
        experts=ExpertRing(context, uploads) if allocator.tier(EXPERTS) is not None else None,
        watchdog=_watchdog(context),
    )


def _scratch(context: Context, what: str) -> torch.Tensor | None:
    """Return a buffer of bytes for the weights of several ranks; None with one rank, or where the plan has none."""
    if context.ranks.world_size == 1:
        return None
    (buffer,) = context.allocator.buffers(what)
    return buffer if buffer.numel() else None


def _watchdog(context: Context) -> Watchdog | None:
    timeout, ranks = context.settings.slide.hang_timeout, context.ranks
    if not timeout:
        return None
    peers = (Peers.of(ranks) or DistantPeers.of(ranks)) if ranks.world_size > 1 else None
    return Watchdog(context.failures, context.device, timeout, context.stores, peers)


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


def make_spare_memory(module: nn.Module, context: Context, units: Sequence[Unit], updating: Updating) -> SpareMemory:
    """Make the spare memory of the engine of `module`."""
    settings, device = context.settings, context.device
    gpu = device if device.is_cuda and settings.trains else None
    limit = settings.slide.gpu_memory if settings.trains else None
    wanted = settings.slide.activations
    blocks = [unit for unit in units if unit.spec.kind == "block" and wanted != "as_written"]
    space = space_for_inputs(context) if blocks and settings.trains else None
    # Ranks that share a sequence recompute the same blocks, so that recomputation stays where the script has put it.
    unasked = () if context.ranks.divides_sequences else may_be_unasked(module, blocks)
    activations = Activations(context, blocks, unasked, space)
    budget = Budget(gpu, limit)
    return SpareMemory(context, activations, budget, updating, _vocabulary(module))


def _vocabulary(module: nn.Module) -> int:
    """Return the number of logits per token of a transformers model's head; 0 for models without a head."""
    outputs = getattr(module, "get_output_embeddings", None)
    head = None if outputs is None else outputs()
    return int(getattr(head, "out_features", 0))
