"""Trains with axolotl as `axolotl train` does, on stock ZeRO-3 and on DS-Slide.

    python axolotl_worker.py FOLDER

The DeepSpeed JSONs are those of its own examples (deepspeed_configs/zero3_bf16.json and
zero3_bf16_cpuoffload_all.json), for DS-Slide with the key. It loads the model before Trainer's TrainingArguments fill
in what is "auto", and converts norms to fp32 when their weights are partitioned. See `serving` for how runs are asked
for. Not a test module.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import deepspeed
import tiny
import torch
import yaml
from axolotl.cli.args import TrainerCliArgs
from axolotl.cli.config import load_cfg
from axolotl.cli.train import do_train
from axolotl.integrations.base import BasePlugin
from serving import serve
from watching import Watch

AUTO = "auto"
CPU = {"device": "cpu", "pin_memory": True}
WATCH = Watch()


class Plugin(BasePlugin):  # type: ignore[misc]
    """Trainer's arguments for a machine without a GPU, and the callback."""

    def get_training_args(self, cfg: Any) -> dict[str, Any]:  # noqa: ARG002 - axolotl's signature
        return {"use_cpu": True}

    def add_callbacks_post_trainer(self, cfg: Any, trainer: Any) -> list[Any]:  # noqa: ARG002 - axolotl's signature
        return [WATCH]


def example(*, offload: bool) -> dict[str, Any]:
    """axolotl's example, with its short names of what stage 3 keeps."""
    return {
        **({"zero_force_ds_cpu_optimizer": False, "zero_allow_untested_optimizer": True} if offload else {}),
        "zero_optimization": {
            "stage": 3,
            **({"offload_optimizer": CPU, "offload_param": CPU} if offload else {}),
            "overlap_comm": True,
            "contiguous_gradients": True,
            "sub_group_size": 0,
            "reduce_bucket_size": AUTO,
            "stage3_prefetch_bucket_size": AUTO,
            "stage3_param_persistence_threshold": AUTO,
            "max_live_parameters": 0,
            "max_reuse_distance": 0,
            "gather_16bit_weights_on_model_save": True,
        },
        "bf16": {"enabled": True},
        "gradient_accumulation_steps": AUTO,
        "gradient_clipping": AUTO,
        "train_batch_size": AUTO,
        "train_micro_batch_size_per_gpu": AUTO,
        "wall_clock_breakdown": False,
    }


def save_inputs(folder: Path) -> None:
    """Model, tokenizer and data sets, as a user has them on the disk."""
    tiny.causal_model().save_pretrained(folder / "model")
    tiny.tokenizer().save_pretrained(folder / "model")
    rows = [tiny.QUESTIONS[number % len(tiny.QUESTIONS)] for number in range(32)]
    lines = [json.dumps({"instruction": row, "input": "", "output": row[::-1]}) for row in rows]
    (folder / "data.jsonl").write_text("\n".join(lines))


def train(folder: Path, case: str, run: str) -> dict[str, Any]:
    """`case`: what is trained, "packed" for samples one behind the other, and "offload" for that example."""
    if not (folder / "model").exists():
        save_inputs(folder)
    kind, *options = case.split("-")
    config = example(offload="offload" in options)
    if run == "slide":
        config["ds_slide"] = {"enabled": True}
    deepspeed_file, file = folder / f"{case}.{run}.json", folder / f"{case}.{run}.yml"
    deepspeed_file.write_text(json.dumps(config))
    kernels = {"lora_mlp_kernel": False, "lora_qkv_kernel": False, "lora_o_kernel": False}  # these need a GPU
    adapter = {"adapter": "lora", "lora_r": 4, "lora_alpha": 8, "lora_target_linear": True, **kernels}
    arguments = {
        "base_model": str(folder / "model"),
        "plugins": [f"{__name__}.{Plugin.__name__}"],
        "datasets": [{"path": str(folder / "data.jsonl"), "type": "alpaca"}],
        "dataset_prepared_path": str(folder / f"{case}.{run}"),
        "dataset_num_proc": 1,
        "val_set_size": 0.25,
        "output_dir": tempfile.mkdtemp(),
        "sequence_len": 256,
        "sample_packing": "packed" in options,
        "eval_sample_packing": False,
        **(adapter if kind == "lora" else {}),
        "micro_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 4,
        "eval_steps": 2,
        "save_strategy": "no",
        "optimizer": "adamw_torch_fused",
        "lr_scheduler": "constant",
        "learning_rate": 1e-3,
        "bf16": True,
        "attn_implementation": "sdpa",
        "gradient_checkpointing": True,
        "logging_steps": 1,
        "seed": 1,
        "special_tokens": {"pad_token": "<pad>"},
        "deepspeed": str(deepspeed_file),
    }
    file.write_text(yaml.safe_dump(arguments))
    deepspeed.comm.init_distributed = _over_gloo
    torch.manual_seed(0)  # axolotl draws adapters before it sets its seed
    do_train(load_cfg(str(file)), TrainerCliArgs())
    return WATCH.seen


def _over_gloo(dist_backend: str, **options: Any) -> None:
    """axolotl asks for NCCL by its name, which a torch without CUDA has not."""
    init_distributed(dist_backend="gloo" if dist_backend == "nccl" else dist_backend, **options)


init_distributed = deepspeed.comm.init_distributed

if __name__ == "__main__":
    serve(train)
