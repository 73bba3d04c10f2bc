"""Records of `step.py` as table, JSON lines and Markdown page."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

Record = dict[str, Any]

_SHAPE = ("model", "optimizer", "batch", "seq", "grad_accum", "checkpointing", "seed", "offload")


def baseline(records: Iterable[Record], system: str, record: Record) -> Record | None:
    """The finished row of `system` on the same shape, with the same limits if there is one.

    Stock must have had the same GPU limit. GPU-only is a bound rather than a rival, and may have had the whole card.
    """
    wanted = record["setting"]

    def distance(other: Record) -> tuple[bool, bool]:
        setting = other["setting"]
        return setting["gpu_fraction"] != wanted["gpu_fraction"], setting["clip"] != wanted["clip"]

    candidates = [
        other
        for other in records
        if other["status"] == "ok"
        and other["setting"]["system"] == system
        and not other["setting"]["patch"]
        and all(other["setting"][key] == wanted[key] for key in _SHAPE)
        and (system == "gpu-only" or other["setting"]["gpu_fraction"] == wanted["gpu_fraction"])
    ]
    return min(candidates, key=distance, default=None)


def without_kernels(records: Iterable[Record], record: Record) -> Record | None:
    """The finished row of the same system with everything alike, but with Hugging Face's own modules."""

    def alike(other: Record) -> bool:
        here, there = record["setting"], other["setting"]
        compared = ("system", "clip", "gpu_fraction", "lr", "distinct_batches", *_SHAPE)
        return all(here[key] == there[key] for key in compared)

    def plain(other: Record) -> bool:
        setting = other["setting"]
        return not setting["patch"] and (setting["system"] != "slide" or setting["slide"].get("kernels") == "off")

    found = (other for other in records if other["status"] == "ok" and plain(other) and alike(other))
    return next((other for other in found if other is not record), None) if not plain(record) else None


def speed_ratio(record: Record, other: Record | None) -> float | None:
    """Tokens/s of `record` over those of `other`."""
    return record["tokens_per_s"] / other["tokens_per_s"] if other and record["status"] == "ok" else None


def loss_difference(record: Record, stock: Record | None) -> float | None:
    """Largest relative difference of a step's loss from stock's; None unless both clip alike from the same weights."""
    if record["status"] != "ok" or stock is None or record is stock:
        return None
    if any(record["setting"][key] != stock["setting"][key] for key in ("clip", "lr", "distinct_batches")):
        return None
    pairs = zip(record["losses"], stock["losses"], strict=False)
    return max(abs(ours - theirs) / abs(theirs) for ours, theirs in pairs)


def number(value: float | None, form: str, scale: float = 1.0) -> str:
    """Nothing for None."""
    return "" if value is None else format(value / scale, form)


def _gpu_limit(record: Record) -> str:
    fraction = record["setting"]["gpu_fraction"]
    return "" if fraction >= 1 else f"{fraction:.1%}"


def _batch(record: Record) -> str:
    setting = record["setting"]
    accumulated = f" x {setting['grad_accum']}" if setting["grad_accum"] > 1 else ""
    return f"{setting['batch']} x {setting['seq']}{accumulated}"


def _extras(record: Record) -> str:
    setting = record["setting"]
    named = [f"{key} {value}" for kind in ("slide", "aio", "zero") for key, value in setting[kind].items()]
    patch = [f"patch {setting['patch']}"] if setting["patch"] else []
    if setting["optimizer"] != "adamw":
        changed = [f"{key} {value}" for key, value in setting["optimizer_params"].items()]
        named = [setting["optimizer"], *changed, *named]
    return ", ".join([*([] if setting["offload"] == "cpu" else [setting["offload"]]), *patch, *named])


def _ceiling(record: Record) -> str:
    if "ssd_ceiling" not in record:
        return ""
    return " / ".join(f"{found['gb_s']:.2f}" for found in record["ssd_ceiling"].values())


def _bytes(record: Record, counter: str) -> str:
    names = [f"{counter}_{way}_bytes_per_parameter" for way in ("read", "written")]
    return " + ".join(f"{record[name]:.1f}" for name in names) if names[0] in record else ""


Cell = Callable[[Record, list[Record]], str]
COLUMNS: dict[str, Cell] = {
    "system": lambda r, _: r["setting"]["system"],
    "model": lambda r, _: r["setting"]["model"],
    "batch": lambda r, _: _batch(r),
    "clip": lambda r, _: f"{r['setting']['clip']:g}",
    "GPU limit": lambda r, _: _gpu_limit(r),
    "settings": lambda r, _: _extras(r),
    "s/step": lambda r, _: number(r.get("step_s"), ".3f"),
    "forward": lambda r, _: number(r.get("forward_phase_s"), ".3f"),
    "backward": lambda r, _: number(r.get("backward_phase_s"), ".3f"),
    "step()": lambda r, _: number(r.get("step_phase_s"), ".3f"),
    "tokens/s": lambda r, _: number(r.get("tokens_per_s"), ",.0f"),
    "x stock": lambda r, rs: number(speed_ratio(r, baseline(rs, "stock", r)), ".2f"),
    "x GPU-only": lambda r, rs: number(speed_ratio(r, baseline(rs, "gpu-only", r)), ".3f"),
    "x no kernels": lambda r, rs: number(speed_ratio(r, without_kernels(rs, r)), ".3f"),
    "bound": lambda r, _: f"{r['bound_s']:.3f} {r['bound_lane']}" if "bound_s" in r else "",
    "SSD B/param": lambda r, _: _bytes(r, "ssd"),
    "by the OS": lambda r, _: _bytes(r, "os"),
    "SSD GB/s": lambda r, _: _ceiling(r),
    "SSD bound s": lambda r, _: number(r.get("ssd_bound_s"), ".3f"),
    "step / SSD bound": lambda r, _: number(r.get("step_over_ssd_bound"), ".3f"),
    "GPU peak GB": lambda r, _: number(r.get("gpu_peak_allocated_bytes"), ".1f", 1e9),
    "reserved GB": lambda r, _: number(r.get("gpu_peak_reserved_bytes"), ".1f", 1e9),
    "host peak GB": lambda r, _: number(r.get("host_peak_bytes"), ".1f", 1e9),
    "host B/param": lambda r, _: number(r.get("host_peak_per_parameter"), ".2f"),
    "engine B/param": lambda r, _: number(r.get("host_engine_bytes_per_parameter"), ".2f"),
    "init s": lambda r, _: number(r.get("init_s"), ".1f"),
    "loss": lambda r, _: f"{r['losses'][0]:.4f} -> {r['losses'][-1]:.4f}" if r.get("losses") else "",
    "loss vs stock": lambda r, rs: number(loss_difference(r, baseline(rs, "stock", r)), ".1e"),
    "loss vs no kernels": lambda r, rs: number(loss_difference(r, without_kernels(rs, r)), ".1e"),
    "what went wrong": lambda r, _: f"{r['status']}: {r['error']}" if "error" in r else "",
}

LEGEND = """\
* s/step: median time from the end of one step to the end of the next, with the loss read on the host after every step.
* forward, backward, step(): time on the GPU's stream between the calls; work deferred into the next forward is there.
* x stock, x GPU-only: tokens/s over those of that system on this page, with the same clipping if it is there.
* GPU-only: weights, gradients and AdamW states in bf16, torch's fused AdamW: less work than with fp32 states.
* SSD B/param: bytes read + written per parameter and step, by the engine's own count; by the OS: the same from
  /proc/self/io, the count that stock has too. SSD GB/s: the disk's mixed bandwidth, O_DIRECT, 32 requests of 2 MiB,
  right before the engine started / right after it ended. SSD bound: bytes (the engine's count, else the OS's) over the
  mean of the two; or over the second alone, where it was measured for 12 s on the engine's own state file (from 8 GiB
  on): a disk that has rested, and a file that has just been filled, can be faster for a second.
* bound: the busiest lane as the engine itself reports it, median over the timed steps.
* GPU peak: torch's allocated bytes while training; reserved: what its allocator held. host peak: VmHWM while training,
  the Python process and CUDA included; engine B/param: the same above the process as it was before the engine was made.
* loss: first warm-up step to last timed step; loss vs stock: largest relative difference of any step, same clipping.
* patch: kernels put into the model before the system sees it (`ours`, `liger`); "kernels auto" or "off" under settings
  is the engine's own key. x no kernels, loss vs no kernels: against the row of the same system with Hugging Face's own
  modules."""


def rows(records: list[Record]) -> list[list[str]]:
    """Header and one row per record; columns that are empty everywhere are left out."""
    # A system that measured something and then ended badly has no result: its figures stay in the records only.
    shown = [
        record if record["status"] == "ok" else {key: record[key] for key in ("setting", "status", "error")}
        for record in records
    ]
    return used([list(COLUMNS), *([cell(record, shown) for cell in COLUMNS.values()] for record in shown)])


def used(table: list[list[str]]) -> list[list[str]]:
    """The table without the columns that are empty below their title."""
    kept = [index for index in range(len(table[0])) if any(row[index] for row in table[1:])]
    return [[row[index] for index in kept] for row in table]


def plain(table: list[list[str]]) -> str:
    widths = [max(len(row[index]) for row in table) for index in range(len(table[0]) - 1)]
    return "\n".join(
        "  ".join([*(cell.rjust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]).rstrip()
        for row in table
    )


def markdown_table(table: list[list[str]]) -> str:
    def line(row: list[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"

    return "\n".join([line(table[0]), "|" + " --- |" * len(table[0]), *(line(row) for row in table[1:])])


def json_lines(records: Iterable[Record]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def markdown_page(
    title: str, facts: dict[str, str], ceilings: Record | None, command: str, records: list[Record]
) -> str:
    """The dated page: machine, versions, ceilings, the table, and the exact commands."""
    parts = [f"# {title}", "\n".join(f"* {name}: {value}" for name, value in facts.items())]
    if ceilings and (gpu := ceilings["gpu"]):
        parts.append(
            "Ceilings measured in this run: "
            f"bf16 GEMM 8192^3 {gpu['product_tflop_s']['8192x8192x8192']:.0f} TFLOP/s; page-locked H2D "
            f"{gpu['h2d_gb_s']:.1f} GB/s, D2H {gpu['d2h_gb_s']:.1f} GB/s, both at once {gpu['both_ways_gb_s']:.1f} "
            f"GB/s each way; device copy {gpu['copy_gb_s']:.0f} GB/s (read + write)."
        )
    parts += [markdown_table(rows(records)), LEGEND]
    commands = "\n".join(record["command"] for record in records)
    parts.append(f"Run with\n\n```\n{command}\n```\n\nwhich is, row by row,\n\n```\n{commands}\n```")
    return "\n\n".join(parts) + "\n"
