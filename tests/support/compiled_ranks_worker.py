"""One rank of `test_compiled_ranks`: trains compiled blocks in several ways and leaves what came out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import two_ranks
from compiled import FP32, STEPS, Counting, Net, losses_of, tokens

RUNS: dict[str, tuple[dict[str, Any], str]] = {
    "shared": ({"window": 2}, "layers"),
    "gathered": ({"window": 2, "share_weights": False}, "engine"),
    "on the GPU": ({"window": 2, "gpu_states": "1GiB"}, "layers"),
}


def main(rank: int, folder: Path) -> None:
    with two_ranks.as_rank(rank, folder) as results:
        data = tokens(2 * STEPS)[rank::2]
        results["stock"] = (losses_of(Net(), None, data=data, **FP32), 0)
        for name, (slide, way) in RUNS.items():
            backend = Counting("aot_eager")
            results[name] = (losses_of(Net(), slide, way, backend, data=data, **FP32), backend.blocks)


if __name__ == "__main__":
    two_ranks.fork_ranks(main)
