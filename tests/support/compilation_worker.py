"""Trains two steps as a client does, with states in each tier, where nothing can be compiled.

    python compilation_worker.py trainer FOLDER
    accelerate launch --use_deepspeed ... compilation_worker.py accelerate FOLDER
    deepspeed --num_gpus 1 compilation_worker.py plain FOLDER

The optimizer is the JSON's, but accelerate brings the script's. Each training is a fork of this process. Leaves
FOLDER/CLIENT-CASE.json: the optimizer's class, the losses, and the operators of DeepSpeed that the fork has loaded; and
FOLDER/CLIENT-CASE.log: what it printed. Not a test module.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
from accelerate import Accelerator
from deepspeed.ops.op_builder.builder import OpBuilder
from forking import ask_cpu_once, require_one_thread
from harness import ADAMW, batches, ds_config, llama, on_ssd
from transformers import Trainer, TrainingArguments

import ds_slide  # noqa: F401  (for a source tree on the path; an installed package is found by itself)

CASES = ("without-offload", "host", "ssd")
"""Offload sections of the JSON. For them stock compiles fused_adam, cpu_adam and, beside that, async_io."""
STOCK = "stock"
STEPS = 2


def config_of(case: str, folder: Path) -> dict[str, Any]:
    config = ds_config(None if case == STOCK else {"window": 2})
    if case == "without-offload":
        config["zero_optimization"] = {"stage": 3}
    if case == "ssd":
        on_ssd(config, folder / case)
        config["ds_slide"]["host_memory"] = 0
    return config


def plain(config: dict[str, Any], _: Path) -> tuple[Any, list[float]]:
    deepspeed.init_distributed()
    model = llama(num_hidden_layers=2)
    engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=list(model.parameters()))
    losses = []
    for batch in batches(STEPS):
        losses.append(loss := engine(**batch).loss)
        engine.backward(loss)
        engine.step()
    return engine, [loss.item() for loss in losses]


def accelerate(config: dict[str, Any], folder: Path) -> tuple[Any, list[float]]:
    del config["optimizer"]
    file = folder / "accelerate.json"
    file.write_text(json.dumps(config))
    os.environ["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = str(file)  # as its launcher does for an option
    accelerator = Accelerator()
    model: Any = llama(num_hidden_layers=2)
    engine, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    losses = []
    for batch in batches(STEPS):
        losses.append(loss := engine(**batch).loss)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return engine, [loss.item() for loss in losses]


def trainer(config: dict[str, Any], folder: Path) -> tuple[Any, list[float]]:
    arguments = TrainingArguments(
        str(folder / "trainer"),
        per_device_train_batch_size=2,
        max_steps=STEPS,
        learning_rate=ADAMW["lr"],
        adam_beta2=ADAMW["betas"][1],
        weight_decay=ADAMW["weight_decay"],
        bf16=True,
        use_cpu=True,
        deepspeed=config,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    data = [{"input_ids": row, "labels": row} for batch in batches(STEPS) for row in batch["input_ids"]]
    ours = Trainer(model=llama(num_hidden_layers=2), args=arguments, train_dataset=data)
    ours.train()
    return ours.model_wrapped, [entry["loss"] for entry in ours.state.log_history if "loss" in entry]


def main(client: str, folder: Path) -> None:
    ask_cpu_once()
    require_one_thread()
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)  # a store for one training
    for case in (*CASES, *((STOCK,) if client == "plain" else ())):
        if child := os.fork():
            os.waitpid(child, 0)
            continue
        log = os.open(folder / f"{client}-{case}.log", os.O_WRONLY | os.O_CREAT, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        engine, losses = globals()[client](config_of(case, folder), folder)
        found = {
            "optimizer": type(engine.optimizer).__name__,
            "losses": losses,
            "loaded": sorted(OpBuilder._loaded_ops),
            "on_ssd": engine.optimizer.slide_stats()["memory"]["ssd_bytes"] > 0,
        }
        engine.destroy()
        (folder / f"{client}-{case}.json").write_text(json.dumps(found))
        return


if __name__ == "__main__":
    main(sys.argv[-2], Path(sys.argv[-1]))  # the launcher puts the rank before them
