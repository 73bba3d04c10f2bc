"""One rank of `test_hosts`: trains in several ways, on emulated hosts or on this machine, and leaves what came out.

python hosts_worker.py FOLDER RANKS NAME...     `hosts.json` in FOLDER names the hosts, if there are any.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed
import hosts
import torch
import two_ranks
from adapters import adapted
from deepspeed.accelerator import get_accelerator
from harness import Batch, batches, causal_loss, ds_config, llama, on_ssd, trained

STEPS, BLOCKS, PORT = 4, 4, 29500
RUNS: dict[str, tuple[dict[str, Any] | None, dict[str, Any]]] = {
    "clipping": ({"window": 2}, {"clip": 1.0}),
    "immediate": ({"window": 2}, {"clip": 0.0}),
    "accumulation": ({"window": 3}, {"clip": 1.0, "accumulation": 2}),
    "fp16": ({"window": 2}, {"bf16": None, "fp16": {"enabled": True, "initial_scale_power": 8}}),
    "gpu-states": ({"window": 2, "gpu_states": 600_000}, {"clip": 1.0}),
    "ssd": ({"window": 2, "host_memory": 0}, {"clip": 1.0}),
    "delays": ({"window": 3, "debug": {"lane_delay_ms": 3.0, "seed": 5}}, {"clip": 1.0}),
    "lora": ({"window": 2}, {"clip": 1.0}),
    "stock": (None, {"clip": 1.0}),
    "stock-lora": (None, {"clip": 1.0}),
}


class Counted:
    """`causal_loss`, and what this host had sent when each of them began."""

    def __init__(self) -> None:
        self.sent: list[int] = []
        self.is_shared: bool | None = None

    def __call__(self, engine: Any, batch: Batch) -> torch.Tensor:
        self.sent.append(hosts.sent_bytes())
        runtime = getattr(engine.optimizer, "runtime", None)
        if runtime is not None:
            self.is_shared = runtime.parts.context.shared is not None
        return causal_loss(engine, batch)


@contextlib.contextmanager
def as_rank(rank: int, ranks: int, folder: Path) -> Iterator[tuple[dict[str, Any], Path]]:
    """A process group, what is saved for `two_ranks.seen_by` at the end, and a directory of this rank's host."""
    joined = hosts.read(folder)
    if not joined:
        with two_ranks.as_rank(rank, folder, ranks) as seen:
            yield seen, folder / "disk"
        return
    per_host = ranks // len(joined)
    host = joined[rank // per_host]
    hosts.enter(host, folder)
    local = {"LOCAL_RANK": rank % per_host, "LOCAL_SIZE": per_host, "LOCAL_WORLD_SIZE": per_host}
    world = {"RANK": rank, "WORLD_SIZE": ranks, "MASTER_ADDR": joined[0].address, "MASTER_PORT": PORT, **local}
    os.environ.update({name: str(value) for name, value in world.items()})
    import ds_slide  # noqa: F401 - switches the "ds_slide" key on where the package is not installed

    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    seen = {}
    yield seen, folder / f"disk-of-{host.name}"
    torch.save(seen, folder / f"rank{rank}.pt")
    torch.distributed.destroy_process_group()


def main(rank: int, folder: Path) -> None:
    ranks = int(sys.argv[2])
    get_accelerator().is_fp16_supported = lambda: True  # slow on a CPU, but it works
    with as_rank(rank, ranks, folder) as (results, disk):
        for name in sys.argv[3:]:
            slide, settings = RUNS[name]
            config = ds_config(slide, **settings)
            if name == "ssd":
                disk.mkdir(exist_ok=True)
                on_ssd(config, disk)
            model = adapted() if name.endswith("lora") else llama(seed=rank, num_hidden_layers=BLOCKS)
            counted = Counted()
            data = batches(ranks * STEPS * settings.get("accumulation", 1))[rank::ranks]
            result = trained(model, config, data, loss_of=counted)
            each = len(counted.sent) // STEPS
            sent = [
                after - before for before, after in zip(counted.sent[::each], counted.sent[each::each], strict=False)
            ]
            results[name] = {"losses": result.losses, "norms": result.norms, "states": result.states}
            results[name] |= {"sent": sent, "is_shared": counted.is_shared, "clocks": (time.monotonic(), time.time())}


if __name__ == "__main__":
    two_ranks.fork_world(int(sys.argv[2]), main, Path(sys.argv[1]))
