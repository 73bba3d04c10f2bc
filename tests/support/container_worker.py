"""Small trainings within limits of memory, for test_container_limits.py.

    python container_worker.py FOLDER

Reads {case: {"procs": [file, ...], "address_space": bytes or null}} from stdin. Everything is imported once; then each
case is a fork, which enters the control groups by writing itself to these files, takes that much more address space at
most, trains a step, and leaves CASE.json in FOLDER: its losses or its error, and the most memory that it has had.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from forking import ask_cpu_once, require_one_thread
from harness import batches, ds_config, engine_for, llama, train

import ds_slide  # noqa: F401 - switches the "ds_slide" key on where the package is not installed
from ds_slide.errors import SlideError

# 35 million parameters: 420 MB of states, 70 MB of held gradients.
SIZES = {"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 12}


def run(case: dict[str, Any], out: Path) -> None:
    for file in case["procs"]:
        Path(file).write_text(str(os.getpid()))
    if case["address_space"] is not None:
        limit = psutil.Process().memory_info().vms + case["address_space"]
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    store = torch.distributed.FileStore(str(out.with_suffix(".store")), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    result: dict[str, Any] = {}
    torch.set_default_dtype(torch.bfloat16)  # a model in fp32 would need room of its own
    model = llama(**SIZES)
    torch.set_default_dtype(torch.float32)
    begun = time.monotonic()
    before = psutil.Process().memory_info().rss
    try:
        with engine_for(model, ds_config({"window": 2})) as engine:
            result["losses"] = train(engine, batches(1)).losses
            result["states"] = engine.optimizer.runtime.parts.memory_report["host_bytes"]
    except SlideError as error:
        result["error"] = str(error)
        result["seconds"] = time.monotonic() - begun
        result["grown"] = psutil.Process().memory_info().rss - before
    out.write_text(json.dumps(result))


def main(folder: Path) -> None:
    ask_cpu_once()
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    gc.collect()
    gc.freeze()
    require_one_thread()
    for name, case in json.load(sys.stdin).items():
        if child := os.fork():
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            (folder / f"{name}.status").write_text(str(status))
            continue
        run(case, folder / f"{name}.json")
        return


if __name__ == "__main__":
    main(Path(sys.argv[1]))
