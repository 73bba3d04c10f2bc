"""Print what `ds-slide doctor` measures of this machine, and of disks, as a line of JSON.

    python3 benchmarks/ceilings.py [--refresh] [DIR ...]

For benchmarks, in a process that ends: 2.9 GB of a GPU stay with the one that has measured it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from ds_slide.cli.doctor.ceilings import of_this_machine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--refresh", action="store_true", help="measure again what was measured before")
    parser.add_argument("paths", nargs="*", type=Path, metavar="DIR", help="a directory on a disk")
    options = parser.parse_args()
    found, _ = of_this_machine(options.paths, refresh=options.refresh)
    print(found.model_dump_json())


if __name__ == "__main__":
    main()
