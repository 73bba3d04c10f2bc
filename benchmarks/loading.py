"""The peak of a process's own memory from a sharded packed checkpoint, with adapters and the engine, to the first step.

    python3 benchmarks/loading.py write --checkpoint DIR --layers 36          # nf4, random bytes
    python3 benchmarks/loading.py write-experts --checkpoint DIR --layers 4   # layers of Qwen3-30B-A3B in bf16
    DS_ACCELERATOR=cpu python3 benchmarks/loading.py load --checkpoint DIR    # prints a JSON record

A checkpoint in bf16 is packed while it is loaded, experts included (`examples/packed_experts.py`).

Memory is `RssAnon + RssShmem` of /proc/self/status, read every 5 ms: all pages but those of files. A page of a shard
that is mapped belongs to the page cache, which the system takes back. The slots of the window are in the same memory on
the CPU accelerator, and are taken off on the record's last line.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from memory import host_memory, restart_host_peak

from ds_slide.model.carried import packed_tensors

SHARD_LAYERS = 4
BAR = (1.1, 2 * 10**9)
"""Of the packed bytes, and bytes beside them."""


class PeakOfOwnPages(threading.Thread):
    """Reads the memory of this process until it is stopped. `stages`: the most bytes in each stage."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.before = self.now()
        self.stages: dict[str, int] = {}
        self._stage, self._ended = "", threading.Event()

    @staticmethod
    def now() -> int:
        memory = host_memory()
        return memory["rss_anonymous_bytes"] + memory["rss_shared_bytes"]

    def run(self) -> None:
        while not self._ended.wait(0.005):
            self._read()

    def _read(self) -> None:
        if stage := self._stage:
            self.stages[stage] = max(self.stages.get(stage, 0), self.now() - self.before)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        self._stage = name
        yield
        self._read()
        self._stage = ""

    def stop(self) -> None:
        self._ended.set()
        self.join()


def write(folder: Path, layers: int, width: int, inner: int) -> None:
    """Write a Llama of so many layers, packed by bitsandbytes, whose bytes are random. One layer is packed; the others
    have its scales."""
    from bitsandbytes.nn import Params4bit
    from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": width, "intermediate_size": inner, "num_attention_heads": width // 128}
    sizes |= {"vocab_size": 32_000, "num_hidden_layers": 1}
    config = LlamaConfig(**sizes, dtype="bfloat16", architectures=["LlamaForCausalLM"])
    model = LlamaForCausalLM(config).bfloat16()
    config.num_hidden_layers = layers
    config.quantization_config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4").to_dict()
    config.save_pretrained(folder)
    packed, outer = {}, {}
    for name, weight in model.state_dict().items():
        if not name.startswith("model.layers.0."):
            outer[name] = weight.clone()
        elif weight.dim() < 2:
            packed[name] = weight
        else:
            made = Params4bit(weight, requires_grad=False, quant_type="nf4").to("cpu")
            packed[name] = made.data
            packed |= {f"{name}.{key}": each for key, each in made.quant_state.as_dict(packed=True).items()}
    write_shards(folder, layers, packed, outer)


def write_experts(folder: Path, layers: int) -> None:
    """Write so many equal layers of Qwen3-30B-A3B in bf16, with random weights, as its checkpoint has them: each expert
    by itself."""
    from safetensors.torch import load_file
    from shapes import finetune_models
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {key: value for key, value in finetune_models.PRESETS["qwen3-30b-a3b"].items() if key != "model_type"}
    config = Qwen3MoeConfig(**sizes | {"num_hidden_layers": 1, "vocab_size": 32_000}, dtype="bfloat16")
    Qwen3MoeForCausalLM(config).bfloat16().save_pretrained(folder / "one", max_shard_size="100GB")
    saved = load_file(folder / "one" / "model.safetensors")
    shutil.rmtree(folder / "one")
    config.num_hidden_layers, config.architectures = layers, ["Qwen3MoeForCausalLM"]
    config.save_pretrained(folder)
    layer = {name: each for name, each in saved.items() if name.startswith("model.layers.0.")}
    write_shards(folder, layers, layer, {name: each for name, each in saved.items() if name not in layer}, 1)


def write_shards(
    folder: Path, layers: int, layer: dict[str, Any], outer: dict[str, Any], of_shard: int = SHARD_LAYERS
) -> None:
    """Write the tensors of the first layer for every layer, packed ones with random bytes."""
    from safetensors.torch import save_file

    of, total = {}, 0
    for first in (None, *range(0, layers, of_shard)):
        shard = outer if first is None else {}
        for number in range(first or 0, 0 if first is None else min(first + of_shard, layers)):
            for name, each in layer.items():
                made = torch.randint_like(each, 256) if each.dtype == torch.uint8 and each.numel() > 4096 else each
                shard[name.replace("layers.0.", f"layers.{number}.")] = made.clone()
        file = f"model-{'outer' if first is None else first:05}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        of |= dict.fromkeys(shard, file)
        total += sum(each.nbytes for each in shard.values())
    index = {"metadata": {"total_size": total}, "weight_map": of}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def load(folder: Path, rank: int, slide: dict[str, Any], *, copied: bool) -> dict[str, Any]:
    """Load, adapt, give to the engine and train a step, as in docs/adapters.md. `copied`: the weights are in memory of
    their own, as after packing, and not views of the files."""
    import deepspeed
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
    from transformers import AutoModelForCausalLM

    deepspeed.init_distributed("gloo" if not torch.cuda.is_available() else "nccl")
    options: dict[str, Any] = {"device_map": {"": "cpu"}, "dtype": torch.bfloat16}
    if "quantization_config" not in json.loads((folder / "config.json").read_text()):
        sys.path.append(str(Path(__file__).resolve().parent.parent / "examples"))
        from packed_experts import PackedExpertsConfig

        options["quantization_config"] = PackedExpertsConfig()
    peak = PeakOfOwnPages()
    restart_host_peak()
    peak.start()
    with peak.stage("from_pretrained"):
        model = AutoModelForCausalLM.from_pretrained(folder, **options)
        for tensor in (*model.parameters(), *packed_tensors(model)) if copied else ():
            tensor.data = tensor.data.clone()
    packed = sum(tensor.nbytes for tensor in (*model.parameters(), *packed_tensors(model)))
    with peak.stage("adapters"):
        model = prepare_model_for_kbit_training(model, gradient_checkpointing_kwargs={"use_reentrant": False})
        model = get_peft_model(model, LoraConfig(r=rank, target_modules="all-linear", task_type="CAUSAL_LM")).train()
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "ds_slide": {"enabled": True, **slide},
    }
    with peak.stage("initialize"):
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=trained)
    with peak.stage("step"):
        tokens = torch.arange(1, 9, device=engine.device)[None]
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()
    peak.stop()
    most = max(each for stage, each in peak.stages.items() if stage != "step")  # on a CPU it computes there, too
    on_accelerator = 0 if torch.cuda.is_available() else engine.optimizer.runtime.parts.plan.report()["window_bytes"]
    return {
        "packed_bytes": packed,
        "bar_bytes": int(BAR[0] * packed + BAR[1]),
        "peak_of_own_pages_bytes": peak.stages,
        "vm_hwm_bytes": host_memory()["rss_peak_bytes"],
        "slots_in_host_memory_bytes": on_accelerator,
        "meets_the_bar": most <= BAR[0] * packed + BAR[1],
        "peak_without_slots_to_packed": (most - on_accelerator) / packed,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("write", "write-experts", "load"))
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--inner", type=int, default=11_008)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--copied", action="store_true", help="the weights are in memory, and no views of the files")
    parser.add_argument("--slide", type=json.loads, default={"window": 2}, help='the JSON of "ds_slide"')
    given = parser.parse_args()
    if given.what == "write":
        write(given.checkpoint, given.layers, given.width, given.inner)
    elif given.what == "write-experts":
        write_experts(given.checkpoint, given.layers)
    else:
        print(json.dumps(load(given.checkpoint, given.rank, given.slide, copied=given.copied), indent=2))


if __name__ == "__main__":
    main()
