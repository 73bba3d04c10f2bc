"""Writes the tables of README.md, docs/results.md and benchmarks/results/README.md from benchmarks/results/index.csv.

    python3 benchmarks/results_tables.py

Each figure stands in the index with the page that it is from; a test compares the tables with the index, and the index
with those pages.
"""

from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
HOST, NO_STATES = "all states in host memory", ", gpu_states 0"
SSD = ", nvme, gpu_states 0, host_memory 0"


@dataclass(frozen=True)
class Row:
    """One run of one system. `figures`: by unit, as they stand on the page `file`. `command`: that made it."""

    system: str
    case: str
    setting: str
    file: str
    figures: dict[str, str]
    command: str

    def number(self, unit: str) -> float | None:
        return float(self.figures[unit]) if unit in self.figures else None


def read_index(path: Path = RESULTS / "index.csv") -> list[Row]:
    """The index, the figures of one run together."""
    rows: dict[tuple[str, ...], Row] = {}
    with open(path, newline="", encoding="utf-8") as file:
        for line in csv.DictReader(file):
            key = line["system"], line["case"], line["setting"], line["file"]
            rows.setdefault(key, Row(*key, {}, line["command"])).figures[line["unit"]] = line["figure"]
    return list(rows.values())


Rows = list[Row]


def find(rows: Rows, system: str, case: str, setting: str, page: str) -> Row:
    """The one run of that name; `page`: what its file's name ends in."""
    key = (system, case, setting)
    ends = f"_{page}.md", f"-{page}.md"
    found = [row for row in rows if (row.system, row.case, row.setting) == key and row.file.endswith(ends)]
    if len(found) != 1:
        raise ValueError(f"the index has {len(found)} runs {system}, {case}, {setting} on the page {page}")
    return found[0]


def number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def ratio(ours: Row, stock: Row | None) -> str:
    """How many times as fast as stock."""
    if stock is None:
        return ""
    times = (stock.number("s/step") or 0.0) / (ours.number("s/step") or 1.0)
    return f"{times:.2f}" if ours is stock else f"**{times:.2f}**"


def table(titles: list[str], lines: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [titles, ["---"] * len(titles), *lines])


def readme(rows: Rows) -> str:
    """Six results."""
    chosen = [
        (
            "3 B, the key alone",
            find(rows, "stock", "qwen2.5-3b 8 x 2048", "clipping 1", "default"),
            find(rows, "slide", "qwen2.5-3b 8 x 2048", "clipping 1", "default"),
        ),
        (
            "3 B, 1 x 2048 with accumulation 8, the key alone",
            find(rows, "stock", "qwen2.5-3b 1 x 2048 x 8", "clipping 1, beside stock", BESIDE_OTHERS),
            find(rows, "slide", "qwen2.5-3b 1 x 2048 x 8", "clipping 1, beside stock", BESIDE_OTHERS),
        ),
        (
            "1.5 B, TRL's `SFTTrainer`, the key alone",
            find(rows, "stock", "TRL SFT qwen2.5-1.5b 8 x 2048", "clipping 1", "trl"),
            find(rows, "slide", "TRL SFT qwen2.5-1.5b 8 x 2048", "clipping 1", "trl"),
        ),
        (
            "3 B, four GPUs, 8 x 2048 each, the key alone",
            find(rows, "stock", "qwen2.5-3b 4 x 8 x 2048", "clipping 1", FOUR),
            find(rows, "slide", "qwen2.5-3b 4 x 8 x 2048", "clipping 1", FOUR),
        ),
        (
            "14 B in nf4, LoRA, 4 x 2048, 24 GiB (stock: 140)",
            find(rows, "stock", NF4, "whole card", ADAPTERS),
            find(rows, "slide", NF4, "24 GiB", ADAPTERS),
        ),
        (
            "1.5 B, everything on SSD",
            find(rows, "stock", "qwen2.5-1.5b 8 x 2048", "clipping 1, nvme", "ssd-1.5b_huge-pages"),
            find(rows, "slide", "qwen2.5-1.5b 8 x 2048", "clipping 1" + SSD, "ssd-1.5b_huge-pages"),
        ),
    ]
    lines = [
        [
            f"[{name}](benchmarks/results/{ours.file})",
            number(stock.number("s/step"), ".2f"),
            number(ours.number("s/step"), ".2f"),
            ratio(ours, stock),
        ]
        for name, stock, ours in chosen
    ]
    return table(["8 x 2048 tokens a step, clipping 1.0", "stock s/step", "DS-Slide s/step", "times"], lines)


MACHINES = {
    "nvidia-h200": "H200",
    "nvidia-h200-x2": "2 x H200",
    "nvidia-h200-x4": "4 x H200",
    "nvidia-h100": "H100",
    "nvidia-h100-x4": "4 x H100",
}
CLIP, IN_24, IN_12 = "clipping 1", "clipping 1, GPU 30.3%", "clipping 1, GPU 15.2%"
BESIDE_OTHERS = "28_nvidia-h200_recorded-blocks"
FOUR = "h200-x4_ranks_2"
ADAPTERS, NF4 = "29_nvidia-h200_adapters", "qwen2.5-14b nf4 LoRA 4 x 2048"
ADAPTERS_2, LARGEST = "29_nvidia-h200_adapters_2", "qwen3-235b-a22b nf4-double LoRA"
CURRENT = (
    # name, case, setting of DS-Slide, end of its page's name, setting and page of stock where it was run
    ("3 B, 8 x 2048", "qwen2.5-3b 8 x 2048", CLIP, "default", (CLIP, "default")),
    ("7.6 B, 8 x 2048", "qwen2.5-7b 8 x 2048", CLIP, "default", None),
    ("3 B, 8 x 2048 on each GPU", "qwen2.5-3b 2 x 8 x 2048", CLIP, "default", (CLIP, "default")),
    ("1.5 B, TRL SFT, 8 x 2048", "TRL SFT qwen2.5-1.5b 8 x 2048", CLIP, "trl", (CLIP, "trl")),
    ("1.5 B, TRL SFT with LoRA", "TRL SFT with LoRA qwen2.5-1.5b 8 x 2048", CLIP, "trl", (CLIP, "trl")),
    ("1.5 B, TRL GRPO, 8 x 64", "TRL GRPO qwen2.5-1.5b 8 x 64", CLIP, "trl", (CLIP, "trl")),
    (
        "1.5 B, all states on SSD",
        "qwen2.5-1.5b 8 x 2048",
        CLIP + SSD,
        "ssd-1.5b_huge-pages",
        (CLIP + ", nvme", "ssd-1.5b_huge-pages"),
    ),
    ("3 B, all states on SSD", "qwen2.5-3b 8 x 2048", CLIP + SSD, "ssd-3b-2", (CLIP + ", nvme", "ssd-3b")),
    ("0.5 B, 8 x 2048", "qwen2.5-0.5b 8 x 2048", CLIP, "26_nvidia-h100_forecast", None),
    ("1.5 B, 8 x 2048, no clipping", "qwen2.5-1.5b 8 x 2048", "clipping 0", "26_nvidia-h100_forecast", None),
    ("1.5 B, 8 x 2048, 24 GiB", "qwen2.5-1.5b 8 x 2048", IN_24, "26_nvidia-h100_forecast", None),
    ("3 B, 8 x 2048", "qwen2.5-3b 8 x 2048", CLIP, "26_nvidia-h100_forecast", None),
    ("3 B, 8 x 2048, no clipping", "qwen2.5-3b 8 x 2048", "clipping 0", "26_nvidia-h100_forecast", None),
    ("3 B, 32 x 512", "qwen2.5-3b 32 x 512", CLIP, "26_nvidia-h100_forecast", None),
    ("3 B, 1 x 32768", "qwen2.5-3b 1 x 32768", CLIP, "26_nvidia-h100_forecast", None),
    ("3 B, 4 micro-batches of 4 x 2048", "qwen2.5-3b 4 x 2048 x 4", CLIP, "26_nvidia-h100_forecast", None),
    ("3 B, 8 x 2048, 24 GiB", "qwen2.5-3b 8 x 2048", IN_24, "26_nvidia-h100_forecast", None),
    ("3 B, 4 x 2048, 12 GiB", "qwen2.5-3b 4 x 2048", IN_12, "26_nvidia-h100_forecast", None),
    ("7.6 B, 8 x 2048", "qwen2.5-7b 8 x 2048", CLIP, "26_nvidia-h100_forecast", None),
    ("7.6 B, 4 x 2048, 24 GiB", "qwen2.5-7b 4 x 2048", IN_24, "26_nvidia-h100_forecast", None),
    ("14 B LoRA, 4 x 2048, 24 GiB", "qwen2.5-14b LoRA 4 x 2048", "24 GiB", "lengths_2", None),
    ("14 B nf4 LoRA, 4 x 2048, 24 GiB", NF4, "24 GiB", ADAPTERS, ("whole card", ADAPTERS)),
    (
        "30 B-A3B LoRA, 8 x 2048, 24 GiB",
        "qwen3-30b-a3b LoRA 8 x 2048",
        "24 GiB, beside stock",
        ADAPTERS_2,
        ("whole card", ADAPTERS_2),
    ),
    ("235 B-A22B nf4 LoRA, 1 x 2048, 24 GiB", LARGEST + " 1 x 2048", "24 GiB", ADAPTERS_2, None),
    ("235 B-A22B nf4 LoRA, 5 x 2048, 24 GiB", LARGEST + " 5 x 2048", "24 GiB, behind 4 x 2048", ADAPTERS_2, None),
    (
        "72 B nf4 LoRA, 4 x 2048, 24 GiB",
        "qwen2.5-72b nf4-double LoRA 4 x 2048",
        "24 GiB",
        "28_nvidia-h200_adapters",
        None,
    ),
    ("32 B LoRA, 4 x 2048, 24 GiB", "qwen2.5-32b LoRA 4 x 2048", "24 GiB", ADAPTERS, None),
    (
        "30 B-A3B LoRA on experts, 8 x 2048, 24 GiB",
        "qwen3-30b-a3b LoRA on experts 8 x 2048",
        "24 GiB, experts in parts, once more",
        "28_nvidia-h200_adapters",
        None,
    ),
    (
        "2 blocks of DeepSeek-V3, 1 x 512, 16 GiB",
        "deepseek-v3-2-blocks LoRA 1 x 512",
        "16 GiB",
        "28_nvidia-h200_adapters",
        None,
    ),
    ("3 B with Muon, 8 x 2048", "Muon qwen2.5-3b 8 x 2048", CLIP, "h200_muon", None),
    ("3 B with Muon, 8 x 2048, no clipping", "Muon qwen2.5-3b 8 x 2048", "clipping 0", "h200_muon", None),
    (
        "3 B, 8 micro-batches of 1 x 2048",
        "qwen2.5-3b 1 x 2048 x 8",
        "clipping 1, beside stock",
        BESIDE_OTHERS,
        ("clipping 1, beside stock", BESIDE_OTHERS),
    ),
    ("1.5 B, 8 micro-batches of 2 x 1024", "qwen2.5-1.5b 2 x 1024 x 8", CLIP, BESIDE_OTHERS, None),
    ("0.5 B, 4 micro-batches of 8 x 512", "qwen2.5-0.5b 8 x 512 x 4", CLIP, BESIDE_OTHERS, None),
    (
        "10 blocks of 30 B-A3B, 4 of 1 x 2048, 24 GiB",
        "qwen3-30b-a3b-10-blocks 1 x 2048 x 4",
        "clipping 1, 24 GiB, beside the host",
        "28_nvidia-h200_recorded-blocks_2",
        None,
    ),
    (
        "3 B, 8 micro-batches of 1 x 2048, 24 GiB",
        "qwen2.5-3b 1 x 2048 x 8",
        "clipping 1, 24 GiB, beside the host",
        "28_nvidia-h200_recorded-blocks_2",
        None,
    ),
    (
        "7.6 B, 8 micro-batches of 1 x 2048, 24 GiB",
        "qwen2.5-7b 1 x 2048 x 8",
        "clipping 1, 24 GiB, outer sums",
        "29_nvidia-h200_recorded-blocks_2",
        None,
    ),
    ("3 B, 8 micro-batches of 1 x 2048", "qwen2.5-3b 1 x 2048 x 8", CLIP, "27_nvidia-h100_recorded-blocks_2", None),
    ("3 B, 8 micro-batches of 12 lengths", "qwen2.5-3b 1 x (256 to 2048) x 8", CLIP, "recorded-blocks_2", None),
    (
        "3 B LoRA, 8 micro-batches of 1 x 2048",
        "qwen2.5-3b LoRA 1 x 2048 x 8",
        CLIP,
        ADAPTERS_2,
        None,
    ),
    ("0.5 B, 4 micro-batches of 8 x 512", "qwen2.5-0.5b 8 x 512 x 4", CLIP, "27_nvidia-h100_recorded-blocks", None),
    ("3 B, 8 x 2048 on each GPU", "qwen2.5-3b 4 x 8 x 2048", CLIP, "h100-x4_ranks", None),
    ("3 B, 8 x 2048 on each GPU, no clipping", "qwen2.5-3b 4 x 8 x 2048", "clipping 0", "h200-x4_ranks", None),
    ("3 B, 8 x 2048 on each GPU", "qwen2.5-3b 4 x 8 x 2048", CLIP, FOUR, (CLIP, FOUR)),
    ("3 B, 4 micro-batches of 2 x 2048 on each GPU", "qwen2.5-3b 4 x 2 x 2048 x 4", CLIP, FOUR, None),
    ("3 B, 4 micro-batches of 1 x 2048 on each GPU", "qwen2.5-3b 4 x 1 x 2048 x 4", CLIP, FOUR, None),
    ("3 B, 4 micro-batches, lengths vary", "qwen2.5-3b 4 x 1 x (64 to 2048) x 4", CLIP, FOUR, None),
    ("7.6 B, 8 x 2048 on each GPU", "qwen2.5-7b 4 x 8 x 2048", CLIP, FOUR, None),
    ("14 B, 8 x 2048 on each GPU", "qwen2.5-14b 4 x 8 x 2048", CLIP, FOUR, None),
    ("32 B LoRA, 4 x 2048 on each GPU", "qwen2.5-32b LoRA 4 x 4 x 2048", CLIP, FOUR, None),
    ("VL 3 B, images on two of four GPUs", "qwen2.5-vl-3b 4 x 4 x 2048", CLIP, FOUR, None),
)
"""The newest runs: of each setting the one beside stock, or the latest."""


def current(rows: Rows) -> str:
    """Seconds of the settings in `CURRENT`, and the pages that they are from."""
    lines = [("setting", "machine", "stock s", "DS-Slide s", "times", "GPU GB", "page")]
    pages = [row.file for row in _current_rows(rows)]
    for (name, case, _, _, of_stock), row in zip(CURRENT, _current_rows(rows), strict=True):
        stock = None if of_stock is None else find(rows, "stock", case, *of_stock)
        lines.append(
            (
                name,
                MACHINES[row.file.split("_")[1]],
                "" if stock is None else number(stock.number("s/step"), ".2f"),
                number(row.number("s/step"), ".3f" if (row.number("s/step") or 0) < 10 else ".2f"),
                "" if stock is None else ratio(row, stock).strip("*"),
                number(row.number("GPU peak GB"), ".1f"),
                str(list(dict.fromkeys(pages)).index(row.file) + 1),
            )
        )
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    lines.insert(1, tuple("-" * width for width in widths))  # type: ignore[arg-type]
    padded = (" | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)
    return "\n".join(f"| {line} |" for line in padded)


def commands(rows: Rows) -> str:
    """The pages of the table `current` by their numbers, each with a command."""
    pages = {row.file: row.command for row in reversed(_current_rows(rows))}
    names = list(dict.fromkeys(row.file for row in _current_rows(rows)))
    return "\n".join(
        f"{index}. [{name.split('_')[0]}](../benchmarks/results/{name}): `{pages[name]}`"
        for index, name in enumerate(names, 1)
    )


def _current_rows(rows: Rows) -> Rows:
    return [find(rows, "slide", case, setting, page) for _, case, setting, page, _ in CURRENT]


def host(rows: Rows) -> str:
    names = [
        ("GPU only (bf16 states, no offload)", "gpu-only", "0", ""),
        ("DeepSpeed ZeRO-3 CPU offload", "stock", "1", ""),
        (f"DS-Slide, {HOST} (`gpu_states: 0`)", "slide", "1", NO_STATES),
        ("DS-Slide, default", "slide", "1", ""),
        ("DeepSpeed ZeRO-3 CPU offload", "stock", "0", ""),
        (f"DS-Slide, {HOST}", "slide", "0", NO_STATES),
        ("DS-Slide, default", "slide", "0", ""),
    ]
    lines = []
    for name, system, clip, more in names:
        row = find(rows, system, "qwen2.5-3b 8 x 2048", f"clipping {clip}{more}", "main")
        stock = find(rows, "stock", "qwen2.5-3b 8 x 2048", f"clipping {clip}", "main")
        lines.append(
            [
                name,
                clip,
                number(row.number("s/step"), ".3f"),
                number(row.number("tokens/s"), ",.0f"),
                ratio(row, None if system == "gpu-only" else stock),
                number(row.number("GPU peak GB"), ".1f"),
                "" if system == "gpu-only" else number(row.number("host B/param"), ".1f"),
            ]
        )
    return table(["system", "clipping", "s/step", "tokens/s", "x stock", "GPU peak GB", "host B/param"], lines)


def ssd(rows: Rows) -> str:
    small, large = "qwen2.5-1.5b 8 x 2048", "qwen2.5-3b 8 x 2048"
    everything, short = "DS-Slide, everything on SSD", "DS-Slide, everything on SSD, `state_dtype: 8bit`"
    one_run = "ssd-1.5b_huge-pages"
    names = [
        ("ZeRO-Infinity", "stock", small, "clipping 1, nvme", one_run),
        (everything, "slide", small, "clipping 1" + SSD, one_run),
        (
            "DS-Slide, half of the states in memory",
            "slide",
            small,
            "clipping 1, nvme, gpu_states 0, host_memory half",
            one_run,
        ),
        (short, "slide", small, "clipping 1" + SSD + ", state_dtype 8bit", one_run),
        ("ZeRO-Infinity", "stock", large, "clipping 1, nvme", "ssd-3b"),
        (everything, "slide", large, "clipping 1" + SSD, "ssd-3b-2"),
        (short, "slide", large, "clipping 1" + SSD + ", state_dtype 8bit", "ssd-3b-3"),
    ]
    stocks = {case: find(rows, system, case, setting, page) for _, system, case, setting, page in names[::4]}
    lines = []
    for name, system, case, setting, page in names:
        row = find(rows, system, case, setting, page)
        moved = sum(row.number(f"SSD B/param {way}") or 0.0 for way in ("read", "written"))
        lines.append(
            [
                case.split()[0],
                name,
                number(row.number("s/step"), ".1f"),
                ratio(row, stocks[case]),
                f"{moved:.1f}",
                number(row.number("step / SSD bound"), ".2f"),
                number(row.number("host peak GB"), ".1f"),
            ]
        )
    return table(["shape", "system", "s/step", "x ZeRO-Infinity", "SSD B/param", "step / bound", "host GB"], lines)


def kernels(rows: Rows) -> str:
    names = [
        (f"DS-Slide, {HOST}", '`"off"`', "slide", ", gpu_states 0, kernels off"),
        ("", '`"auto"`', "slide", ", gpu_states 0, kernels auto"),
        ("", "Liger-Kernel 0.8.5", "slide", ", patch liger, gpu_states 0, kernels off"),
        (
            "",
            '`"auto"`, torch limited to 24 GiB of the GPU',
            "slide",
            ", GPU 17.1%, gpu_memory 6GiB, gpu_states 0, kernels auto",
        ),
        ("GPU only", "Hugging Face's own", "gpu-only", ""),
        ("", "DS-Slide's", "gpu-only", ", patch ours"),
        ("", "Liger-Kernel 0.8.5", "gpu-only", ", patch liger"),
    ]
    found = [find(rows, system, "qwen2.5-3b 8 x 2048", "clipping 1" + more, "step") for _, _, system, more in names]
    lines = []
    for (name, what, system, more), row in zip(names, found, strict=True):
        plain = next(other for other in found if other.system == system)
        times = "" if "GPU 17.1%" in more else ratio(row, plain)
        lines.append([name, what, number(row.number("s/step"), ".3f"), times, number(row.number("GPU peak GB"), ".1f")])
    return table(["system", "kernels", "s/step", "x without", "GPU peak GB"], lines)


TABLES: dict[Path, dict[str, Callable[[Rows], str]]] = {
    ROOT / "README.md": {"results": readme},
    ROOT / "docs" / "results.md": {"current figures": current, "commands": commands},
    RESULTS / "README.md": {"host": host, "ssd": ssd, "kernels": kernels},
}


def filled(text: str, tables: dict[str, Callable[[Rows], str]], rows: Rows) -> str:
    """`text` with what stands between the marks of each table as the index has it."""
    for name, make in tables.items():
        begin, end = f"<!-- {name} from the index -->", f"<!-- end of {name} -->"
        before, rest = text.split(begin)
        text = f"{before}{begin}\n{make(rows)}\n{end}{rest.split(end)[1]}"
    return text


def main() -> None:
    rows = read_index()
    for path, tables in TABLES.items():
        path.write_text(filled(path.read_text(encoding="utf-8"), tables, rows), encoding="utf-8")


if __name__ == "__main__":
    main()
