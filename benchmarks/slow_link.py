"""Run a command behind a link between host and GPU of a limited rate: `slow_link.c`, compiled and loaded into it.

    python3 benchmarks/slow_link.py --gb-s 8 -- python3 benchmarks/step.py --system slide --model qwen2.5-3b ...

Every system that is started this way is limited by the same rule: its copies take at least their bytes over the rate,
each direction for itself. What is launched on the GPU, and what the CPU does with host memory, is not.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".c")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb-s", type=float, required=True, help="1e9 bytes a second, each way")
    parser.add_argument("--report", type=Path, help="a file for the bytes and copies that were counted, as JSON")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()
    if options.gb_s <= 0:
        parser.error(f"--gb-s {options.gb_s} is no rate: give one above 0")
    with tempfile.TemporaryDirectory(prefix="slow-link-") as folder:
        library = Path(folder) / "slow_link.so"
        flags = ["-shared", "-fPIC", "-O2", "-o", str(library), str(SOURCE), "-ldl", "-lpthread"]
        subprocess.run([os.environ.get("CC", "cc"), *flags], check=True)
        # With the default of 8 queues a stream that waits for the link holds up others that share its queue.
        shared = {"LD_PRELOAD": str(library), "SLOW_LINK_GB_S": str(options.gb_s), "CUDA_DEVICE_MAX_CONNECTIONS": "32"}
        if options.report:
            shared["SLOW_LINK_REPORT"] = str(options.report)
        raise SystemExit(subprocess.run(options.command, env=os.environ | shared, check=False).returncode)


if __name__ == "__main__":
    main()
