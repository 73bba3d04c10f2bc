"""Rows of `kernel_speed.py` as table, summary and Markdown page."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from page import number, used

OURS, COPY, GEMMS = "ours", "copy", "GEMMs"
# These are no rivals: the first is the wall that a copy of the same bytes hits, the second the bare matrix products.
YARDSTICKS = (COPY, GEMMS)
SLOWER_ALLOWED = 1.05
# Beyond any rounding: a system that is this far off computes something else, and its time is no measure.
WRONG = 0.1


@dataclass
class Row:
    """One system on one shape in one mode; None where it did not run, `note` then says why."""

    kernel: str
    shape: str
    mode: str
    system: str
    ms: float | None = None
    ms_min: float | None = None
    ms_max: float | None = None
    host_ms: float | None = None
    rounds: int = 0
    over_ours: float | None = None
    """Its time over ours: median over the rounds of the ratio within a round."""
    gb_s: float | None = None
    share_of_copy: float | None = None
    share_of_same_copy: float | None = None
    tflop_s: float | None = None
    share_of_gemms: float | None = None
    peak_bytes: int | None = None
    beyond_results_bytes: int | None = None
    max_error: float | None = None
    l2_error: float | None = None
    errors: dict[str, Any] = field(default_factory=dict)
    compile_s: float | None = None
    note: str = ""

    def is_wrong(self) -> bool:
        """Whether its results are, NaN included."""
        return self.max_error is not None and not self.max_error < WRONG


COLUMNS = {
    "shape": lambda row: row.shape,
    "mode": lambda row: row.mode,
    "system": lambda row: row.system,
    "ms": lambda row: number(row.ms, ".4f" if (row.ms or 0) < 1 else ".3f"),
    "x ours": lambda row: number(row.over_ours, ".3f"),
    "GB/s": lambda row: number(row.gb_s, ",.0f"),
    "of copy": lambda row: number(row.share_of_copy, ".3f"),
    "of same copy": lambda row: number(row.share_of_same_copy, ".3f"),
    "TFLOP/s": lambda row: number(row.tflop_s, ".0f"),
    "of GEMMs": lambda row: number(row.share_of_gemms, ".3f"),
    "peak MB": lambda row: number(row.peak_bytes, ",.1f", 1e6),
    "beyond results MB": lambda row: number(row.beyond_results_bytes, ",.1f", 1e6),
    "max error": lambda row: number(row.max_error, ".1e"),
    "L2 error": lambda row: number(row.l2_error, ".1e"),
    "host ms": lambda row: number(row.host_ms, ".3f"),
    "note": lambda row: "; ".join(["WRONG RESULT, does not count"] * row.is_wrong() + [row.note] * bool(row.note)),
}

LEGEND = """\
* ms: median on the GPU's stream over the rounds; the systems take turns in an order drawn anew for every round, each
  call behind a spin that hides the host's time and behind a write of 256 MB that empties the L2. What a system waits
  for on the host inside a call is in its time.
* x ours: median over the rounds of the system's time over ours in the same round; above 1 ours is faster.
* GB/s: the bytes that an ideal kernel would move, over the time. of copy: over the bandwidth of copying 1 GiB in this
  run; of same copy: a copy that moves as many bytes, in the same rounds, over the time.
* of GEMMs: time of the plain matrix products at full size (one forward, three with backward; the row "GEMMs")
  over the time.
* peak: what a call allocates at most; beyond results: the peak less what the call returns. A system that overwrites its
  inputs needs no memory for its results, and the next backward pass that needs these inputs would be wrong.
* max error, L2 error: against fp64, of the worst result (outputs and gradients): largest deviation over the largest
  magnitude, and L2 norm of the deviation over that of the reference. Rounding a number to bf16 changes it by at most
  3.9e-03 of itself. (Triton's interpreter cuts where the GPU rounds, so without CUDA its errors are larger.)
* eager: Hugging Face's formulas in plain PyTorch; compile: `torch.compile` of them for static shapes, compile time
  outside; torch: torch's own fused operation where there is one (F.rms_norm, F.linear_cross_entropy, fused AdamW on
  fp32 weights with its two casts, a norm in fp32; for the packing a foreach copy and then our square sum).
* liger: Liger-Kernel's functional interface with its defaults; liger fp32: its loss with gradients added up in fp32.
* forward is that of training, with what backward needs saved; that of the loss is evaluation, without gradients."""


def table(rows: list[Row]) -> list[list[str]]:
    """Titles and lines; columns that are empty everywhere are left out."""
    return used([list(COLUMNS), *([cell(row) for cell in COLUMNS.values()] for row in rows)])


def by_kernel(rows: list[Row]) -> dict[str, list[Row]]:
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.kernel, []).append(row)
    return groups


def _best(rows: list[Row]) -> dict[tuple[str, str], tuple[float, str]]:
    """By shape and mode that ours and a rival ran: time of the fastest rival over ours, and its name."""
    best: dict[tuple[str, str], tuple[float, str]] = {}
    for row in rows:
        if row.over_ours is None or row.system == OURS or row.system in YARDSTICKS or row.is_wrong():
            continue
        key = (row.shape, row.mode)
        best[key] = min(best.get(key, (float("inf"), "")), (row.over_ours, row.system))
    return best


def summary(rows: list[Row]) -> list[list[str]]:
    """One line a kernel and mode: how often ours is the fastest, how far behind at worst, and its share of a wall."""
    lines = [["kernel", "mode", "shapes", "fastest", "worst", "where", "wall, least", "wall, median"]]
    for kernel, found in by_kernel(rows).items():
        best = _best(found)
        for mode in dict.fromkeys(row.mode for row in found):
            ratios = [(ratio, name, shape) for (shape, kind), (ratio, name) in best.items() if kind == mode]
            ours = [row for row in found if row.mode == mode and row.system == OURS]
            walls = sorted(
                share for row in ours for share in (row.share_of_copy, row.share_of_gemms) if share is not None
            )
            ran = sum(row.ms is not None for row in ours)
            cells = [kernel, mode, f"{ran} of {len(ours)}"]
            if ratios:
                least, name, shape = min(ratios)
                fastest = sum(ratio >= 1 for ratio, *_ in ratios)
                cells += [f"{fastest} of {len(ratios)}", f"{1 / least:.3f}", f"{name}, {shape}"]
            else:
                cells += ["", "", ""]
            cells += [f"{walls[0]:.3f}", f"{walls[len(walls) // 2]:.3f}"] if walls else ["", ""]
            lines.append(cells)
    return lines


def verdict(rows: list[Row]) -> str:
    """Share of shapes in which no rival is faster, and the worst ratio, over all kernels."""
    ratios = [ratio for found in by_kernel(rows).values() for ratio, _ in _best(found).values()]
    if not ratios:
        return "Nothing to compare: ours ran beside no rival."
    faster, slower = sum(ratio >= 1 for ratio in ratios), sum(1 / ratio > SLOWER_ALLOWED for ratio in ratios)
    return (
        f"Ours takes no longer than the fastest rival in {faster} of {len(ratios)} cases ({faster / len(ratios):.0%}), "
        f"at worst {1 / min(ratios):.3f} times as long; more than 5 % longer in {slower}."
    )


SUMMARY_LEGEND = """\
fastest: shapes in which no rival takes less time; worst: ours over the fastest rival where that is largest; wall: ours
over the bandwidth of a copy of 1 GiB, for the loss the time of the plain matrix products over ours."""
