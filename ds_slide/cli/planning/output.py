"""The answer of `ds-slide plan` as a JSON object, as text and as a picture."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ds_slide.config import format_bytes
from ds_slide.errors import DoesNotFit
from ds_slide.plan.forecast import Forecast
from ds_slide.report import drawing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SCHEMA = 1
"""Version of the JSON; a later version has other names or meanings."""
TIERS = {"gpu": "GPU", "host": "host", "ssd": "SSD"}


def as_dict(forecast: Forecast, **found: Any) -> dict[str, Any]:
    """Return the JSON object of a forecast. `found`: results of further searches, by their names in the answer."""
    time, plan, room, first = forecast.time, forecast.plan.report(), forecast.room, forecast.first or forecast
    return {
        "schema": SCHEMA,
        "fits": True,
        "parameters": plan["parameters"],
        "batch": forecast.batch,
        "seq": forecast.seq,
        "micro_batches": forecast.micro_batches,
        "ranks": room.ranks,
        "tiers": {
            "gpu": _tier(forecast.gpu, room.gpu),
            "host": _tier(forecast.host, room.host),
            "ssd": _tier(forecast.ssd, room.ssd),
        },
        "memory": plan,
        "gpu_peak_allocated_bytes": forecast.gpu_peak_allocated,
        "decided": _decided(forecast),
        "first_steps": {
            "schedule": first.time.schedule,
            "step_s": first.time.step_s,
            "gpu_peak_allocated_bytes": first.gpu_peak_allocated,
        },
        "schedule": time.schedule,
        "schedule_why": time.why,
        "below_limit": {"schedule": forecast.below_limit.schedule, "step_s": forecast.below_limit.step_s},
        "schedules": {name: each.step_s for name, each in forecast.schedules.items()},
        "lanes": dict(time.lanes),
        "forward_s": time.forward_s,
        "backward_s": time.backward_s,
        "step_s": time.step_s,
        "bound_lane": time.bound_lane,
        "bound_s": time.bound_s,
        "tokens_per_s": forecast.tokens_per_s,
        "ssd_read_bytes_a_step": time.ssd_read,
        "ssd_written_bytes_a_step": time.ssd_written,
        "ssd_written_bytes_a_day": forecast.ssd_written_a_day,
        **found,
    }


def _decided(forecast: Forecast) -> dict[str, int]:
    """Return the decisions about spare GPU memory as numbers of blocks, and of moved units (with outer modules)."""
    placement, activations = forecast.plan.placement, forecast.activations
    blocks = {index for index, unit in enumerate(forecast.plan.units) if unit.kind == "block"}
    checkpointed, kept, mixed = map(len, (activations.checkpointed, activations.kept.whole, activations.kept.mixed))
    return {
        "blocks": len(blocks),
        "blocks_with_states_on_gpu": len(blocks & (placement.on_gpu | placement.promoted)),
        "promoted_units": len(placement.promoted),
        "summed_units": len(placement.summed),
        "checkpointed": checkpointed,
        "kept": kept,
        "mixed": mixed,
        "recomputed": checkpointed - kept - mixed,
        "kept_bytes": activations.kept_bytes,
        "moved_inputs": len(activations.moved),
        "moved_input_bytes": activations.moved_bytes,
        "inputs_on_ssd": len(activations.on_ssd),
        "input_bytes_on_ssd": activations.on_ssd_bytes,
    }


def refusal(short: DoesNotFit, change: str | None) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "fits": False,
        "tier": short.tier,
        "needed": short.needed,
        "available": short.available,
        "short": short.needed - short.available,
        "change": change,
        "message": sentence(short, change),
    }


def sentence(short: DoesNotFit, change: str | None) -> str:
    """Return the sentence that says what is short where, and what makes it fit."""
    missing = short.needed - short.available
    return (
        f"{TIERS[short.tier]} tier: the run needs {format_bytes(short.needed)}, but {format_bytes(short.available)} "
        f"are there, {format_bytes(missing)} short; {change or 'no change of the JSON or the batch makes it fit'}"
    )


def _tier(entries: Mapping[str, int], available: int | None) -> dict[str, Any]:
    return {"needed": sum(entries.values()), "available": available, "entries": dict(entries)}


def as_text(answer: Mapping[str, Any], name: str) -> Iterator[str]:
    """Yield the lines of an answer that fits. `name`: the model's name."""
    ranks = f" on each of {answer['ranks']} ranks" if answer["ranks"] > 1 else ""
    times = f", {answer['micro_batches']} micro-batches a step" if answer["micro_batches"] > 1 else ""
    yield f"{name}, {answer['parameters']:,} parameters: {answer['batch']} x {answer['seq']} tokens{ranks}{times}"
    yield ""
    yield from _table(("tier", "needed", "there", ""), _tier_rows(answer["tiers"]))
    yield ""
    rows = [
        (lane, _seconds(seconds), f"{seconds / answer['step_s']:.0%}", _bar(seconds / answer["step_s"]))
        for lane, seconds in answer["lanes"].items()
        if seconds
    ]
    yield from _table(("lane", "busy a step", "of it", ""), rows)
    yield ""
    yield (
        f"step      {_seconds(answer['step_s'])} (forward {_seconds(answer['forward_s'])}, backward "
        f"{_seconds(answer['backward_s'])}), {answer['tokens_per_s']:,.0f} tokens/s"
    )
    yield f"bound     {answer['bound_lane']}, {_seconds(answer['bound_s'])}: the least that a step could take"
    yield from _decisions(answer)
    if answer["ssd_written_bytes_a_step"]:
        yield f"SSD       {format_bytes(int(answer['ssd_written_bytes_a_day']))} written in a day"
    if "largest_model" in answer:
        yield f"largest   batch {answer['largest_batch']} of {answer['seq']} tokens; {_largest_model(answer)}"
    for note in answer.get("notes", ()):
        yield f"note      {note}"


def _decisions(answer: Mapping[str, Any]) -> Iterator[str]:
    decided, first, calm = answer["decided"], answer["first_steps"], answer["below_limit"]
    there, moved = decided["blocks_with_states_on_gpu"], decided["promoted_units"]
    units = f" ({moved} units move there after the first steps)" if moved else ""
    yield f"states    of {there} of {decided['blocks']} blocks on the GPU{units}"
    if summed := decided["summed_units"]:
        yield f"sums      of the gradients of {summed} units are made on the GPU, after the first steps"
    if rounded := answer["memory"]["rounded_masters"]:
        yield f"masters   of {rounded:,} parameters in bf16, rounded stochastically"
    if decided["checkpointed"]:
        kept, mixed, recomputed = decided["kept"], decided["mixed"], decided["recomputed"]
        parts = f" and {mixed} a part of them" if mixed else ""
        yield f"blocks    {kept} checkpointed blocks keep their activations{parts}, {recomputed} are recomputed"
    if inputs := decided["moved_inputs"]:
        nbytes = format_bytes(decided["moved_input_bytes"])
        on_ssd, where = decided["inputs_on_ssd"], "in host memory"
        if on_ssd:
            gone = f"on SSD ({format_bytes(decided['input_bytes_on_ssd'])})"
            where = gone if on_ssd == inputs else f"in host memory, of the first {on_ssd} {gone},"
        yield f"inputs    of {inputs} blocks wait {where} from their forward until their backward ({nbytes})"
    yield f"updates   {answer['schedule']}: {answer['schedule_why']}"
    if calm["schedule"] != answer["schedule"]:
        yield f"calm      {_seconds(calm['step_s'])} while norms stay below the limit; updates: {calm['schedule']}"
    if moved or summed or decided["kept"] or decided["mixed"]:
        yield f"first     {_seconds(first['step_s'])} a step, until that is decided; updates: {first['schedule']}"


def _largest_model(answer: Mapping[str, Any]) -> str:
    found = answer["largest_model"] or "none"
    return f"largest preset of its kind that fits with batch {answer['batch']}: {found}"


def _tier_rows(tiers: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    for tier, found in tiers.items():
        if not found["needed"]:
            continue
        there = "" if found["available"] is None else format_bytes(found["available"])
        share = "" if found["available"] is None else _bar(found["needed"] / found["available"])
        yield TIERS[tier], format_bytes(found["needed"]), there, share
        if len(found["entries"]) > 1:
            for what, nbytes in found["entries"].items():
                yield f"  {what}", format_bytes(nbytes), "", ""


def _bar(share: float, width: int = 20) -> str:
    return "#" * round(min(share, 1.0) * width)


def _seconds(seconds: float) -> str:
    return f"{seconds:.3f} s" if seconds >= 0.1 else f"{1e3 * seconds:.1f} ms"


def _table(head: Sequence[str], rows: Iterator[tuple[str, ...]] | Sequence[tuple[str, ...]]) -> Iterator[str]:
    lines = [tuple(head), *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    for line in lines:
        first, *numbers, last = zip(line, widths, strict=True)
        cells = [first[0].ljust(first[1]), *(text.rjust(width) for text, width in numbers), last[0]]
        yield "  ".join(cells).rstrip()


def picture(answer: Mapping[str, Any], name: str) -> Figure:
    """Draw what every tier holds, and how long every lane is busy."""
    figure = drawing.new_figure(9, 5)
    tiers, lanes = figure.subplots(2, 1)
    for tier, found in answer["tiers"].items():
        left = 0.0
        for what, nbytes in found["entries"].items():
            if nbytes:
                tiers.barh(tier, nbytes / 1e9, left=left, edgecolor="white")
                tiers.text(left + nbytes / 2e9, tier, what, ha="center", va="center", fontsize=7)
                left += nbytes / 1e9
        if found["available"]:
            tiers.plot([found["available"] / 1e9] * 2, [tier, tier], "k|", markersize=28)
    tiers.set_xlabel("GB; a black line: what is there")
    tiers.invert_yaxis()
    busy = {lane: seconds for lane, seconds in answer["lanes"].items() if seconds}
    lanes.barh(list(busy), list(busy.values()))
    lanes.axvline(answer["step_s"], color="black")
    lanes.set_xlabel(f"busy seconds of a step; the line: the step, {answer['step_s']:.3f} s")
    lanes.invert_yaxis()
    figure.suptitle(f"{name}, {answer['batch']} x {answer['seq']} tokens")
    return figure
