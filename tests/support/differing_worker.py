"""Ranks (gloo, CPU) that run the cases of `differing`: each leaves its masters in FOLDER/rank<N>.pt.

python differing_worker.py FOLDER RANKS CASE...
"""

from __future__ import annotations

import sys
from pathlib import Path

import two_ranks
from differing import ALL, train


def main(rank: int, folder: Path) -> None:
    with two_ranks.as_rank(rank, folder, int(sys.argv[2])) as seen:
        for name in sys.argv[3:]:
            run = train(ALL[name], rank)
            seen[name] = (run.returned, run.masters)


if __name__ == "__main__":
    two_ranks.fork_world(int(sys.argv[2]), main, Path(sys.argv[1]))
