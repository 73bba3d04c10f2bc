"""One of two ranks (gloo, CPU) of test_captured_ranks.py: leaves what it saw in FOLDER/rank<N>.pt.

python captured_ranks_worker.py FOLDER NAME...
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import two_ranks
from harness import batches, ds_config, engine_for, llama, states_of, train

from ds_slide.runtime.captured.graphs import Graph
from ds_slide.runtime.captured.shapes import STEADY
from ds_slide.runtime.memory.spare_memory import LOOKS

STEPS = LOOKS[-1] + 2 + STEADY + 1
SCHEDULES: dict[str, Any] = {
    "clipping": {"clip": 1.0},
    "immediate": {"clip": 0.0},
    "accumulation": {"accumulation": 2},
    "streamed": {"clip": 0.0},
}
"""Blocks that stream are recomputed; those that draw random numbers are not recorded then."""


def main(rank: int, folder: Path) -> None:
    replays: list[int] = []
    replay = Graph.replay

    def counted(graph: Graph) -> None:
        replays.append(1)
        replay(graph)

    Graph.replay = counted  # type: ignore[method-assign]
    with two_ranks.as_rank(rank, folder) as seen:
        for name in sys.argv[2:]:
            schedule = SCHEDULES[name]
            count, streams = schedule.get("accumulation", 1), name == "streamed"
            slide = {"window": 2, "cpu_threads": 1, "gpu_memory": "1GiB", "gpu_states": 0 if streams else "1GiB"}
            for wanted in (False, True):
                torch.manual_seed(3)
                model = llama(attention_dropout=0.0 if streams else 0.1, attn_implementation="eager")
                with engine_for(model, ds_config({**slide, "captured_blocks": wanted}, **schedule)) as engine:
                    result = train(engine, batches(STEPS * count, seed=rank + 1))
                    replays.clear()
                    train(engine, batches(count, seed=rank + 3))
                    replayed = engine.optimizer.slide_stats()["activations"]["replayed"]
                    seen[f"{name} {wanted}"] = result.losses, states_of(model), replayed, len(replays) / count


if __name__ == "__main__":
    two_ranks.fork_ranks(main)
