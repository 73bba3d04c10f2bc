"""What a process takes that trains, before DS-Slide has built an engine in it: host memory, and the host's time.

The memory depends on the versions of libraries more than on anything else: on H200s it was 1.01 GB one day and 1.12 the
next, before an engine was there (benchmarks/results/2026-11-24_nvidia-h200_hand-sweep.md). So it is measured, in a
process of its own: what measures the other ceilings has buffers and libraries that no training script has. The time is
that of Python and of launches, which small models wait for.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ds_slide.errors import SlideError
from ds_slide.plan.trace import TracedUnit, trace_step

TRANSFORMERS = "transformers"
_LONGEST_S = 180
"""Of the whole process; on two cores it took 6."""
_BYTES, _OPERATION = "resident bytes:", "seconds of an operation:"
_LIBRARIES = ("deepspeed", "ds_slide.integration.planning", "ds_slide.patching.apply", "ds_slide.runtime.engine")
_SHAPE = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
"""Of a Llama with heads of 64 elements, for which GPUs have attention kernels: 0.2 M parameters, 0.4 MB of weights."""
_TOKENS = 128
_TIMED_LAYERS, _TIMED_STEPS = 8, 20
"""So that layers are most of a step, which the GPU has done long before the next one is launched."""


@dataclass(frozen=True)
class ProcessFigures:
    """`resident_bytes`: of host memory, after one forward and backward of a tiny causal LM. `operation_s`: of the host
    for an operation of the GPU, as `ds_slide.plan.trace` counts them; None without a GPU or without transformers."""

    resident_bytes: int
    operation_s: float | None = None


def measure_process(*, on_gpu: bool) -> ProcessFigures:
    """Of a fresh process with torch, transformers, DeepSpeed and DS-Slide. `on_gpu`: with a CUDA context. Without
    transformers its bytes are those of a product. Raises SlideError, with a reason that is part of a sentence, where no
    such process runs."""
    package = Path(__file__).resolve().parents[3]
    command = (sys.executable, "-m", __name__, "cuda" if on_gpu else "cpu")
    try:
        # In the folder of the package: another one may have files with the names of libraries.
        ran = subprocess.run(command, cwd=package, capture_output=True, text=True, check=False, timeout=_LONGEST_S)
    except subprocess.TimeoutExpired as error:
        raise SlideError(f"it took more than {_LONGEST_S} s") from error
    except OSError as error:
        raise SlideError(f"{sys.executable} cannot be started, {error.strerror}") from error
    if ran.returncode == 0 and (resident := _answer(ran.stdout, _BYTES)) is not None:
        return ProcessFigures(int(resident), _answer(ran.stdout, _OPERATION))
    last = next((line.strip() for line in reversed(ran.stderr.splitlines()) if line.strip()), "")
    raise SlideError(last or f"it ended with {ran.returncode} and said nothing")


def _answer(text: str, name: str) -> float | None:
    """What a line of `text` has behind `name`, where it is more than 0."""
    answers = [float(line.removeprefix(name)) for line in text.splitlines() if line.startswith(name)]
    return answers[-1] if answers and answers[-1] > 0 else None


def _train(device: torch.device) -> None:
    """One step of any training: its libraries, the context, the kernels of products and attention, autograd's threads.
    With them comes most of what importing has not brought: on an H200 0.40 of 1.41 GB without any engine
    (benchmarks/results/2026-11-23_nvidia-h200_default.jsonl, gpu-only)."""
    for name in _LIBRARIES:
        importlib.import_module(name)
    if importlib.util.find_spec(TRANSFORMERS) is None:
        weight = torch.randn(_TOKENS, _TOKENS, device=device, dtype=torch.bfloat16, requires_grad=True)
        (weight @ weight).sum().backward()
        return
    tokens = torch.zeros(1, _TOKENS, dtype=torch.long, device=device)
    _model(_SHAPE, device)(input_ids=tokens, labels=tokens).loss.backward()


def _model(shape: Mapping[str, int], device: torch.device) -> Any:
    transformers: Any = importlib.import_module(TRANSFORMERS)
    config = transformers.AutoConfig.for_model("llama", **shape)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).to(device)


def _operation_s(device: torch.device) -> float:
    """The median of steps in which the host launches, and the GPU waits for it."""
    shape = {**_SHAPE, "num_hidden_layers": _TIMED_LAYERS}
    planned = _model(shape, torch.device("meta"))
    trace = trace_step(planned, [TracedUnit(list(planned.parameters()))], 1, _TOKENS, 1 << 30)
    count = sum(segment.operations.total() for segment in (*trace.forward, *trace.backward))
    model, tokens = _model(shape, device), torch.zeros(1, _TOKENS, dtype=torch.long, device=device)
    seconds = []
    for _ in range(1 + _TIMED_STEPS):
        torch.cuda.synchronize(device)
        begin = time.perf_counter()
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - begin)
        model.zero_grad()
    return statistics.median(seconds[1:]) / count


def _resident_bytes() -> int:
    """Pages of this process that are in memory, those of shared libraries too: what VmHWM is the most of, which is the
    host peak of a run in benchmarks/step.py. Raises OSError or SlideError where the system has no such figure."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise SlideError("/proc/self/status has no VmRSS")


def _main() -> None:
    device = torch.device(sys.argv[1])
    _train(device)
    if device.type == "cuda":
        torch.cuda.synchronize()
    sys.stdout.write(f"\n{_BYTES}{_resident_bytes()}\n")
    if device.type == "cuda" and importlib.util.find_spec(TRANSFORMERS) is not None:
        sys.stdout.write(f"{_OPERATION}{_operation_s(device)}\n")
    sys.stdout.flush()
    # What libraries do at the end takes a second and may fail, and the answer is there.
    os._exit(0)


if __name__ == "__main__":
    _main()
