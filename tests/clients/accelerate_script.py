"""A training script as accelerate's documentation writes it, with an optimizer and a schedule of its own.

    accelerate launch ... accelerate_script.py OUT

Leaves OUT: losses, the names of what accelerate has made, and the final weights. Not a test module.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, InitProcessGroupKwargs
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

STEPS, BATCH, LENGTH, VOCABULARY = 12, 2, 24, 256


def data(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return list(torch.randint(VOCABULARY, (count, LENGTH), generator=generator))


def main(out: Path) -> None:
    # Without the backend's name accelerate takes every rank for the only one on a machine that has no GPU.
    accelerator = Accelerator(kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")])
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 172, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=2, max_position_embeddings=LENGTH, **sizes)
    model: Any = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))
    loader = DataLoader(data(STEPS * BATCH * accelerator.num_processes), batch_size=BATCH)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    before = accelerator.get_state_dict(model)
    losses, rates = [], []
    for ids in loader:
        with accelerator.accumulate(model):
            loss = model(input_ids=ids, labels=ids).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        losses.append(float(accelerator.reduce(loss.detach(), reduction="mean")))
        rates.append(float(schedule.get_last_lr()[0]))
    weights = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        kind = type(model.optimizer).__name__
        seen = {"optimizer": kind, "ranks": accelerator.num_processes, "losses": losses, "rates": rates}
        torch.save({**seen, "before": before, "weights": weights}, out)
    accelerator.end_training()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
