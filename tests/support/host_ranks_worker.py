"""The ranks of test_host_ranks.py: each trains, and writes where its threads run and what it has told.

python host_ranks_worker.py FOLDER RANKS CACHE

The kernel's tree is FOLDER/sys, where each core of this machine is a memory node. The GPU of rank n is at the node of
core n, counted round the cores. CACHE has measurements of `ds-slide doctor` for the second engine, and none for the
first.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import threading
from pathlib import Path

import torch
import two_ranks
from harness import batches, ds_config, engine_for, llama, train

from ds_slide.integration import assemble
from ds_slide.plan.ceilings import Ceilings, CpuCeilings
from ds_slide.plan.cores import memory_nodes
from ds_slide.plan.kept_ceilings import keep
from ds_slide.plan.rank_ceilings import PairOfRanks, RankRates, RanksCeilings
from ds_slide.runtime.core.futures import THREAD_PREFIX

CORES = sorted(os.sched_getaffinity(0))


def make_tree(sysfs: Path) -> None:
    for core in CORES:
        node = sysfs / "devices" / "system" / "node" / f"node{core}"
        node.mkdir(parents=True, exist_ok=True)
        (node / "cpulist").write_text(f"{core}\n")


def threads() -> dict[str, set[int]]:
    """The cores of each thread of an engine, by its name."""
    found = {
        each.name: os.sched_getaffinity(each.native_id)
        for each in threading.enumerate()
        if each.native_id is not None and each.name.startswith(THREAD_PREFIX)
    }
    for task in Path("/proc/self/task").iterdir():
        name = (task / "comm").read_text().strip()
        if name.startswith("slide-update"):
            found[name] = os.sched_getaffinity(int(task.name))
    return found


def ceilings(ranks: int) -> Ceilings:
    """Ranks with updates like one rank alone, whose copies take a hundredth of its rate."""
    cpu = CpuCeilings(
        name="", memory_bytes=1, update_gb_s=100.0, update_threads=1, copy_gb_s=100.0, product_tflop_s=1.0
    )
    rates = (RankRates(update_gb_s=100.0, copy_gb_s=1.0, product_tflop_s=1.0),) * ranks
    pairs = (PairOfRanks(ranks=(0, 1), kept=0.5),)
    found = RanksCeilings(alone=rates, together=rates, places=("",) * ranks, pairs=pairs)
    return Ceilings(source="", cpu=cpu).with_measured(found)


def main(rank: int, folder: Path, ranks: int, sysfs: Path) -> None:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ds_slide").addHandler(handler)
    assemble.memory_nodes = functools.partial(memory_nodes, sysfs)  # type: ignore[attr-defined]
    assemble.gpu_node = lambda _: CORES[rank % len(CORES)]  # type: ignore[attr-defined]
    with two_ranks.as_rank(rank, folder, ranks) as seen:
        for name, slide in {"auto": {}, "none": {"cpu_cores": "none"}}.items():
            if name == "none" and rank == 0:
                keep(ceilings(ranks))
            torch.distributed.barrier()
            with engine_for(llama(2), ds_config({"window": 2, **slide}, clip=1.0)) as engine:
                states = train(engine, batches(2 * ranks)[rank::ranks]).states
                seen[name] = {"threads": threads(), "main": os.sched_getaffinity(0), "states": states}
        seen["lines"] = lines


if __name__ == "__main__":
    there, count = Path(sys.argv[1]), int(sys.argv[2])
    os.environ["XDG_CACHE_HOME"] = sys.argv[3]
    make_tree(there / "sys")
    two_ranks.fork_world(count, functools.partial(main, ranks=count, sysfs=there / "sys"), there)
