"""The seconds that the GPU's kernels take in a step, summed, and the gaps between them.

    python3 benchmarks/kernel_sum.py --system gpu-only --batch 1 --grad-accum 8 --patch ours --checkpointing none
    python3 benchmarks/kernel_sum.py --names 40 --system slide --batch 1 --grad-accum 8 --warmup 14

No step can be shorter than the sum of plain torch, unless kernels change or run side by side. Takes the options of
`step.py`, and needs a GPU. Copies from and to host memory are left out. `--names N`: the N names of kernels that take
the most, and the N pairs of neighbours with the longest gaps between them.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable

import settings
import step
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

STEPS = 2


def table(title: str, times: dict[str, list[float]], most: int) -> str:
    """Return a table of the `most` longest. `times`: microseconds, of all steps."""
    lines = [f"| {title} | ms a step | number |", "| --- | --- | --- |"]
    for name, each in sorted(times.items(), key=lambda item: -sum(item[1]))[:most]:
        lines.append(f"| {name} | {sum(each) / STEPS / 1e3:.2f} | {len(each) // STEPS} |")
    return "\n".join(lines)


def gaps_of(spans: Iterable[tuple[float, float, str]]) -> dict[str, list[float]]:
    """Return the microseconds in which no kernel ran, by the names of the kernels before and after. `spans`: start,
    end, name."""
    gaps, until, before = defaultdict[str, list[float]](list), None, ""
    for start, end, name in sorted(spans):
        if until is not None and start > until:
            gaps[f"{before} -> {name}"].append(start - until)
        if until is None or end > until:
            until, before = end, name
    return dict(gaps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    settings.add_arguments(parser)
    parser.add_argument("--names", type=int, default=0, help="how many kernels and gaps to list by name")
    arguments = parser.parse_args()
    names = arguments.__dict__.pop("names")
    setting = settings.from_arguments(arguments)
    with step.folder_on_disk(setting) as folder:
        trainer, run, _log = step.warmed_up(setting, folder)
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            run(STEPS)
        spans = [
            (event.time_range.start, event.time_range.end, event.name.replace("|", "/")[:70])
            for event in profiler.events()
            if event.device_type == DeviceType.CUDA and "HtoD" not in event.name and "DtoH" not in event.name
        ]
        trainer.close()
    kernels, gaps = defaultdict[str, list[float]](list), gaps_of(spans)
    for start, end, name in spans:
        kernels[name].append(end - start)
    sums = {
        "kernels_s": sum(map(sum, kernels.values())) / 1e6 / STEPS,
        "gaps_s": sum(map(sum, gaps.values())) / 1e6 / STEPS,
        "short_gaps_s": sum(gap for each in gaps.values() for gap in each if gap < 10) / 1e6 / STEPS,
    }
    print(json.dumps({"command": setting.command(), **sums, "torch": torch.__version__}))
    if names:
        print(f"{table('kernel', kernels, names)}\n\n{table('gap after -> before', gaps, names)}")


if __name__ == "__main__":
    main()
