"""One of two ranks (gloo, CPU) that train adapters on packed weights, for test_packed_ranks.py.

python packed_ranks_worker.py FOLDER NAMES

NAMES: a kind of packed weights and a name of `WAYS` each, as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import packed
import two_ranks
from harness import batches, ds_config, trained

STEPS = 2
WAYS: dict[str, dict[str, Any] | None] = {
    "stock": None,
    "shared": {"window": 3, "gpu_states": 0},
    "gathered": {"window": 3, "gpu_states": 0, "share_weights": False},
}


def main(rank: int, folder: Path) -> None:
    with two_ranks.as_rank(rank, folder) as results:
        for kind, way in json.loads(sys.argv[2]):
            config, data = ds_config(WAYS[way]), batches(2 * STEPS)[rank::2]
            result = trained(packed.packed_model(kind), config, data, loss_of=packed.forward_between)
            results[f"{kind} {way}"] = {"losses": result.losses, "states": result.states}


if __name__ == "__main__":
    two_ranks.fork_ranks(main)
