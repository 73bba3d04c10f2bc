"""One rank of `test_trace_words`: rank 1 is late with every backward, and the trace of rank 0 is to say so."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
import two_ranks
from harness import Batch, batches, causal_loss, ds_config, engine_for, llama, train

LATE_S = 0.05


def main(rank: int, folder: Path) -> None:
    def late_loss(engine: Any, batch: Batch) -> torch.Tensor:
        loss = causal_loss(engine, batch)
        if rank == 1:
            time.sleep(LATE_S)
        return loss

    with two_ranks.as_rank(rank, folder):
        config = ds_config({"window": 2, "trace": {"path": str(folder / "step.json"), "steps": [3, 3]}})
        with engine_for(llama(num_hidden_layers=6), config) as engine:
            train(engine, batches(3, seed=rank), late_loss)


if __name__ == "__main__":
    two_ranks.fork_ranks(main)
