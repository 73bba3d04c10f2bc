"""Builds the objects that divide spare GPU memory, and the objects that handle activations."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

from ds_slide.plan.host_room import host_room, local_ranks
from ds_slide.plan.memory import SPARE_HOST_SHARE
from ds_slide.report.statistics import INPUTS, LaneMeter
from ds_slide.runtime.activations.activations import Activations
from ds_slide.runtime.activations.checkpointing import may_be_unasked
from ds_slide.runtime.activations.input_buffers import BETWEEN, InputBuffers
from ds_slide.runtime.activations.input_disk import InputDisk
from ds_slide.runtime.activations.moved_inputs import MovedInputs
from ds_slide.runtime.build_ssd import space_for_inputs
from ds_slide.runtime.core import running
from ds_slide.runtime.core.context import Context
from ds_slide.runtime.core.stream_lane import Delay, StreamWorker
from ds_slide.runtime.core.unit import Unit
from ds_slide.runtime.memory.spare_memory import Budget, SpareMemory
from ds_slide.runtime.updates.updating import Updating


def make_spare_memory(module: nn.Module, context: Context, units: Sequence[Unit], updating: Updating) -> SpareMemory:
    """Make the spare memory of the engine of `module`."""
    settings, device = context.settings, context.device
    gpu = device if device.is_cuda and settings.trains else None
    limit = settings.slide.gpu_memory if settings.trains else None
    wanted = settings.slide.activations
    blocks = [unit for unit in units if unit.spec.kind == "block" and wanted != "as_written"]
    moved = _moved_inputs(context) if blocks and settings.trains else None
    activations = Activations(blocks, device, may_be_unasked(module, blocks), moved, mixes=wanted == "auto")
    budget = Budget(gpu, limit, running.on_gpu)
    return SpareMemory(activations, budget, context.ranks, context.recorder, updating, _vocabulary(module))


def _vocabulary(module: nn.Module) -> int:
    """Return the number of logits per token of a transformers model's head; 0 for models without a head."""
    outputs = getattr(module, "get_output_embeddings", None)
    head = None if outputs is None else outputs()
    return int(getattr(head, "out_features", 0))


def _moved_inputs(context: Context) -> MovedInputs:
    device, failures, recorder, debug = context.device, context.failures, context.recorder, context.settings.slide.debug
    memory, pools, delay = context.memory, context.allocator.pools, Delay(debug.lane_delay_ms, debug.seed + 5)
    return MovedInputs(
        InputBuffers(memory, _host_room(context.settings.slide.host_memory), pools, failures),
        lambda: StreamWorker(INPUTS, device, failures, recorder.meters[INPUTS], delay),
        device,
        failures,
        recorder,
        _input_disk(context),
    )


def _input_disk(context: Context) -> InputDisk | None:
    """Make the transfer of inputs to SSD and back; None where nothing may go there."""
    device, failures, debug = context.device, context.failures, context.settings.slide.debug
    if (space := space_for_inputs(context)) is None:
        return None
    delay = Delay(debug.lane_delay_ms, debug.seed + 6)
    return InputDisk(
        # Like all buffers in front of the disk, they are not part of the memory that `ds_slide.host_memory` limits.
        InputBuffers(context.memory, _host_room(None), context.allocator.pools, failures, BETWEEN),
        space,
        lambda: StreamWorker("inputs on SSD", device, failures, LaneMeter(), delay),
        device,
        failures,
        context.recorder.requests,
    )


def _host_room(limit: int | None) -> Callable[[], int]:
    """Return a function for the bytes of host memory that may still be taken. `limit`: the value of
    `ds_slide.host_memory`."""

    def room() -> int:
        free = host_room(local_ranks(), running.untouched_host_bytes()).nbytes * SPARE_HOST_SHARE
        return max(0, int(free if limit is None else min(free, limit - running.taken().host_states)))

    return room
