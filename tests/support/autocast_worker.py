"""One rank of `test_autocast_ranks`: trains under `torch_autocast` in several ways and leaves what came out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import two_ranks
from harness import ADAMW, batches, ds_config, llama, trained

STEPS = 6
RUNS: dict[str, tuple[dict[str, Any] | None, float, bool]] = {
    "stock": (None, 1.0, False),
    "shared": ({"window": 2}, 1.0, False),
    "gathered": ({"window": 2, "share_weights": False}, 1.0, False),
    "immediate": ({"window": 2, "share_weights": False}, 0.0, False),
    "stock tied": (None, 1.0, True),
    "tied": ({"window": 2}, 1.0, True),
}


def main(rank: int, folder: Path) -> None:
    with two_ranks.as_rank(rank, folder) as results:
        for name, (slide, clip, tied) in RUNS.items():
            autocast = {"enabled": True, "dtype": "bfloat16"}
            optimizer = {"type": "AdamW", "params": ADAMW | {"lr": 2e-4}}
            config = ds_config(slide, clip=clip, bf16=None, torch_autocast=autocast, optimizer=optimizer)
            model = llama(seed=rank, num_hidden_layers=3, tie_word_embeddings=tied)
            result = trained(model, config, batches(2 * STEPS)[rank::2])
            results[name] = {"losses": result.losses, "norms": result.norms, "states": result.states}


if __name__ == "__main__":
    two_ranks.fork_ranks(main)
