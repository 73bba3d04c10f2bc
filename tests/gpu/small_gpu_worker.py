"""Trains a few steps with torch limited to a part of the GPU, and prints as JSON what it took. Not a test module.

python small_gpu_worker.py OPTIONS, with those of `main` as a JSON object.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from typing import Any

import torch
from small_gpu import BLOCKS

SEQUENCE = 4096


def build(blocks: int, width: int) -> Any:
    """Wide blocks of few parameters, of which the inputs are what takes memory, and no logits to speak of."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=width,
        num_hidden_layers=blocks,
        num_attention_heads=width // 128,
        num_key_value_heads=2,
        vocab_size=512,
        max_position_embeddings=SEQUENCE,
        use_cache=False,
    )
    torch.manual_seed(0)
    with torch.device("cuda", 0):
        model = LlamaForCausalLM._from_config(config, attn_implementation="sdpa", dtype=torch.bfloat16)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def main(
    limit: int,
    steps: int,
    batches: list[int],
    slide: dict[str, Any],
    disk: str = "",
    blocks: int = BLOCKS,
    width: int = 1024,
) -> dict[str, Any]:
    """Train `steps` steps of each number of sequences in `batches`. `slide`: of the JSON's block. `disk`: a directory
    to which inputs of blocks go while the states fill what host memory may be used."""
    import deepspeed

    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(limit / total)
    model = build(blocks, width)
    config = {
        "train_micro_batch_size_per_gpu": batches[0],
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
        "steps_per_print": 10**9,
        "ds_slide": {"enabled": True, "window": 3, "gpu_states": 0, **slide},
    }
    if disk:
        config["zero_optimization"]["offload_optimizer"] = {"device": "nvme", "nvme_path": disk}
        states = 12 * sum(parameter.numel() for parameter in model.parameters())
        config["ds_slide"] |= {"host_memory": states + (16 << 20), "speculate": False}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    losses: list[float] = []
    seconds: list[float] = []
    result: dict[str, Any] = {"out_of_memory": False, "peaks": [], "losses": losses, "seconds": seconds}
    try:
        for sequences in batches:
            tokens = torch.randint(512, (sequences, SEQUENCE), device="cuda")
            for _ in range(steps):
                torch.cuda.synchronize()
                begin = time.perf_counter()
                loss = engine(input_ids=tokens, labels=tokens).loss
                engine.backward(loss)
                engine.step()
                losses.append(float(loss))
                seconds.append(time.perf_counter() - begin)
            # Of the last steps: in the first ones the engine itself begins to count anew.
            result["peaks"].append(torch.cuda.max_memory_allocated())
            torch.cuda.reset_peak_memory_stats()
    except torch.OutOfMemoryError:
        result["out_of_memory"] = True
        return result
    result["activations"] = engine.optimizer.slide_stats()["activations"]
    times = engine.optimizer.runtime.parts.spare.activations.times
    # What has decided between blocks that are mixed and ones that are not.
    result["of_a_block"] = {"forwards": list(times._seconds.values()), "mixing": list(times._mixing_s.values())}
    engine.destroy()
    return result


if __name__ == "__main__":
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    os.environ.update(
        {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    )
    import ds_slide  # noqa: F401  (for a source tree on the path; an installed package is found by itself)

    print("RESULT " + json.dumps(main(**json.loads(sys.argv[1]))), flush=True)
