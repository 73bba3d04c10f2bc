"""One of two ranks that trains with and without recordings. Prints "CASE: same" where all bits are, with the number of
replays in each micro-batch of the last step.

    RANK=... WORLD_SIZE=2 LOCAL_RANK=... python recorded_ranks_worker.py
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

# As in `conftest.py`: kernels of cuBLAS have the same bits in a recording and outside of it.
os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "support"))

from harness import batches, differences, ds_config, engine_for, llama, states_of, train  # noqa: E402

from ds_slide.runtime.captured.graphs import Graph  # noqa: E402
from ds_slide.runtime.gradients.agreement import ExpectedOrder  # noqa: E402
from ds_slide.runtime.gradients.route import Gradients  # noqa: E402

STEPS = 18
"""The ninth records at the latest, the next ones compare, and all later ones replay."""
# Less than an eighth of the GPU beside the batch would count as tight, and operators would be watched.
RESIDENT = {"gpu_states": "1GiB", "gpu_memory": "16GiB"}
STREAMED = {"gpu_states": 0, "gpu_memory": "16GiB", "window": 2}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "resident, clipping": (RESIDENT, {"clip": 1.0}),
    "resident, no clipping": (RESIDENT, {"clip": 0.0}),
    "resident, accumulation": (RESIDENT, {"clip": 1.0, "accumulation": 2}),
    "streamed, clipping": (STREAMED, {"clip": 1.0}),
    "streamed, no clipping": (STREAMED, {"clip": 0.0}),
    "streamed, accumulation": (STREAMED, {"clip": 1.0, "accumulation": 3}),
    "resident, waiting": (RESIDENT, {"clip": 1.0}),
}
"""Waiting: gradients wait for the other rank, and no buffer is free for them. It comes last."""


def let_gradients_wait() -> None:
    Gradients.pack_early = lambda *_: None  # type: ignore[method-assign, assignment]
    ExpectedOrder.digest = lambda *_: (0, 0)  # type: ignore[method-assign, assignment]


class Replays:
    """The number of replays."""

    def __init__(self) -> None:
        self.count, replay = 0, Graph.replay

        def counted(graph: Graph) -> None:
            self.count += 1
            replay(graph)

        Graph.replay = counted  # type: ignore[method-assign]


def run(slide: dict[str, Any], schedule: dict[str, Any], rank: int, replays: Replays) -> tuple[Any, float]:
    """-> what came out, and the number of replays in each micro-batch of the last step."""
    device = torch.device(get_accelerator().current_device_name())
    accumulation = schedule.get("accumulation", 1)
    count = STEPS * accumulation
    data = [{name: value.to(device) for name, value in each.items()} for each in batches(count, seed=rank + 1)]
    torch.manual_seed(3)
    model = llama()
    with engine_for(model, ds_config(slide, **schedule)) as engine:
        result = train(engine, data[:-accumulation])
        before = replays.count
        last = train(engine, data[-accumulation:])
        result.losses += last.losses
        result.states = states_of(model)
        return result, (replays.count - before) / accumulation


def main() -> None:
    rank = int(os.environ["RANK"])
    get_accelerator().set_device(int(os.environ["LOCAL_RANK"]))
    deepspeed.init_distributed()
    replays = Replays()
    for name, (slide, schedule) in CASES.items():
        if name.endswith("waiting"):
            let_gradients_wait()
        expected, _ = run({**slide, "captured_blocks": False}, schedule, rank, replays)
        result, replayed = run({**slide, "captured_blocks": True}, schedule, rank, replays)
        apart = differences(result, expected)
        print(f"{name}: {json.dumps(apart[:5]) if apart else 'same'} {replayed:g}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    import ds_slide  # noqa: F401  (for a source tree on the path)

    main()
