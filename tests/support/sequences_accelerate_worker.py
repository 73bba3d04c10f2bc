"""Ranks of `test_sequences` under accelerate's ParallelismConfig, which makes the mpu and adapts the data.

python sequences_accelerate_worker.py FOLDER accelerate|trainer slide|stock
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import two_ranks
from accelerate import Accelerator, DeepSpeedPlugin, InitProcessGroupKwargs
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import DeepSpeedSequenceParallelConfig, DummyOptim
from deepspeed.utils import groups
from harness import BATCH, Result, ds_config, llama
from ports import free_port
from sequences_worker import BLOCKS, SEQUENCE, STEPS, loss_of_pieces, whole_batches
from transformers import Trainer, TrainingArguments, default_data_collator


def rows() -> list[dict[str, torch.Tensor]]:
    return [
        {name: each[row] for name, each in batch.items()} for batch in whole_batches(2 * STEPS) for row in range(BATCH)
    ]


def divided() -> ParallelismConfig:
    handler = DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=True, sp_attn_implementation="sdpa")
    return ParallelismConfig(sp_backend="deepspeed", sp_size=SEQUENCE, sp_handler=handler)


def by_accelerate(config: dict[str, Any]) -> Result:
    accelerator = Accelerator(
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config),
        parallelism_config=divided(),
        # Without the backend's name accelerate takes every rank for the only one on a machine that has no GPU.
        kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")],
    )
    loader = torch.utils.data.DataLoader(rows()[: STEPS * BATCH], batch_size=BATCH)  # type: ignore[arg-type]
    model: Any = llama(num_hidden_layers=BLOCKS)
    model, optimizer, loader = accelerator.prepare(model, DummyOptim(model.parameters()), loader)
    result, loss_of = Result(), partial(loss_of_pieces, groups._get_sequence_parallel_group())
    for batch in loader:
        loss = loss_of(model, batch)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        result.losses.append(loss.item())
        result.norms.append(float(model.get_global_grad_norm()))
    return result


def by_trainer(config: dict[str, Any], folder: Path) -> Result:
    arguments = TrainingArguments(
        str(folder / "out"),
        per_device_train_batch_size=1,  # the loss of transformers does not take the adapter's pieces of more rows
        max_steps=STEPS,
        learning_rate=1e-3,
        weight_decay=0.1,
        adam_beta2=0.95,
        lr_scheduler_type="constant",
        bf16=True,
        use_cpu=True,
        ddp_backend="gloo",
        gradient_checkpointing=True,
        deepspeed=config | {"train_micro_batch_size_per_gpu": 1},
        parallelism_config=divided(),
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(
        model=llama(num_hidden_layers=BLOCKS),
        args=arguments,
        train_dataset=rows(),  # type: ignore[arg-type]
        data_collator=default_data_collator,
    )
    trainer.train()
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    return Result([entry["loss"] for entry in log], [entry["grad_norm"] for entry in log])


def main(rank: int, folder: Path, port: int) -> None:
    with two_ranks.as_rank(rank, folder, port=port) as seen:
        config = ds_config({"window": 2} if sys.argv[3] == "slide" else None)
        result = by_trainer(config, folder) if sys.argv[2] == "trainer" else by_accelerate(config)
        seen |= {"losses": result.losses, "norms": result.norms}


if __name__ == "__main__":
    two_ranks.fork_ranks(partial(main, port=free_port()))
