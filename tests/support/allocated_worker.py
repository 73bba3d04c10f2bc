"""One of two ranks that compare what they have taken with their plan, in engines that share weights or gather them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import two_ranks
from allocated import counted
from harness import ds_config, engine_for, llama, on_ssd
from moving import movable, promote

from ds_slide.plan import ssd_settings

RUNS: dict[str, tuple[dict[str, Any], float]] = {
    "shared": ({}, 1.0),
    "shared, gpu states": ({"gpu_states": 400_000}, 0.0),
    "gathered": ({"share_weights": False}, 0.0),
    "gathered, gpu states": ({"share_weights": False, "gpu_states": 400_000}, 1.0),
    "ssd": ({"host_memory": 0}, 1.0),
    # The weights of some blocks are shared, those of others gathered.
    "ssd, a part": ({"host_memory": 300_000}, 1.0),
}


def main(rank: int, folder: Path) -> None:
    ssd_settings.CHUNK_NUMEL = 4096
    with two_ranks.as_rank(rank, folder) as results:
        for name, (slide, clip) in RUNS.items():
            config = ds_config(slide, clip=clip)
            if name.startswith("ssd"):
                on_ssd(config, folder / "disk")
            with counted() as count, engine_for(llama(), config) as engine:
                results[name] = count.difference(engine)
                for orders in (slice(None, None, 2), slice(1, None, 3), slice(0)):
                    assert promote(engine.optimizer.runtime, *movable(engine.optimizer.runtime)[orders]) is not None
                    results[name] += count.difference(engine)


if __name__ == "__main__":
    two_ranks.fork_ranks(main)
