"""Trains with LLaMA-Factory as `llamafactory-cli train` does, on stock ZeRO-3 and on DS-Slide.

    python llamafactory_worker.py FOLDER

The DeepSpeed JSONs are those of its own examples (examples/deepspeed/ds_z3_config.json and
ds_z3_offload_config.json), for DS-Slide with the key. See `serving` for how runs are asked for. Not a test module.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import tiny
from llamafactory.train.tuner import run_exp
from serving import serve
from watching import Watch

AUTO = "auto"
CPU = {"device": "cpu", "pin_memory": True}


def example(*, offload: bool) -> dict[str, Any]:
    """LLaMA-Factory's example."""
    fp16 = {"loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2, "min_loss_scale": 1}
    return {
        "train_batch_size": AUTO,
        "train_micro_batch_size_per_gpu": AUTO,
        "gradient_accumulation_steps": AUTO,
        "gradient_clipping": AUTO,
        "zero_allow_untested_optimizer": True,
        "fp16": {"enabled": AUTO, **fp16},
        "bf16": {"enabled": AUTO},
        "zero_optimization": {
            "stage": 3,
            **({"offload_optimizer": CPU, "offload_param": CPU} if offload else {}),
            "overlap_comm": False,
            "contiguous_gradients": True,
            "sub_group_size": 1e9,
            "reduce_bucket_size": AUTO,
            "stage3_prefetch_bucket_size": AUTO,
            "stage3_param_persistence_threshold": AUTO,
            "stage3_max_live_parameters": 1e9,
            "stage3_max_reuse_distance": 1e9,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        "comms_config": {"verbose": False},
        "monitor_config": {"enabled": True, "tag": "DeepSpeedMonitor", "csv_monitor": {"enabled": False}},
    }


def save_inputs(folder: Path) -> None:
    """Model, tokenizer and data sets, as a user has them on the disk."""
    tiny.causal_model().save_pretrained(folder / "model")
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(folder / "model")
    rows = [tiny.QUESTIONS[number % len(tiny.QUESTIONS)] for number in range(32)]
    turns = [{"instruction": row, "input": "", "output": row[::-1]} for row in rows]
    pairs = [
        {"instruction": row, "input": "", "chosen": row[::-1], "rejected": f"no {row} {number}"}
        for number, row in enumerate(rows)
    ]
    columns = {"prompt": "instruction", "query": "input", "chosen": "chosen", "rejected": "rejected"}
    kinds = {"sft": {"file_name": "sft.json"}, "dpo": {"file_name": "dpo.json", "ranking": True, "columns": columns}}
    for name, content in (("sft", turns), ("dpo", pairs), ("dataset_info", kinds)):
        (folder / f"{name}.json").write_text(json.dumps(content))


def train(folder: Path, case: str, run: str) -> dict[str, Any]:
    """`case`: stage, what is trained, and "offload" for that example."""
    if not (folder / "model").exists():
        save_inputs(folder)
    stage, kind, *offload = case.split("-")
    config = example(offload=bool(offload))
    if run == "slide":
        config["ds_slide"] = {"enabled": True}
    file = folder / f"{case}.{run}.json"
    file.write_text(json.dumps(config))
    watch = Watch()
    arguments = {
        "stage": stage,
        "do_train": True,
        "model_name_or_path": str(folder / "model"),
        "finetuning_type": kind,
        **({"lora_rank": 4, "lora_target": "all"} if kind == "lora" else {}),
        **({"pref_beta": 0.1, "pref_loss": "sigmoid"} if stage == "dpo" else {}),
        "dataset": stage,
        "dataset_dir": str(folder),
        "template": "default",
        "cutoff_len": 64,
        "output_dir": tempfile.mkdtemp(),
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 4,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "bf16": True,
        "use_cpu": True,
        "deepspeed": str(file),
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "seed": 1,
    }
    run_exp(arguments, callbacks=[watch])
    return watch.seen


if __name__ == "__main__":
    serve(train)
