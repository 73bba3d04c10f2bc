"""Repeats tests in fresh processes while others keep the disk and the cores busy: for hangs that an idle machine hides.

    python tests/soak.py --times 200 --writers 2 --cores 0 -- tests/end_to_end/ssd/test_ssd_stock_faults.py

Each writer writes and reads a file of its own beside the tests' temporary files with O_DIRECT, 1 MiB at a time; each
busy core computes. A run that does not end within `--limit` seconds is a hang: its threads' stacks are printed (by
faulthandler), it is killed, and counted. Ends with a line of counts; exit code 1 after any failure.
"""

from __future__ import annotations

import argparse
import contextlib
import mmap
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tqdm import tqdm

FILE_BYTES = 256 << 20
BLOCK = 1 << 20


def keep_disk_busy(folder: str, seed: int) -> None:
    """Write and read random blocks of a file past the page cache, until killed."""
    path = Path(folder, f"busy{seed}")
    data = mmap.mmap(-1, BLOCK)
    data.write(os.urandom(BLOCK))
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    os.ftruncate(descriptor, FILE_BYTES)
    places = random.Random(seed)
    while True:
        offset = places.randrange(FILE_BYTES // BLOCK) * BLOCK
        os.pwritev(descriptor, [data], offset)
        os.preadv(descriptor, [data], offset)


def keep_core_busy() -> None:
    """Compute until killed."""
    while True:
        sum(range(1 << 16))


def once(command: list[str], limit_s: float, log: Path) -> str:
    """ "passed", "failed" or "hung"; the output is in `log`."""
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            return "passed" if process.wait(limit_s) == 0 else "failed"
        except subprocess.TimeoutExpired:
            os.kill(process.pid, signal.SIGABRT)  # faulthandler, which pytest enables, prints all stacks
            process.wait()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # what it had started
            return "hung"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=200)
    parser.add_argument("--writers", type=int, default=2, help="processes that write and read the disk")
    parser.add_argument("--cores", type=int, default=0, help="processes that compute")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds of one run")
    parser.add_argument("tests", nargs="+", help="arguments of pytest, after --")
    arguments = parser.parse_args()
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *arguments.tests]
    counts: Counter[str] = Counter()
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        noise = [(keep_disk_busy, (folder, seed)) for seed in range(arguments.writers)]
        noise += [(keep_core_busy, ())] * arguments.cores  # type: ignore[list-item]
        children = []
        for work, given in noise:
            child = os.fork()
            if not child:
                work(*given)  # type: ignore[operator]
            children.append(child)
        try:
            for number in tqdm(range(arguments.times), disable=None):
                log = Path(folder, f"log{number}")
                outcome = once(command, arguments.limit, log)
                counts[outcome] += 1
                if outcome != "passed":
                    sys.stdout.write(f"run {number} {outcome}:\n{log.read_text(errors='replace')[-20000:]}\n")
                log.unlink()
        finally:
            for child in children:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
    minutes = (time.monotonic() - started) / 60
    noted = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))
    sys.stdout.write(f"{arguments.times} runs in {minutes:.0f} minutes: {noted}\n")
    return 0 if counts == Counter(passed=arguments.times) else 1


if __name__ == "__main__":
    sys.exit(main())
