"""Print what the lines of `several_gpus.py` and `sequences.py` say, as tables of Markdown.

    python3 benchmarks/ranks_page.py out/four.jsonl out/one.jsonl out/two.jsonl

A setting that has been measured on fewer GPUs has its efficiency beside theirs: 1 is the same throughput of each GPU.
Where lengths vary, a step of several GPUs waits for the rank with the most tokens. What one GPU takes for them comes
from a line through its own steps.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from settings import Setting

Record = dict[str, Any]
NOT_COMPARED = ("steps", "warmup", "distinct_batches")
COMPARED_LOSSES = 10


def words(record: Record, without: Iterable[str] = NOT_COMPARED) -> str:
    """The setting as options, except those that may differ between two rows that compare."""
    defaults = {name: getattr(Setting("slide"), name) for name in without}
    return " ".join(Setting(**(record["setting"] | defaults)).arguments())


def rows(lines: Iterable[Record]) -> list[Record]:
    """The last line of each setting and number of ranks; "begun" of one that has ended without another line."""
    last: dict[tuple[str, int], Record] = {}
    for line in lines:
        last[" ".join(Setting(**line["setting"]).arguments()), line["ranks"]] = line
    return list(last.values())


def timed(record: Record, per_step: list[Any]) -> list[Any]:
    return per_step[record["setting"]["warmup"] :]


def expected_s(other: Record, record: Record) -> float:
    """Median step of `record` if each of its ranks took what a rank of `other` takes for as many tokens."""
    busiest = [max(of_ranks) for of_ranks in zip(*other["tokens"], strict=True)]
    tokens, seconds = timed(other, busiest), timed(other, other["step_s_all"])
    asked = [max(of_ranks) for of_ranks in zip(*(timed(record, own) for own in record["tokens"]), strict=True)]
    if len(set(tokens)) == 1:
        return statistics.median(seconds) * statistics.median(asked) / tokens[0]
    slope, begin = statistics.linear_regression(tokens, seconds)
    return statistics.median(begin + slope * count for count in asked)


def efficiencies(record: Record, others: list[Record]) -> str:
    """Return the efficiency beside each smaller number of ranks."""
    same = [other for other in others if words(other) == words(record) and other["ranks"] < record["ranks"]]
    return ", ".join(f"{expected_s(other, record) / record['step_s']:.3f} of {other['ranks']}" for other in same)


def largest_difference(record: Record, others: list[Record]) -> str:
    """Return the largest difference of the first losses to stock's on the same number of ranks."""

    def without_system(each: Record) -> str:
        return words(each).removeprefix(f"--system {each['setting']['system']}")

    for other in others:
        if other["setting"]["system"] == "stock" != record["setting"]["system"]:
            if other["ranks"] == record["ranks"] and without_system(other) == without_system(record):
                pairs = list(zip(record["losses"], other["losses"], strict=False))[:COMPARED_LOSSES]
                return f"{max(abs(ours - stocks) for ours, stocks in pairs):.2e} in {len(pairs)} steps"
    return ""


def print_settings(lines: list[Record]) -> None:
    found = rows(lines)
    good = sorted((record for record in found if record["status"] == "ok"), key=lambda record: record["ranks"])
    print(
        "| ranks | setting | steps | s/step | longest | tokens/s | efficiency | losses to stock's | init, s | GPU, GB |"
    )
    print("|" + "---|" * 10)
    for record in good:
        setting = record["setting"]
        peak = record["memory"].get("gpu_peak_allocated_bytes", 0) / 1e9
        steps = f"{setting['warmup']} + {setting['steps']}"
        print(
            f"| {record['ranks']} | {words(record)} | {steps} | {record['step_s']:.3f} "
            f"| {record['step_s_max']:.3f} | {record['tokens_per_s']:,.0f} | {efficiencies(record, good)} "
            f"| {largest_difference(record, good)} | {record['init_s']:.1f} | {peak:.1f} |"
        )
    for record in found:
        if record["status"] != "ok":
            print(f"NOT DONE: {record['ranks']} ranks, {words(record)}: {record.get('error', 'no end')}")
    threads = sorted({(record["ranks"], record["update_threads"]) for record in good if "update_threads" in record})
    print("update threads a rank: " + ", ".join(f"{count} with {ranks} ranks" for ranks, count in threads))


def print_lengths(lines: list[Record]) -> None:
    for line in lines:
        what = (
            f"{line['system']}, {line['model']}, {line['ranks']} GPUs, {line['gib'] or 'all'} GiB, {line['seq']} tokens"
        )
        if line["status"] == "ok":
            peak = line["memory"].get("gpu_peak_allocated_bytes", 0) / 1e9
            print(f"{what}: {line['step_s']:.2f} s, {line['tokens_per_s']:,.0f} tokens/s, GPU {peak:.1f} GB")
        else:
            print(f"{what}: {line['error']}")
    best: dict[tuple[str, float, int], int] = {}
    for line in (line for line in lines if line["status"] == "ok"):
        of = line["system"], line["gib"], line["ranks"]
        best[of] = max(best.get(of, 0), line["seq"])
    for (system, gib, ranks), length in best.items():
        if ranks > 1 and (one := best.get((system, gib, 1))):
            print(f"{system}, {gib or 'all'} GiB: longest on {ranks} GPUs {length}, on one {one}: {length / one:.2f}")


def main() -> None:
    lines = [json.loads(line) for name in sys.argv[1:] for line in Path(name).read_text().splitlines()]
    if settings := [line for line in lines if "setting" in line]:
        print_settings(settings)
    print_lengths([line for line in lines if "setting" not in line])


if __name__ == "__main__":
    main()
