"""Explores every configuration for a while and writes what was done as a table.

PYTHONPATH=tests:. DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 python -m liveness.table --seconds 20 --out FILE.md
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch

from liveness.configurations import ALL, EXHAUSTIVE
from liveness.engine import Count, Finding
from liveness.explore import explore_all, explore_by_chance, explore_orders
from liveness.tiny import Configuration

HEAD = """# Interleavings of the hand-over protocol, explored

`tests/liveness` drives the classes of `ds_slide.runtime` by a deterministic scheduler; its docstring says what is a
choice and what is not covered. Commit: {commit}. One thread, processor seconds, at most {seconds:g} for each line (40
times as many for lines of "all"); a line ends at its first hang.

* orders: one schedule for each lane as the slowest. PCT: random priorities, every operation a point.
* N departures: all schedules that differ in at most N choices from the order in which the disk (or the computing
  thread) is the slowest, states that were seen before not followed again; "all" has no bound. "cut" where time ran out:
  then the schedules with the fewest departures were done.
* states: different states of the whole engine that were met at choices.

| configuration | schedules of | schedules | choices and steps | states | s | result |
|---|---|---|---|---|---|---|
"""


def counts(configuration: Configuration, seconds: float) -> Iterator[Count]:
    if configuration in EXHAUSTIVE:
        yield explore_all(configuration, None, seconds=seconds * 40)
        return
    yield explore_orders(configuration)
    yield explore_by_chance(configuration, 100_000, seconds=seconds)
    yield explore_all(configuration, 2, seconds=seconds)
    yield explore_all(configuration, 2, order="slow compute", seconds=seconds)


def line(count: Count) -> str:
    result = "no hang" if not count.findings else f"{count.findings[0].outcome.kind} ({count.findings[0].how})"
    bound = count.bound if count.complete or count.findings else f"{count.bound}, cut"
    name = count.configuration.name
    return (
        f"| {name} | {bound} | {count.schedules:,} | {count.points:,} | {count.states or ''} "
        f"| {count.seconds:.1f} | {result} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--commit", default="the working tree")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    lines, shortest = [], dict[str, Finding]()
    for configuration in ALL:
        for count in counts(configuration, arguments.seconds):
            lines.append(line(count))
            print(lines[-1], flush=True)
            for finding in count.findings:
                cause = configuration.name
                known = shortest.get(cause)
                if known is None or len(finding.outcome.choices) < len(known.outcome.choices):
                    shortest[cause] = finding
    text = HEAD.format(commit=arguments.commit, seconds=arguments.seconds) + "\n".join(lines) + "\n"
    for cause, finding in shortest.items():
        text += f"\n## {cause[0].upper()}{cause[1:]}\n\nThe shortest schedule that was found.\n\n```\n{finding}\n```\n"
    arguments.out.write_text(text)


if __name__ == "__main__":
    main()
