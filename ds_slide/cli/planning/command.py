"""The options of `ds-slide plan`, and its answer."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from ds_slide.cli.doctor import cache
from ds_slide.cli.planning import output
from ds_slide.cli.planning.model import ModelShape, read_adapter
from ds_slide.cli.planning.planner import Planner, Request
from ds_slide.cli.planning.search import (
    largest_batch,
    largest_model,
    recommended,
    shortage,
    smallest_change,
    without_whole_batch,
)
from ds_slide.config import CONFIG_KEY, parse_bytes
from ds_slide.config.json_types import AUTO
from ds_slide.errors import DoesNotFit, SlideConfigError
from ds_slide.plan.ceilings.figures import Ceilings, read_ceilings
from ds_slide.plan.forecast import Forecast, Room
from ds_slide.report import drawing

LEAST_SIZE = 1 << 20
"""Bytes of memory; a smaller number has lost its unit."""
ELSEWHERE = "h200-16-cores"
"""The ceilings for a GPU that this machine does not have, where no option names others."""


def run(arguments: argparse.Namespace, say: Any) -> int:
    """Answer with `say`, line by line. Return 0 where it fits, 1 where it does not. Raises SlideError for a run that
    cannot be planned."""
    if arguments.plot:
        drawing.require_matplotlib()
    request, notes = _request(arguments)
    planner = Planner()
    request, chosen = with_subspace(planner, request)
    notes += chosen
    if arguments.fit:
        return _fit(planner, request, arguments, notes, say)
    short = shortage(planner, request)
    if short is not None:
        return _refuse(planner, request, short, arguments, say, "ds-slide plan:")
    best, batch, model = planner.steady(request), largest_batch(planner, request), largest_model(planner, request)
    found = {"largest_batch": batch, "largest_model": model}
    _answer(best, planner, request, arguments, notes, say, **found)
    return 0


def _fit(planner: Planner, request: Request, arguments: argparse.Namespace, notes: list[str], say: Any) -> int:
    """Print whether the model fits, the largest batch, and if it does not fit, the smallest change that helps."""
    one = replace(request, batch=request.batch or 1)
    short = shortage(planner, one)
    if short is not None:
        return _refuse(planner, one, short, arguments, say, "It does not fit.")
    largest = largest_batch(planner, request)
    best = recommended(planner, request, largest)
    if not arguments.json:
        say(
            f"It fits. Use a micro-batch of {best.batch}: {best.tokens_per_s:,.0f} tokens/s, {best.time.step_s:.3f} s "
            f"a step; the largest that fits is {largest}."
        )
    recommendation = without_whole_batch(replace(request, batch=best.batch))
    _answer(best, planner, recommendation, arguments, notes, say, largest_batch=largest)
    return 0


def _refuse(
    planner: Planner, request: Request, short: DoesNotFit, arguments: argparse.Namespace, say: Any, begin: str
) -> int:
    change = smallest_change(planner, request, short)
    answer = output.refusal(short, None if change is None else change.sentence)
    say(json.dumps(answer, indent=2) if arguments.json else f"{begin} {answer['message']}")
    return 1


def _answer(
    forecast: Forecast,
    planner: Planner,
    request: Request,
    arguments: argparse.Namespace,
    notes: list[str],
    say: Any,
    **found: Any,
) -> None:
    name = request.shape.name
    notes = [*notes, *planner.planned(request).notes]
    answer = output.as_dict(forecast, model=name, ceilings=request.ceilings.source, notes=notes, **found)
    if arguments.json:
        say(json.dumps(answer, indent=2))
    else:
        for line in output.as_text(answer, name):
            say(line)
    if arguments.plot:
        drawing.write(output.picture(answer, name), arguments.plot)


def _request(arguments: argparse.Namespace) -> tuple[Request, list[str]]:
    """Return the request of the options, and notes on what was assumed."""
    try:
        raw = json.loads(Path(arguments.deepspeed_config).read_text(encoding="utf-8"))
    except OSError as error:
        raise SlideConfigError(
            f"--deepspeed_config {arguments.deepspeed_config} cannot be read ({error.strerror})"
        ) from error
    except ValueError as error:
        raise SlideConfigError(f"--deepspeed_config {arguments.deepspeed_config} is not JSON ({error})") from error
    if not isinstance(raw, dict):
        raise SlideConfigError(f"--deepspeed_config {arguments.deepspeed_config} holds no object")
    # The room: options first, and then the memory of the machine with the ceilings.
    ceilings, notes = _ceilings(arguments)
    sizes = {name: _size(arguments, name) for name in ("gpu_memory", "host_memory", "nvme_memory")}
    gpu = sizes["gpu_memory"]
    if gpu is None and ceilings.gpu is not None:
        gpu = ceilings.gpu.memory_bytes
    process, host = ceilings.process_of(on_gpu=gpu is not None), sizes["host_memory"] or ceilings.cpu.memory_bytes
    room = Room(gpu, host, sizes["nvme_memory"], arguments.ranks, process)
    # Notes on what the forecast leaves out.
    if gpu is not None:
        notes.append(
            "the host's time is not forecast, beyond a floor: a step of a small model may be forecast up to 20 % short"
        )
    if arguments.ranks > 1:
        notes.append("collectives between ranks are not timed, and NCCL's own memory is not counted")
    if room.gpu is not None and ceilings.gpu is not None and room.ranks > 1:
        notes.append("the updates' rate and the memory of the host are shared between the ranks")
        cpu = ceilings.cpu.model_copy(update={"update_gb_s": ceilings.cpu.update_gb_s / room.ranks})
        ceilings = ceilings.model_copy(update={"cpu": cpu})
    shape = ModelShape.named(arguments.model)
    if arguments.adapter is not None:
        shape = replace(shape, adapter=read_adapter(arguments.adapter))
    positions = getattr(shape.config, "max_position_embeddings", None)
    if positions is not None and arguments.seq > positions:
        notes.append(f"the model's config.json has {positions:,} positions, and the sequence {arguments.seq:,} tokens")
    return Request(shape, raw, arguments.batch, arguments.seq, room, ceilings, not arguments.no_checkpointing), notes


def _size(arguments: argparse.Namespace, name: str) -> int | None:
    """Return the bytes of an option; None where it is not given."""
    text, option = getattr(arguments, name), f"--{name.replace('_', '-')}"
    if text is None:
        return None
    nbytes = parse_bytes(text, option)
    if nbytes < LEAST_SIZE:
        raise SlideConfigError(f'{option} is {text}, which is {nbytes} bytes; give it with a unit, such as "24GiB"')
    return nbytes


def _ceilings(arguments: argparse.Namespace) -> tuple[Ceilings, list[str]]:
    if arguments.ceilings is not None:
        return read_ceilings(arguments.ceilings), []
    here = cache.of_this_machine()
    if here.gpu is not None or arguments.gpu_memory is None:
        return here, []
    note = f"this machine has no GPU, so times are those of the ceilings {ELSEWHERE}; give --ceilings for another one"
    return read_ceilings(ELSEWHERE), [note]


# ----------------------------------------------------------------------------------------------------------------------
# The subspace of compressed gradients that `"d": "auto"` stands for: the largest whose work is still hidden.

STEP = 64
"""d is a multiple of this number: rows have whole cache lines."""
HIDDEN = 1.02
"""Factor on the GPU's computing time: transfers and updates of a step that takes no longer are hidden. Where not even
the smallest d hides them (a vocabulary matrix on a slow link), the factor applies to the step with the smallest d."""


def with_subspace(planner: Planner, request: Request) -> tuple[Request, list[str]]:
    """Return the request with a number in the place of `"d": "auto"`, and a sentence that names the number; a request
    without "auto" is unchanged. Raises what `Planner.steady` raises."""
    compression: Any = request.raw.get(CONFIG_KEY, {}).get("compression")
    if not isinstance(compression, dict) or compression.get("d", AUTO) != AUTO:
        return request, []

    def with_d(d: int) -> Request:
        return request.with_block(compression={**compression, "d": d})

    def hides(d: int) -> bool:
        time = planner.steady(with_d(d)).time
        return time.step_s <= HIDDEN * max(time.lanes["compute"], least)

    low, high = STEP, _most(planner, with_d(STEP))
    least = planner.steady(with_d(low)).time.step_s
    if hides(high):
        low = high
    while high - low > STEP:  # the work to hide grows with d
        middle = (low + high) // 2 // STEP * STEP
        low, high = (middle, high) if hides(middle) else (low, middle)
    note = f'ds_slide.compression.d is "auto" and taken for {low}, the largest that hides at this batch; write it'
    return with_d(low), [note]


def _most(planner: Planner, request: Request) -> int:
    """Return half of the smaller side of the largest compressed matrix, as a multiple of `STEP`."""
    plans = [unit for unit in planner.planned(request).unit_plans if unit.spec.compressed]
    side = max(min(entry.shape) for unit in plans for entry in unit.layout.entries)
    return max(STEP, side // 2 // STEP * STEP)
