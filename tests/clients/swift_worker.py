"""Trains with ms-swift as `swift sft` and `swift rlhf` do, on stock ZeRO-3 and on DS-Slide.

    python swift_worker.py FOLDER

The DeepSpeed JSON is its own for `--deepspeed zero3_offload`, for DS-Slide with the key. See `serving` for how runs are
asked for. Not a test module.
"""

from __future__ import annotations

import json
import tempfile
from importlib.resources import files
from pathlib import Path
from typing import Any

import tiny
from serving import serve
from swift.callbacks import callbacks_map
from swift.pipelines import rlhf_main, sft_main
from watching import Watch

WATCHES: list[Watch] = []


class SwiftWatch(Watch):
    """As ms-swift makes a callback, by its name."""

    def __init__(self, _arguments: Any, _trainer: Any) -> None:
        super().__init__()
        WATCHES.append(self)


callbacks_map["watch"] = SwiftWatch


def save_inputs(folder: Path) -> None:
    """Model, tokenizer and data, as a user has them on the disk."""
    tiny.causal_model().save_pretrained(folder / "model")
    tiny.tokenizer().save_pretrained(folder / "model")
    rows = [tiny.QUESTIONS[number % len(tiny.QUESTIONS)] for number in range(32)]
    turns = [{"messages": tiny.turns(row, row[::-1]), "rejected_response": f"no {row}"} for row in rows]
    (folder / "turns.jsonl").write_text("\n".join(map(json.dumps, turns)))


def train(folder: Path, case: str, run: str) -> dict[str, Any]:
    """`case`: what is trained how, "sft" or one of ms-swift's losses for preferences, and "full" or "lora"."""
    if not (folder / "model").exists():
        save_inputs(folder)
    how, kind = case.split("-")
    config = json.loads((files("swift") / "config" / "zero3_offload.json").read_text())
    if run == "slide":
        config["ds_slide"] = {"enabled": True}
    file = folder / f"{case}.{run}.json"
    file.write_text(json.dumps(config))
    options: dict[str, Any] = {
        **({} if how == "sft" else {"rlhf_type": how}),
        "model": folder / "model",
        "model_type": "llama",
        "template": "dummy",
        "tuner_type": kind,
        "dataset": folder / "turns.jsonl",
        "deepspeed": file,
        "torch_dtype": "bfloat16",
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 4,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "warmup_ratio": 0,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "output_dir": tempfile.mkdtemp(),
        "max_length": 64,
        "use_cpu": True,
        "attn_impl": "sdpa",
        "dataloader_num_workers": 0,
        "seed": 1,
        "callbacks": "watch",
        "check_model": False,  # which asks a hub for a newer one
    }
    words = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
    (sft_main if how == "sft" else rlhf_main)(words)
    return WATCHES[-1].seen


if __name__ == "__main__":
    serve(train)
