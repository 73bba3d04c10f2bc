"""The options of `ds-slide plan`, and its answer."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from ds_slide.cli.doctor.ceilings import of_this_machine
from ds_slide.cli.planning import output
from ds_slide.cli.planning.model import ModelShape, read_adapter
from ds_slide.cli.planning.planner import Planner, Request
from ds_slide.cli.planning.search import (
    largest_batch,
    largest_model,
    recommended,
    shortage,
    smallest_change,
    with_subspace,
    without_whole_batch,
)
from ds_slide.config import parse_bytes
from ds_slide.errors import SlideConfigError
from ds_slide.plan.ceilings import Ceilings, read_ceilings
from ds_slide.plan.forecast import Room
from ds_slide.report import drawing

ELSEWHERE = "h200-16-cores"
"""The ceilings for a GPU that this machine does not have, where no option names others."""

WIDENED = (
    "packed weights are taken to be widened to bf16 for each product, by a kernel at the memory's pace; fused "
    "experts stay in bf16, except with nf4-experts"
)


def run(arguments: argparse.Namespace, lines: list[str]) -> int:
    """Append the answer to `lines`. Return 0 where it fits, 1 where it does not. Raises SlideError for a run that
    cannot be planned."""
    if arguments.plot:
        drawing.require_matplotlib()
    request, notes = _request(arguments)
    planner = Planner()
    request, chosen = with_subspace(planner, request)
    asked = replace(request, batch=request.batch or 1) if arguments.fit else request
    short = shortage(planner, asked)
    if short is not None:
        refusal = output.refusal(short, smallest_change(planner, asked, short))
        begin = "It does not fit." if arguments.fit else "ds-slide plan:"
        lines.append(json.dumps(refusal, indent=2) if arguments.json else f"{begin} {refusal['message']}")
        return 1
    found: dict[str, Any]
    if arguments.fit:
        largest = largest_batch(planner, request)
        best = recommended(planner, request, largest)
        request, found = without_whole_batch(replace(request, batch=best.batch)), {"largest_batch": largest}
        if not arguments.json:
            lines.append(
                f"It fits. Use a micro-batch of {best.batch}: {best.tokens_per_s:,.0f} tokens/s, "
                f"{best.time.step_s:.3f} s a step; the largest that fits is {largest}."
            )
    else:
        best = planner.steady(request)
        found = {"largest_batch": largest_batch(planner, request), "largest_model": largest_model(planner, request)}
    name, notes = request.shape.name, [*notes, *chosen, *planner.planned(request).notes]
    answer = output.as_dict(best, model=name, ceilings=request.ceilings.source, notes=notes, **found)
    lines += [json.dumps(answer, indent=2)] if arguments.json else output.as_text(answer, name)
    if arguments.plot:
        drawing.write(output.picture(answer, name), arguments.plot)
    return 0


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
        notes.append(_of_ranks(ceilings, room.ranks))
        ceilings = ceilings.of_rank(room.ranks)
    shape = ModelShape.named(arguments.model)
    if arguments.adapter is not None:
        shape = replace(shape, adapter=read_adapter(arguments.adapter))
    if arguments.quantization != "none":
        if shape.adapter is None:
            raise SlideConfigError(
                f"--quantization {arguments.quantization} packs weights, which are frozen then; name with --lora what "
                "trains beside them"
            )
        shape = replace(shape, quantization=arguments.quantization)
        notes.append(WIDENED)
    positions = getattr(shape.config, "max_position_embeddings", None)
    if positions is not None and arguments.seq > positions:
        notes.append(f"the model's config.json has {positions:,} positions, and the sequence {arguments.seq:,} tokens")
    return Request(shape, raw, arguments.batch, arguments.seq, room, ceilings, not arguments.no_checkpointing), notes


def _of_ranks(ceilings: Ceilings, ranks: int) -> str:
    """Return the note on the rates that each of several ranks has."""
    if ceilings.measured(ranks) is not None:
        return f"copies, updates and disks have the rates of the slowest of {ranks} ranks that were measured at once"
    return (
        f"the rates of the processor, host memory and disks are divided by {ranks} ranks, and those of copies to GPUs "
        f"are not; `ds-slide doctor --ranks {ranks}` measures what they share"
    )


def _size(arguments: argparse.Namespace, name: str) -> int | None:
    """Return the bytes of an option; None where it is not given."""
    text, option = getattr(arguments, name), f"--{name.replace('_', '-')}"
    if text is None:
        return None
    nbytes = parse_bytes(text, option)
    if nbytes < 1 << 20:  # a smaller number has lost its unit
        raise SlideConfigError(f'{option} is {text}, which is {nbytes} bytes; give it with a unit, such as "24GiB"')
    return nbytes


def _ceilings(arguments: argparse.Namespace) -> tuple[Ceilings, list[str]]:
    if arguments.ceilings is not None:
        return read_ceilings(arguments.ceilings), []
    here, _ = of_this_machine()
    if here.gpu is not None or arguments.gpu_memory is None:
        return here, []
    note = f"this machine has no GPU, so times are those of the ceilings {ELSEWHERE}; give --ceilings for another one"
    return read_ceilings(ELSEWHERE), [note]
