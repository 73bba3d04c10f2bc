"""Steps of this checkout beside those of another commit, in turn on one machine.

    python3 benchmarks/beside_commit.py --tree OTHER --path OTHER_SITE --rows 3b 24gib 7b --records beside.jsonl
    python3 benchmarks/beside_commit.py --tree OTHER --path OTHER_SITE --rows sweep --rounds 1 --records beside.jsonl

`--tree`: the other commit's checkout, whose `benchmarks/step.py` runs. `--path`: where Python finds its package. Each
run is a process of its own, and the process of the next run imports what it needs meanwhile. Rows: `ROWS`, and the
settings of `hand_sweep.py` with the key alone ("sweep", or "sweep3" for the fourth one). Runs in `--records` are not
repeated. At the end a table in Markdown: median steps in the order of the runs, and the ratio of their medians. On SSD
the bytes of a step tell, since a disk is not the same twice.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hand_sweep import DECIDED, sweeps
from plan_check import H200_BYTES, lines_of, share_of_gpu
from settings import Setting

HERE = Path(__file__).resolve().parent
OWN, OTHER = "this one", "the other"
ON_SSD = {"slide": {"host_memory": "2GB"}}
ROWS: dict[str, dict[str, Any]] = {
    "tiny": {"model": "tiny", "batch": 2, "seq": 64, "steps": 2, "warmup": 1},
    "3b": {"model": "qwen2.5-3b", "steps": 8},
    "24gib": {"model": "qwen2.5-3b", "steps": 8, "gib": 24},
    "1x4": {"model": "qwen2.5-3b", "batch": 1, "grad_accum": 4, "steps": 8, "warmup": 18, "gib": 24},
    "7b": {"model": "qwen2.5-7b", "build": "host"},
    "ssd": {"model": "qwen2.5-1.5b", "offload": "nvme", "steps": 4, "warmup": 4, **ON_SSD},
}
"""Beside `hand_sweep.DECIDED`. `gib`: of the GPU."""


def settings_of(row: str, nvme_path: str, gpu_bytes: int) -> list[Setting]:
    if row.startswith("sweep"):
        every = [each.alone for each in sweeps(nvme_path, gpu_bytes) if nvme_path or "nvme_path" not in each.about]
        return every if row == "sweep" else [every[int(row.removeprefix("sweep"))]]
    about = {**DECIDED, **ROWS[row]}
    if gib := about.pop("gib", 0):
        about["gpu_fraction"] = share_of_gpu(gib, gpu_bytes)
    if about.get("offload") == "nvme":
        about["nvme_path"] = nvme_path
    return [Setting("slide", **about)]


def on_standby(of: str, setting: Setting, options: argparse.Namespace) -> Any:
    """A process that runs the setting once a line is written to it."""
    script = (HERE if of == OWN else options.tree / "benchmarks") / "step.py"
    records = options.records.with_suffix(".of_other" if of == OTHER else ".of_own")
    command = (sys.executable, str(script), *setting.arguments(), "--out", str(records), "--standby")
    environment = os.environ if of == OWN else {**os.environ, "PYTHONPATH": options.path}
    return records, subprocess.Popen(command, stdin=subprocess.PIPE, env=environment)


def run(runs: Sequence[tuple[str, int, Setting]], options: argparse.Namespace) -> None:
    """Run what is not in the records yet, and add it with its commit and round."""
    done = [_key(each["of"], each["round"], each["setting"]) for each in known(options.records)]
    todo = [each for each in runs if _key(each[0], each[1], vars(each[2].shown())) not in done]
    waiting = on_standby(todo[0][0], todo[0][2], options) if todo else None
    for place, (of, number, setting) in enumerate(todo):
        assert waiting is not None
        records, process = waiting
        print(f"{of}, round {number}: {setting.command()}", file=sys.stderr, flush=True)
        before = len(known(records))
        with suppress(BrokenPipeError):  # it has ended already: the table has no step for it
            process.stdin.write(b"\n")
            process.stdin.close()
        waiting = on_standby(todo[place + 1][0], todo[place + 1][2], options) if place + 1 < len(todo) else None
        process.wait()
        for record in known(records)[before:]:
            line = {"of": of, "round": number, **record, "setting": vars(setting.shown())}
            with options.records.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")


def known(records: Path) -> list[dict[str, Any]]:
    return lines_of(str(records)) if records.exists() else []


def _key(of: str, number: int, setting: dict[str, Any]) -> str:
    return json.dumps([of, number, setting])


def table(records: Sequence[dict[str, Any]]) -> Iterator[str]:
    yield f"| | {OTHER}, s | {OWN}, s | ratio | bytes on SSD, ratio |"
    yield "|---|---|---|---|---|"
    for setting in {json.dumps(each["setting"]): None for each in records}:
        found = [each for each in records if json.dumps(each["setting"]) == setting]
        steps = {of: [each["step_s"] for each in found if each["of"] == of and "step_s" in each] for of in (OTHER, OWN)}
        if not all(steps.values()):
            yield f"| {name_of(json.loads(setting))} | no step | no step | | |"
            continue
        moved = [max((bytes_on_ssd(each) for each in found if each["of"] == of), default=0.0) for of in (OTHER, OWN)]
        shown = " | ".join(", ".join(f"{each:.3f}" for each in steps[of]) for of in (OTHER, OWN))
        ratio = statistics.median(steps[OWN]) / statistics.median(steps[OTHER])
        on_ssd = f"{moved[1] / moved[0]:.3f}" if moved[0] else ""
        yield f"| {name_of(json.loads(setting))} | {shown} | {ratio:.3f} | {on_ssd} |"


def bytes_on_ssd(record: dict[str, Any]) -> float:
    """Bytes that a step reads from and writes to SSD."""
    ssd = (record.get("slide_stats") or {}).get("ssd") or {}
    return float(ssd.get("read_bytes", 0) + ssd.get("written_bytes", 0))


def name_of(setting: dict[str, Any]) -> str:
    turns = f" x {setting['grad_accum']}" if setting["grad_accum"] > 1 else ""
    part = f", GPU {setting['gpu_fraction']:.1%}" if setting["gpu_fraction"] < 1 else ""
    disk = ", SSD" if setting["offload"] == "nvme" else ""
    return f"{setting['model']} {setting['batch']} x {setting['seq']}{turns}, clipping {setting['clip']:g}{part}{disk}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", type=Path, required=True)
    parser.add_argument("--path", required=True)
    parser.add_argument("--rows", nargs="+", default=["3b", "24gib", "7b"])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--nvme-path", default="", help="a folder on the disk for states; without, none go to SSD")
    parser.add_argument("--gpu-bytes", type=int, default=0, help="memory of the GPU; 0: as torch has it")
    parser.add_argument("--records", type=Path, required=True)
    options = parser.parse_args()
    gpu_bytes = options.gpu_bytes or bytes_of_gpu()
    settings = [each for row in options.rows for each in settings_of(row, options.nvme_path, gpu_bytes)]
    in_turn = [(of, number, each) for each in settings for number in range(options.rounds) for of in (OTHER, OWN)]
    run(in_turn, options)
    print("\n".join(table(known(options.records))))


def bytes_of_gpu() -> int:
    """Asked in a process of its own, which leaves the GPU alone afterwards."""
    code = "import torch; print(torch.cuda.mem_get_info()[1] if torch.cuda.is_available() else 0)"
    return (
        int(subprocess.run((sys.executable, "-c", code), capture_output=True, text=True, check=True).stdout)
        or H200_BYTES
    )


if __name__ == "__main__":
    main()
