"""Run the settings of a plan one after the other and write table, records and a dated Markdown page.

    python3 benchmarks/compare.py --plan main --limit 570 --out results/

Every setting is a process of its own (`step.py`), so that none inherits memory or allocator state from another. A
setting that fails or exceeds its time gets a row that says so. Pages are rewritten after every row: a run that is
stopped keeps what it has.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import machine
import page
from page import Record
from plans import PLANS
from settings import HIDDEN_FOLDER, Setting

HERE = Path(__file__).resolve().parent
# Below this a setting cannot even build its model; what is left of the limit is then reported, not spent.
LEAST_SECONDS = 20.0
ERROR_LENGTH = 300
# For one setting; ZeRO-Infinity writes 18 B a parameter before its first step, which then takes up to a minute.
SECONDS, SSD_SECONDS = 150.0, 400.0


def run_process(command: list[str], log: Path, seconds: float) -> tuple[int | None, str]:
    """Exit status of `command` (None if it was killed after `seconds`) and its output, which is added to `log`."""
    with log.open("a") as file:
        file.write(f"\n==== {shlex.join(command)}\n")
        file.flush()
        begin = file.tell()
        # A process group of its own, so that compilers and helpers started by the system under test end with it.
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, preexec_fn=os.setpgrp)
        status: int | None = None
        try:
            status = process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            pass
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    with log.open(errors="replace") as file:
        file.seek(begin)
        return status, file.read()


def last_words(output: str) -> str:
    """The last line that says something: an exception, or how far a killed run came."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Interrupt)\b", line)]
    return (errors or lines or ["no output"])[-1][:ERROR_LENGTH]


@contextmanager
def swap_folder(setting: Setting) -> Iterator[Setting]:
    """The setting with an `nvme_path` of its own, which is gone afterwards, whatever a killed process left in it."""
    if setting.offload != "nvme":
        yield setting
        return
    folder = tempfile.mkdtemp(prefix="ds_slide-compare-", dir=setting.nvme_path)
    try:
        yield dataclasses.replace(setting, nvme_path=folder)
    finally:
        shutil.rmtree(folder)


def run_setting(setting: Setting, log: Path, seconds: float) -> Record:
    """The record of one `step.py` process, or one that says how it failed."""
    with tempfile.TemporaryDirectory() as folder, swap_folder(setting) as setting:
        out = Path(folder) / "record.jsonl"
        command = [sys.executable, str(HERE / "step.py"), *setting.arguments(), "--out", str(out)]
        begin = time.monotonic()
        status, output = run_process(command, log, seconds)
        wall_s = time.monotonic() - begin
        record: Record = json.loads(out.read_text()) if out.exists() else {}
    if status is None:
        # "timed": all steps were measured, and it was closing.
        ended = "ok" if record.get("status") in ("ok", "timed") else "killed"
        record |= {"status": ended, "error": f"killed after {seconds:.0f} s; last line: {last_words(output)}"}
    elif status != 0 and record.get("status") != "failed":
        # Measured, yet ended badly, or died without a word (out of host memory): the row must not pass as a result.
        record |= {"status": "failed", "error": f"exit status {status}; last line: {last_words(output)}"}
    return {"setting": dataclasses.asdict(setting.shown()), "command": setting.command(), **record, "wall_s": wall_s}


def measure_ceilings(log: Path) -> Record | None:
    """What `ds-slide doctor` measures; None when it failed. In a process of its own, which leaves the GPU empty."""
    status, output = run_process([sys.executable, str(HERE / "ceilings.py"), "--refresh"], log, 120)
    return json.loads(output.splitlines()[-1]) if status == 0 else None


class Report:
    """The files of one run; `write` brings all of them up to date."""

    def __init__(self, folder: Path, plan: str, hidden: set[str]) -> None:
        """`hidden`: words of the command line that say more about this machine than a page should."""
        folder.mkdir(parents=True, exist_ok=True)
        now = datetime.datetime.now(datetime.timezone.utc)
        stem = f"{now:%Y-%m-%d}_{machine.short_name()}_{plan}"
        taken = len(list(folder.glob(f"{stem}*.md")))
        self.path = folder / (f"{stem}-{taken + 1}" if taken else stem)
        self._title = f"{plan}: {machine.short_name()}, {now:%Y-%m-%d}"
        self._facts = {"date": f"{now:%Y-%m-%d %H:%M} UTC", **machine.describe()}
        words = [HIDDEN_FOLDER if word in hidden else word for word in sys.argv[1:]]
        self._command = "python3 benchmarks/compare.py " + shlex.join(words)

    def file(self, suffix: str) -> Path:
        """Not `with_suffix`: the names of plans have dots."""
        return self.path.with_name(self.path.name + suffix)

    def write(self, ceilings: Record | None, records: list[Record]) -> None:
        text = page.markdown_page(self._title, self._facts, ceilings, self._command, records)
        self.file(".md").write_text(text)
        header = {"facts": self._facts, "ceilings": ceilings}
        self.file(".jsonl").write_text(page.json_lines([header, *records]))


def chosen_settings(arguments: argparse.Namespace) -> list[Setting]:
    """The settings of the plan after the options that filter and change them."""
    changes: dict[str, Any] = {
        name: getattr(arguments, name) for name in ("steps", "warmup") if getattr(arguments, name) is not None
    }
    chosen = []
    for setting in PLANS[arguments.plan]():
        if setting.system == "slide":
            setting = dataclasses.replace(setting, slide={**setting.slide, **arguments.slide})
        if setting.offload == "nvme":
            setting = dataclasses.replace(setting, nvme_path=str(arguments.nvme_path or HIDDEN_FOLDER))
        setting = dataclasses.replace(setting, **changes)
        if re.search(arguments.only, setting.command()):
            chosen.append(setting)
    return chosen


def summary_line(record: Record) -> str:
    name = f"{record['setting']['system']} {record['setting']['model']} clip {record['setting']['clip']:g}"
    if record["status"] != "ok":
        return f"{name}: {record['status']}: {record['error']}"
    speed = f"{record['step_s']:.3f} s/step, {record['tokens_per_s']:,.0f} tokens/s"
    return f"{name}: {speed} ({record['wall_s']:.0f} s in all)"


def stop(*_: Any) -> None:
    """SIGTERM as an exception, so that the running system is ended too."""
    raise SystemExit("stopped")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", choices=sorted(PLANS), default="quick")
    parser.add_argument("--limit", type=float, default=570.0, help="seconds for everything")
    parser.add_argument("--each", type=float, help="seconds for one setting; 150, or 400 with --offload nvme")
    parser.add_argument("--nvme-path", type=Path, help="folder on the disk that the plans with SSD use")
    parser.add_argument("--out", type=Path, help="folder for table, records and log")
    parser.add_argument("--only", default="", help="regular expression: run the settings whose command matches")
    parser.add_argument(
        "--slide", type=json.loads, default={}, help='additions to "ds_slide" of every slide row, as JSON'
    )
    parser.add_argument("--steps", type=int, help="timed steps of every row")
    parser.add_argument("--warmup", type=int, help="warm-up steps of every row")
    parser.add_argument("--no-ceilings", action="store_true", help="do not measure the machine")
    parser.add_argument("--list", action="store_true", help="print the commands and stop")
    arguments = parser.parse_args()
    settings = chosen_settings(arguments)
    if arguments.list:
        print("\n".join(setting.command() for setting in settings))
        return
    if arguments.out is None:
        parser.error("--out DIR is needed: it says where the page goes")
    if arguments.nvme_path is None and any(setting.offload == "nvme" for setting in settings):
        parser.error("--nvme-path DIR is needed: it says which disk this plan uses")
    signal.signal(signal.SIGTERM, stop)
    deadline = time.monotonic() + arguments.limit
    hidden = {str(arguments.out), str(arguments.nvme_path)}
    report, records = Report(arguments.out, arguments.plan, hidden), []
    log = report.file(".log")
    ceilings = None if arguments.no_ceilings else measure_ceilings(log)
    for number, setting in enumerate(settings, 1):
        left = deadline - time.monotonic()
        if left < LEAST_SECONDS:
            print(f"time limit: {len(settings) - number + 1} settings left out")
            break
        each = arguments.each or (SSD_SECONDS if setting.offload == "nvme" else SECONDS)
        record = run_setting(setting, log, min(each, left))
        records.append(record)
        print(summary_line(record), flush=True)
        report.write(ceilings, records)
    if records:
        print(page.plain(page.rows(records)))
        print(f"written: {report.path}.md, .jsonl, .log")


if __name__ == "__main__":
    main()
