"""A training under the launcher that tells when it trains: DISK and FIFO from its arguments.

deepspeed signal_worker.py DISK FIFO [named]
"""

from __future__ import annotations

import os
import sys

import deepspeed
from harness import batches, ds_config, llama, on_ssd

import ds_slide  # noqa: F401 - switches the "ds_slide" key on where the package is not installed


def main() -> None:
    disk, fifo = [argument for argument in sys.argv[1:] if not argument.startswith("--")]
    config = on_ssd(ds_config({"host_memory": 0}), disk)
    model = llama()
    engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=list(model.parameters()))
    (descriptor,) = engine.optimizer.runtime.parts.ssd.store.files.descriptors
    told = False
    while True:
        for batch in batches(engine.gradient_accumulation_steps()):
            engine.backward(engine(**batch).loss)
            engine.step()
        if not told:
            told = True
            with open(fifo, "w") as stream:
                stream.write(f"{os.getpid()} {os.fstat(descriptor).st_blocks}")


if __name__ == "__main__":
    main()
