"""The largest batch, or the longest sequence, that a system trains: the steps of a list that run, by bisection.

    python3 benchmarks/largest.py --vary batch --values 5 6 --records out.jsonl -- --system stock --gpu-fraction 0.1716
    python3 benchmarks/largest.py --vary seq --values 16384 24576 32768 --records out.jsonl -- --system slide --batch 1

Behind `--` are the options of `step.py`. What fits is taken to fit with every smaller value. Each run is a process of
its own, and its record stays, that of a run without enough memory as well. A run that ends otherwise stops the search.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
MEMORY = ("OutOfMemoryError", "DoesNotFit")
"""Errors that say that a value is too large."""


def largest(values: Sequence[int], fits: Callable[[int], bool]) -> int | None:
    """The largest of ascending `values` that `fits`, in as few tries as that takes; None: not even the first."""
    low, high = -1, len(values)
    while high - low > 1:
        middle = (low + high) // 2
        if fits(values[middle]):
            low = middle
        else:
            high = middle
    return None if low < 0 else values[low]


def runs(vary: str, value: int, options: Sequence[str], records: Path) -> bool:
    """Whether steps with that value run; appends their record. Raises SystemExit where they end for another reason."""
    command = (sys.executable, str(HERE / "step.py"), *options, f"--{vary}", str(value), "--out", str(records))
    subprocess.run(command, check=False)
    record: dict[str, Any] = json.loads(records.read_text(encoding="utf-8").splitlines()[-1])
    if record["status"] == "ok":
        print(
            f"{vary} {value}: {record['step_s']:.3f} s a step, {record['tokens_per_s']:.0f} tokens a second", flush=True
        )
        return True
    error = record.get("error", record["status"])
    print(f"{vary} {value}: {error}", flush=True)
    if not error.startswith(MEMORY):
        raise SystemExit(1)
    return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vary", choices=("batch", "seq"), required=True)
    parser.add_argument("--values", type=int, nargs="+", required=True)
    parser.add_argument("--records", type=Path, required=True, help="a file to which a line is added for each run")
    parser.add_argument("options", nargs="+", help="of step.py")
    arguments = parser.parse_args()
    values = sorted(arguments.values)
    found = largest(values, lambda value: runs(arguments.vary, value, arguments.options, arguments.records))
    print(f"largest {arguments.vary} of {values}: {found}")


if __name__ == "__main__":
    main()
