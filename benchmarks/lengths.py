"""Train on a card of so many GiB with batches of varying length, the longest last, and evaluations and generations.

    python3 benchmarks/lengths.py --case lora --gib 24 --batch 4 --out out/lengths.jsonl
    python3 benchmarks/lengths.py --case lora --gib 24 --batch 4 --constant 2048 --steps 20 --out out/lengths.jsonl

Writes one JSON line: whether it came to the end, what the GPU held at most, which activations stayed in the last step,
and what the engine has said. `--slide '{"activations": "as_written"}'` recomputes all blocks, as the script asks for:
what does not fit then fits no better.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import random
import statistics
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import memory
import shapes
import step
import torch
from settings import Setting
from torch import nn
from tqdm import tqdm
from trainers import DeepSpeedTrainer

LENGTHS = 64, 4096
GENERATED = 8
"""Tokens of a generation."""
PATCH = 14 * 14 * 3 * 2
"""Elements of a patch of an image, in two frames."""
DEVICE = step.accelerator_device()


def causal(name: str, base: str = "bf16") -> Any:
    return shapes.build_in_host_memory(name, DEVICE, 0, base)


def with_adapters(model: Any) -> Any:
    return shapes.with_adapters(model, rank=16)


def vision() -> Any:
    return shapes.build_vision_language("qwen2.5-vl-3b", DEVICE, 0)


BUILD = {
    "full": lambda: causal("qwen2.5-3b"),
    "lora": lambda: with_adapters(causal("qwen2.5-14b")),
    "lora-72b": lambda: with_adapters(causal("qwen2.5-72b", "nf4-double")),
    "mixture": lambda: causal("qwen3-30b-a3b-6-blocks"),
    "vision": vision,
    "vision-text": vision,
    "dpo": lambda: with_adapters(causal("qwen2.5-3b")),
    "tiny": lambda: with_adapters(causal("tiny")),
    "tiny-nf4": lambda: with_adapters(causal("tiny", "nf4-double")),
}


class Batches:
    """Random tokens of lengths between the bounds, their logarithms uniform."""

    def __init__(self, case: str, model: Any, batch: int, constant: int) -> None:
        self.case, self.batch, self.constant = case, batch, constant
        self.vocabulary = 256 if model.config.get_text_config().vocab_size < 1000 else 151_000
        self.image_token = getattr(model.config, "image_token_id", None)
        self.random = random.Random(0)
        self.generator = torch.Generator().manual_seed(1)

    def length(self) -> int:
        low, high = map(math.log, LENGTHS)
        return self.constant or int(math.exp(self.random.uniform(low, high)))

    def make(self, length: int, batch: int = 0) -> dict[str, torch.Tensor]:
        """Of so many sequences; 0: of a micro-batch."""
        batch = batch or self.batch
        tokens = torch.randint(self.vocabulary, (batch, length), generator=self.generator).to(DEVICE)
        given = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
        if self.case == "vision":
            side = 2 * max(1, math.isqrt(length // 2))  # patches; four of them make a token
            images = side * side // 4
            tokens[:, :images] = self.image_token
            given["image_grid_thw"] = torch.tensor([[1, side, side]] * batch).to(DEVICE)
            pixels = torch.randn(batch * side * side, PATCH, generator=self.generator)
            given["pixel_values"] = pixels.to(DEVICE, torch.bfloat16)
            given["mm_token_type_ids"] = (tokens == self.image_token).int()
        return given


def log_probability(engine: Any, given: dict[str, torch.Tensor]) -> torch.Tensor:
    """Of a batch, negative, a token."""
    loss: torch.Tensor = engine(**given, labels=given["input_ids"], use_cache=False).loss
    return loss


def loss_of(case: str, engine: Any, batches: Batches, length: int) -> torch.Tensor:
    if case != "dpo":
        return log_probability(engine, batches.make(length))
    pair = batches.make(length), batches.make(max(LENGTHS[0], length * 3 // 4))
    with torch.no_grad(), engine.module.disable_adapter():
        reference = [log_probability(engine, each) for each in pair]
    chosen, rejected = (log_probability(engine, each) for each in pair)
    return -nn.functional.logsigmoid((reference[0] - chosen) - (reference[1] - rejected))


def run(options: argparse.Namespace, record: dict[str, Any]) -> None:
    if DEVICE.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(options.gib * 2**30 / torch.cuda.mem_get_info()[1])
    begin = time.perf_counter()
    model = BUILD[options.case]().train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    setting = Setting("slide", batch=options.batch, clip=1.0, slide=options.slide)
    trainer = DeepSpeedTrainer(model, setting, "")
    engine, batches = trainer.engine, Batches(options.case, model, options.batch, options.constant)
    record["init_s"] = round(time.perf_counter() - begin, 1)
    memory.restart_gpu_peak()
    for number in tqdm(range(1, options.steps + 1), desc="steps"):
        length = LENGTHS[1] if number == options.steps and not options.constant else batches.length()
        record["at"] = [number, length]
        begin = time.perf_counter()
        loss = loss_of(options.case, engine, batches, length)
        engine.backward(loss)
        engine.step()
        record["losses"].append(loss.item())
        record["step_s"].append(round(time.perf_counter() - begin, 4))
        record["lengths"].append(length)
        record["kept_gb"].append(
            round(engine.optimizer.slide_stats().get("activations", {}).get("kept_bytes", 0) / 1e9, 2)
        )
        if number % 10 == 0 and not options.constant:
            model.eval()
            with torch.no_grad():
                log_probability(engine, batches.make(batches.length(), 1))
                model.generate(batches.make(64, 1)["input_ids"], max_new_tokens=GENERATED, do_sample=False)
            model.train()
    record["activations"] = engine.optimizer.slide_stats().get("activations", {})
    record["memory"] = engine.optimizer.slide_stats()["memory"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=BUILD, required=True)
    parser.add_argument("--gib", type=float, required=True, help="of the GPU, which torch may allocate")
    parser.add_argument("--batch", type=int, default=1, help="sequences of a micro-batch")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--constant", type=int, default=0, help="one length for all batches, no evaluations")
    parser.add_argument("--slide", type=json.loads, default={}, help='additions to "ds_slide"')
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ds_slide").addHandler(handler)
    card = str(DEVICE) if DEVICE.type == "cpu" else torch.cuda.get_device_name()
    record: dict[str, Any] = {
        "case": options.case, "gib": options.gib, "batch": options.batch, "constant": options.constant,
        "slide": options.slide, "card": card,
        "losses": [], "step_s": [], "lengths": [], "kept_gb": [], "said": said, "error": "",
    }  # fmt: skip
    try:
        run(options, record)
    except (Exception, KeyboardInterrupt) as error:
        record["error"] = f"{type(error).__name__}: {error}"[:600]
        traceback.print_exc()
    stats = torch.cuda.memory_stats() if DEVICE.type == "cuda" else {}
    record["peak_gb"] = round(stats.get("allocated_bytes.all.peak", 0) / 1e9, 2)
    record["reserved_gb"] = round(stats.get("reserved_bytes.all.peak", 0) / 1e9, 2)
    record["retries"] = stats.get("num_alloc_retries", 0)
    with options.out.open("a") as file:
        file.write(json.dumps(record) + "\n")
    print(summary(record), flush=True)
    sys.stdout.flush()


def summary(record: dict[str, Any]) -> str:
    last = statistics.median(record["step_s"][-8:]) if record["step_s"] else 0
    short = sum("had no memory left" in line for line in record["said"])
    back = [line for line in record["said"] if "more than those before" in line]
    return (
        f"{record['case']:11} {record['gib']:4.0f} GiB x {record['batch']} {record['constant'] or 'varying'} "
        f"{record['slide'] or ''} {record['error'] or 'ok'} at {record.get('at')} peak {record['peak_gb']} reserved "
        f"{record['reserved_gb']} retries {record['retries']} kept {max(record['kept_gb'], default=0)} given up {short}"
        f" last steps {last:.4f} s {record.get('activations', {})} "
        f"init {record.get('init_s')} {back}"
    )


if __name__ == "__main__":
    main()
