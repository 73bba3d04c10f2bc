"""One rank over NCCL of the trainings of `tests/support/differing.py`, whose batches use different modules.

    RANK=... WORLD_SIZE=2 LOCAL_RANK=... python differing_ranks_worker.py CASE...

Rank 0 trains the same in plain torch on the processor, and prints "distance", the case and how far the masters are
apart over the way that training has moved them.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

TESTS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TESTS / "support"))

from differing import ALL, reference, train  # noqa: E402
from loops import distance  # noqa: E402


def main(names: list[str]) -> None:
    get_accelerator().set_device(int(os.environ["LOCAL_RANK"]))
    deepspeed.init_distributed()
    for name in names:
        run = train(ALL[name], dist.get_rank(), get_accelerator().current_device_name())
        if dist.get_rank() == 0:
            run.masters = [{key: master.cpu() for key, master in masters.items()} for masters in run.masters]
            expected = reference(ALL[name], dist.get_world_size())
            print("distance", name, distance(run, expected), flush=True)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    import ds_slide  # noqa: F401  (for a source tree on the path)

    torch.backends.cuda.matmul.allow_tf32 = False
    torch.set_num_threads(4)  # plain torch's layers are tiny: with a thread for each of 32 cores it took minutes
    main(sys.argv[1:])
