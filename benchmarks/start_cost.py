"""What an engine costs before its first step: the imports, and `deepspeed.initialize` of Qwen2.5-0.5B's shape.

    DS_ACCELERATOR=cpu python benchmarks/start_cost.py [--imports]

Prints a line: seconds of the clock and of the processor for the imports of DS-Slide, which follow those of torch,
DeepSpeed and transformers, and the same for `initialize`. `--imports` leaves `initialize` out. It needs 8 GB of memory.
Compare two trees by running them in turns, each with its folder as PYTHONPATH. On a busy machine the processor's
seconds say more.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import torch
from transformers import AutoConfig, AutoModelForCausalLM

SHAPE = Path(__file__).resolve().parents[1] / "configs" / "models" / "qwen2.5-0.5b.json"
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    "ds_slide": {"enabled": True},
}


def timed(call: Callable[[], Any]) -> tuple[Any, str]:
    """Return the result of a call and the text of its seconds: of the clock, and of the processor."""
    clock, processor = time.perf_counter(), time.process_time()
    result = call()
    return result, f"{time.perf_counter() - clock:6.2f} {time.process_time() - processor:6.2f}"


def imports() -> None:
    import ds_slide._native
    import ds_slide.integration.optimizer  # noqa: F401


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    made: torch.nn.Module = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**json.loads(SHAPE.read_text())), dtype=torch.bfloat16
    )
    return made


def main() -> None:
    import_text = timed(imports)[1]
    if "--imports" in sys.argv:
        print(f"imports {import_text}")
        return
    deepspeed.init_distributed()
    trained = model()
    parameters = list(trained.parameters())
    (engine, *_), text = timed(lambda: deepspeed.initialize(model=trained, config=CONFIG, model_parameters=parameters))
    print(f"imports {import_text}  initialize {text}")
    engine.destroy()


if __name__ == "__main__":
    main()
