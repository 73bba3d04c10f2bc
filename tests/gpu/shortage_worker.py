"""Trains while memory of the GPU is taken at one place of a step, and writes the digests of the weights.

python shortage_worker.py RESULTS.json; not a test module. So much is taken that a step fits only if all blocks are
recomputed. It is taken from torch's allocator directly, past the dispatcher: the engine must not make room for it.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import socket
import sys
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import worker
from torch import nn

from ds_slide.runtime.core.calls import in_backward
from ds_slide.runtime.memory import shortage

LIMIT = 3 << 30
BATCH, SEQUENCE, BLOCKS = 8, 256, 6
STEPS = 8
CASES = [
    ("forward", 4, "model.layers.3.mlp.up_proj"),
    ("forward", 5, "model.layers.0.self_attn.q_proj"),
    ("forward", 5, "model.layers.5.input_layernorm"),
    ("loss", 4, "model.norm"),
    ("loss", 5, "model.norm"),
    ("recomputation", 4, "mlp.gate_proj"),
    ("recomputation", 5, "self_attn.k_proj"),
    ("backward", 4, "model.layers.4.mlp.down_proj"),
    ("backward", 5, "model.layers.2.self_attn.o_proj"),
    ("backward", 5, "model.layers.5.mlp.up_proj"),
]
"""What is under way, the step, and the module at which memory is taken. A recomputation: in the first block that is
recomputed. The engine watches steps 4 and 5: two steps without a shortage show that there is enough."""
SLACK = 448 << 20
"""Bytes beside the need of a step: what the allocator loses to fragments, and two tensors of the size of the logits in
fp32, since autograd writes no gradient in place while a dispatcher mode is in force."""
BALLAST = 420 << 20
"""Bytes less than the limit that are taken before a run in which some blocks, not all, are to be recomputed."""


class Taker:
    """Takes at most `limit` bytes, and has them until `give_back`."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.is_armed = False
        self.pointers: list[int] = []
        self.taken = 0

    def take(self, *_: Any) -> None:
        if not self.is_armed:
            return
        self.is_armed = False
        nbytes = self.limit
        while nbytes >= 1 << 21:
            if self.taken + nbytes > self.limit:
                nbytes //= 2
                continue
            try:
                self.pointers.append(torch.cuda.caching_allocator_alloc(nbytes))
                self.taken += nbytes
            except torch.OutOfMemoryError:
                nbytes //= 2

    def give_back(self) -> None:
        for pointer in self.pointers:
            torch.cuda.caching_allocator_delete(pointer)
        self.pointers = []

    def watch(self, model: nn.Module, place: str, name: str) -> None:
        """Take memory at the module `name` of the model, or of each block where `place` is a recomputation."""
        for path, module in model.named_modules():
            if path == name or (place == "recomputation" and path.endswith(name)):
                self._watch(module, place)

    def _watch(self, module: nn.Module, place: str) -> None:
        def after(_module: nn.Module, _args: Any, output: torch.Tensor) -> None:
            if place == "backward" and output.requires_grad and not in_backward():
                output.register_hook(self.take)
            elif place != "backward" and in_backward() == (place == "recomputation"):
                self.take()

        module.register_forward_hook(after)


def model() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": BLOCKS, "vocab_size": 8192}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": SEQUENCE}
    config = LlamaConfig(**sizes, **heads, attention_dropout=0.1, tie_word_embeddings=False)
    with torch.device("cuda"):
        made = LlamaForCausalLM._from_config(config, attn_implementation="eager", dtype=torch.bfloat16)
    made.config.use_cache = False
    made.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return made.train()


def run(place: str, step: int, name: str, limit: int, **slide: Any) -> dict[str, Any]:
    """Of a run in which at most `limit` bytes are taken; with what torch had allocated at most."""
    import deepspeed

    made, taker = model(), Taker(limit)
    taker.watch(made, place, name)
    ballast = Taker(limit - BALLAST)
    if place == "recomputation":
        taker.limit = BALLAST
        ballast.is_armed = True
        ballast.take()
    scenario = worker.Scenario(place, clip=1.0, slide={"kernels": "off", **slide})
    config = {**worker.engine_config(scenario), "train_micro_batch_size_per_gpu": BATCH}
    engine, *_ = deepspeed.initialize(model=made, model_parameters=made.parameters(), config=config)
    try:
        return trained(engine, made, taker, step)
    finally:
        taker.give_back()
        ballast.give_back()
        engine.destroy()


def trained(engine: Any, made: nn.Module, taker: Taker, step: int) -> dict[str, Any]:
    import deepspeed

    torch.cuda.reset_peak_memory_stats()
    losses: list[float] = []
    generator = torch.Generator().manual_seed(1)
    torch.manual_seed(3)
    kept: list[int] = []
    for number in range(1, STEPS + 1):
        tokens = torch.randint(8192, (BATCH, SEQUENCE), generator=generator).cuda()
        taker.is_armed = number == step
        loss = engine(input_ids=tokens, labels=tokens, use_cache=False).loss
        engine.backward(loss)
        taker.give_back()
        engine.step()
        losses.append(loss.item())
        kept.append(engine.optimizer.slide_stats().get("activations", {}).get("kept_bytes", 0))
    peak = torch.cuda.max_memory_allocated()
    with deepspeed.zero.GatheredParameters(list(made.parameters())):
        parts = (parameter.detach().float().cpu().numpy().tobytes() for parameter in made.parameters())
        digest = hashlib.sha256(b"".join(parts)).hexdigest()
    promoted = engine.optimizer.slide_stats()["memory"]["promoted_units"]
    return {
        "losses": losses, "digest": digest, "taken": taker.taken, "kept": kept, "promoted": promoted, "peak": peak,
    }  # fmt: skip


def main(target: Path) -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.cuda.set_per_process_memory_fraction(LIMIT / torch.cuda.mem_get_info()[1])
    # What a step takes if all blocks are recomputed and all states are in host memory.
    needed = run("", 0, "", 0, gpu_states=0, activations="as_written")["peak"]
    limit = LIMIT - needed - SLACK
    results: dict[str, Any] = {}
    # A small model leaves much of any GPU free: without this the engine would see no need to watch.
    with patch.object(shortage, "GPU_SHARES", replace(shortage.GPU_SHARES, roomy=10)):
        for states in (0, "auto"):
            for place, step, name in [("", 0, ""), *CASES]:
                begin = time.perf_counter()
                try:
                    result = run(place, step, name, limit, gpu_states=states)
                except Exception:
                    result = {"error": traceback.format_exc()[-3000:]}
                result["seconds"] = round(time.perf_counter() - begin, 1)
                result["limit"] = limit
                results[f"{states}: {place} {step} {name}" if place else f"{states}"] = result
                target.write_text(json.dumps(results))
                gc.collect()
                torch.cuda.empty_cache()


if __name__ == "__main__":
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    launcher = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update(launcher)
    main(Path(sys.argv[1]))
