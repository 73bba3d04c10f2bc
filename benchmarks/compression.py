"""Train the same model on real text with exact AdamW, Muon and compressed gradients, and write the curves as a CSV.

    python3 benchmarks/compression.py --steps 2000 --d 384 --check-every 500 --out curves.csv
    python3 benchmarks/compression.py --systems exact muon --layers 14 --steps 1500 --gpu-states auto --out muon.csv

The text is Python's standard library as it is installed here: every twentieth file is held out, and tells how well a
model has learned. With `--model DIR` the model of that Hugging Face folder is fine-tuned, and its tokenizer reads the
text; without, a new one learns from its bytes. `lora` trains peft's adapters of rank `--lora-r` in its place, and a
new model's vocabulary matrices; `galore` is GaLore of rank `--galore-r` on the GPU alone (galore.py). `muon` has the
rate `--muon-lr` for matrices, and AdamW's for the rest. Weights, batches and schedule depend on the seed only. The
seconds are those of the steps, without the evaluations; each system runs in this process, one after the other. Runs
without a GPU, too (`DS_ACCELERATOR=cpu`, with few layers and steps).
"""

from __future__ import annotations

import argparse
import csv
import os
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import deepspeed
import galore
import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn

BYTES = 256
"""Vocabulary of a model that learns from bytes."""
HELD_OUT_EVERY = 20
COLUMNS = ("system", "lr", "d", "r", "step", "tokens", "seconds", "train_loss", "held_out_loss", "refits", "bytes_down")


def text(model: Path | None) -> tuple[Tensor, Tensor]:
    """Tokens to train on, and tokens that are held out, each [n] int32, the files in the order of their names."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = [path for path in sorted(folder.rglob("*.py")) if "site-packages" not in path.parts]
    contents = [path.read_bytes() for path in files]
    held_out = contents[::HELD_OUT_EVERY]
    trained = [content for number, content in enumerate(contents) if number % HELD_OUT_EVERY]
    return tokens_of(trained, model), tokens_of(held_out, model)


def tokens_of(contents: list[bytes], model: Path | None) -> Tensor:
    if model is None:
        return torch.frombuffer(bytearray(b"".join(contents)), dtype=torch.uint8).int()
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
    files = tokenizer([content.decode(errors="replace") for content in contents], add_special_tokens=False)["input_ids"]
    return torch.tensor([token for file in files for token in (*file, tokenizer.eos_token_id)], dtype=torch.int32)


def batches(data: Tensor, options: argparse.Namespace, device: torch.device) -> Iterator[Tensor]:
    """Runs of bytes at random places, [batch, seq]."""
    generator = torch.Generator().manual_seed(options.seed)
    while True:
        starts = torch.randint(data.numel() - options.seq, (options.batch,), generator=generator)
        rows = [data[start : start + options.seq] for start in starts.tolist()]
        yield torch.stack(rows).long().to(device)


def model_of(options: argparse.Namespace) -> nn.Module:
    """That of `--model`, or a new Llama; 12 layers of 768 have 85 million parameters."""
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(options.seed)
    if options.model:
        pretrained: nn.Module = AutoModelForCausalLM.from_pretrained(options.model, local_files_only=True)
        return pretrained.float()
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=BYTES,
            hidden_size=options.hidden,
            intermediate_size=options.hidden * 8 // 3,
            num_hidden_layers=options.layers,
            num_attention_heads=options.hidden // 64,
            num_key_value_heads=options.hidden // 64,
            max_position_embeddings=options.seq,
            use_cache=False,
        )
    )


def with_adapters(model: nn.Module, options: argparse.Namespace) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(options.seed)
    learned = None if options.model else ["embed_tokens", "lm_head"]  # a new model's are random
    config = LoraConfig(
        r=options.lora_r, lora_alpha=2 * options.lora_r, target_modules="all-linear", modules_to_save=learned
    )
    adapted: nn.Module = get_peft_model(model, config)
    return adapted


def json_of(name: str, options: argparse.Namespace, compression: dict[str, Any] | None) -> dict[str, Any]:
    params = {"betas": [0.9, 0.95], "weight_decay": 0.1}
    optimizer = {"type": "AdamW", "params": {"lr": options.lr, **params}}
    zero: dict[str, Any] = {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    if name == "muon":
        rates = {"muon_lr": options.muon_lr, "adam_lr": options.lr}
        optimizer, zero["reduce_scatter"] = {"type": "Muon", "params": {**rates, **params}}, False
    schedule = {"total_num_steps": options.steps, "warmup_num_steps": max(1, options.steps // 20)}
    return {
        "train_micro_batch_size_per_gpu": options.batch,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "zero_optimization": zero,
        "optimizer": optimizer,
        "scheduler": {"type": "WarmupCosineLR", "params": schedule},
        "steps_per_print": 10**9,
        "ds_slide": {"enabled": True, "gpu_states": options.gpu_states, "compression": compression},
    }


@torch.no_grad()
def held_out_loss(engine: Any, data: Tensor, options: argparse.Namespace, device: torch.device) -> float:
    """Mean over the first runs of the held-out bytes, one behind the other."""
    rows = data[: options.evaluated * options.seq].view(-1, options.seq).long()
    engine.eval()
    losses = [
        engine(input_ids=part.to(device), labels=part.to(device)).loss.float() for part in rows.split(options.batch)
    ]
    engine.train()
    return float(torch.stack(losses).mean())


def engine_of(name: str, model: nn.Module, config: dict[str, Any], options: argparse.Namespace, device: Any) -> Any:
    if name == "galore":
        return galore.Trainer(model, device, config, options.galore_r, options.check_every)
    learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=learned, config=config)
    return engine


def counted(engine: Any) -> tuple[Any, Any]:
    """Refits of projectors so far, and bytes of gradients from the GPU; both empty where nothing is offloaded."""
    if isinstance(engine, galore.Trainer):
        return "", ""
    statistics = engine.optimizer.slide_stats()
    return statistics["compression"].get("refits", ""), statistics["lanes"]["d2h"]["bytes"]


def run(name: str, compression: dict[str, Any] | None, options: argparse.Namespace, out: TextIO) -> None:
    """One training, a row of the CSV for every evaluation."""
    device = torch.device(get_accelerator().current_device_name())
    trained, held_out = text(options.model)
    model = model_of(options)
    if name == "lora":
        model = with_adapters(model, options)
    engine = engine_of(name, model, json_of(name, options, compression), options, device)
    writer, source = csv.writer(out), batches(trained, options, device)
    seconds, losses = 0.0, []
    for step in range(1, options.steps + 1):
        began = time.perf_counter()
        batch = next(source)
        loss = engine(input_ids=batch, labels=batch).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
        if step % options.evaluate_every and step != options.steps:
            seconds += time.perf_counter() - began
            continue
        mean = float(torch.stack(losses).mean())  # waits for the steps so far
        seconds += time.perf_counter() - began
        losses.clear()
        refits, down = counted(engine)
        found = held_out_loss(engine, held_out, options, device)
        d, r = (compression["d"], compression["r"]) if compression else ("", "")
        tokens = step * options.batch * options.seq
        figures = (tokens, round(seconds, 3), round(mean, 5), round(found, 5), refits, down)
        writer.writerow([name, options.muon_lr if name == "muon" else options.lr, d, r, step, *figures])
        out.flush()
        print(f"{name}: step {step}, {seconds:.1f} s, loss {mean:.4f}, held out {found:.4f}", flush=True)
    engine.destroy()


def main() -> None:
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_PORT", "29517")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--systems", nargs="+", choices=("exact", "muon", "lsp", "lora", "galore"), default=["exact", "lsp"]
    )
    parser.add_argument("--out", type=Path, default=Path("compression.csv"))
    parser.add_argument("--model", type=Path, help="folder of a pretrained model, which is fine-tuned")
    for name, default in (
        ("steps", 2000),
        ("d", 384),
        ("r", 4),
        ("check-every", 500),
        ("batch", 16),
        ("seq", 1024),
        ("hidden", 768),
        ("layers", 12),
        ("evaluate-every", 100),
        ("evaluated", 128),
        ("lora-r", 64),
        ("galore-r", 64),
        ("seed", 0),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--lr", type=float, default=6e-4)
    parser.add_argument("--muon-lr", type=float, default=0.02)
    # Room for norms, which pass through the link alone where matrices are compressed, and for no block of matrices.
    parser.add_argument("--gpu-states", default="2MB")
    parser.add_argument("--threshold", type=float, help="of the bias, above which projectors are fitted; else never")
    options = parser.parse_args()
    how = {"d": options.d, "r": options.r, "check_every": options.check_every, "threshold": options.threshold}
    with options.out.open("w", newline="", encoding="utf-8") as out:
        csv.writer(out).writerow(COLUMNS)
        for system in options.systems:
            run(system, {"type": "lsp", **how} if system == "lsp" else None, options, out)


if __name__ == "__main__":
    main()
