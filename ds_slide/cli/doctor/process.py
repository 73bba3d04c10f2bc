"""Host memory of a process that trains, before DS-Slide has built an engine.

It depends mostly on the versions of libraries: on H200s it was 1.01 GB one day and 1.12 the next
(benchmarks/results/2026-11-24_nvidia-h200_hand-sweep.md). So it is measured, in a process of its own: the process that
measures the other ceilings has buffers and libraries that no training script has.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from ds_slide.errors import SlideError

TRANSFORMERS = "transformers"
_LONGEST_S = 180
"""Limit for the whole process; on two cores it took 4 s."""
_BYTES = "resident bytes:"
_LIBRARIES = ("deepspeed", "ds_slide.integration.planning", "ds_slide.patching.apply", "ds_slide.runtime.engine")
_SHAPE = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
"""A Llama with heads of 64 elements, a size that GPUs' attention kernels take: 0.2 M parameters, 0.4 MB of weights."""


def measure_process(*, on_gpu: bool) -> int:
    """Return the resident bytes of a fresh process with torch, transformers, DeepSpeed and DS-Slide.

    The process has run a forward and a backward of a tiny causal LM, or of one product where transformers is missing.
    `on_gpu`: with a CUDA context. Raises SlideError, with a reason that is part of a sentence, where no such process
    runs.
    """
    package = Path(__file__).resolve().parents[3]
    command = (sys.executable, "-m", __name__, "cuda" if on_gpu else "cpu")
    try:
        # It runs in the folder of the package: another folder may have files with the names of libraries.
        ran = subprocess.run(command, cwd=package, capture_output=True, check=False, timeout=_LONGEST_S)
    except subprocess.TimeoutExpired as error:
        raise SlideError(f"it took more than {_LONGEST_S} s") from error
    except OSError as error:
        raise SlideError(f"{sys.executable} cannot be started, {error.strerror}") from error
    for line in reversed(ran.stdout.decode(errors="replace").splitlines()):
        if ran.returncode == 0 and line.startswith(_BYTES):
            return int(line.removeprefix(_BYTES))
    said = [line.strip() for line in ran.stderr.decode(errors="replace").splitlines() if line.strip()]
    raise SlideError(said[-1] if said else f"it ended with {ran.returncode} and said nothing")


def _train(device: torch.device) -> None:
    """Run one step of any training: its libraries, the context, the kernels of products and attention, autograd's
    threads. They bring most of the memory that importing has not brought: on an H200 0.40 of 1.41 GB without any engine
    (benchmarks/results/2026-11-23_nvidia-h200_default.jsonl, gpu-only)."""
    for name in _LIBRARIES:
        importlib.import_module(name)
    count = 128
    if importlib.util.find_spec(TRANSFORMERS) is None:
        weight = torch.randn(count, count, device=device, dtype=torch.bfloat16, requires_grad=True)
        (weight @ weight).sum().backward()
        return
    tokens = torch.zeros(1, count, dtype=torch.long, device=device)
    transformers: Any = importlib.import_module(TRANSFORMERS)
    config = transformers.AutoConfig.for_model("llama", **_SHAPE)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).to(device)
    model(input_ids=tokens, labels=tokens).loss.backward()


def _resident_bytes() -> int:
    """Return the bytes of this process's pages in memory, shared libraries included. VmHWM is the maximum of this
    figure, and the host peak of a run in benchmarks/step.py. Raises OSError or SlideError where the system has no such
    figure.
    """
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise SlideError("/proc/self/status has no VmRSS")


def _main() -> None:
    device = torch.device(sys.argv[1])
    _train(device)
    if device.type == "cuda":
        torch.cuda.synchronize()
    # Print on a line of its own, and end at once: the libraries' own endings take a second and may fail.
    sys.stdout.write(f"\n{_BYTES}{_resident_bytes()}\n")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    _main()
