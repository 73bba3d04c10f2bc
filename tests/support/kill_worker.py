"""Training processes for test_kill_campaign.py: they say what they are doing, and are killed."""

from __future__ import annotations

import json
import os
from typing import Any

import deepspeed
import torch.distributed as dist
from harness import batches, ds_config, llama, on_ssd
from ssd_fault_worker import Run, main


class KilledRun(Run):
    def note(self, key: str, value: Any) -> None:
        """Whole or not at all: whoever reads it may do so at any time."""
        self.result[key] = value
        part = self.folder / "part"
        part.write_text(json.dumps(self.result))
        os.replace(part, self.folder / "result.json")

    def start(self, disk: str, tier: str) -> None:  # type: ignore[override]
        """Make the engine, with all states in host memory or, what may go there, on SSD."""
        self.note("phase", "initialize")
        model = llama(num_hidden_layers=2)
        config = ds_config({"window": 2, **({"host_memory": 0} if tier == "ssd" else {})})
        if tier == "ssd":
            on_ssd(config, disk)
        self.engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=list(model.parameters()))

    def resume(self, folder: str) -> None:
        """From the newest checkpoint, if there is one."""
        self.note("phase", "load")
        self.engine.load_checkpoint(folder)
        self.note("loaded_step", self.engine.global_steps)

    def go_on(self, folder: str, steps: int, every: int) -> None:
        """So many steps, and a checkpoint after `every` of them, under one of two tags."""
        rank, size = dist.get_rank(), dist.get_world_size()
        for _ in range(steps):
            number = self.engine.global_steps
            self.note("phase", "train")
            loss = self.engine(**batches(size, seed=number)[rank]).loss
            self.engine.backward(loss)
            self.engine.step()
            self.result["losses"][number] = loss.item()
            if self.engine.global_steps % every == 0:
                self.note("phase", "save")
                self.engine.save_checkpoint(folder, f"tag{self.engine.global_steps // every % 2}")
                self.note("saved_step", self.engine.global_steps)
        self.engine.destroy()


if __name__ == "__main__":
    main(KilledRun)
