"""What a process takes that trains: host memory, before DS-Slide has built an engine, and the host's time under one.

The memory depends on the versions of libraries more than on anything else: on H200s it was 1.01 GB one day and 1.12 the
next, before an engine was there (benchmarks/results/2026-11-24_nvidia-h200_hand-sweep.md). So it is measured, in a
process of its own: what measures the other ceilings has buffers and libraries that no training script has. The time is
that of Python, of the engine's hooks and of launches, which small models wait for.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ds_slide.errors import SlideError

TRANSFORMERS = "transformers"
_LONGEST_S = 180
"""Of the whole process; on two cores it took 4, and 33 with the steps of two engines on the processor."""
_BYTES, _WHY_NONE = "resident bytes:", "no seconds under an engine:"
_OPERATION, _VISIT = "seconds of an operation:", "seconds of a block:"
_UNDER_ENGINE = "under-engine"
_LIBRARIES = ("deepspeed", "ds_slide.integration.planning", "ds_slide.patching.apply", "ds_slide.runtime.engine")
_HOST_TIME = "ds_slide.integration.host_time"
"""It builds engines, which is for the rooms above this one: the process imports it by name, as it does libraries."""
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
_TIMED_LAYERS = 24
"""As many as models have whose steps wait for the host, so that they share what a micro-batch takes once."""


@dataclass(frozen=True)
class ProcessFigures:
    """`resident_bytes`: of host memory, after one forward and backward of a tiny causal LM. `engine_operation_s`: of
    the host under an engine, for an operation of the GPU, as `ds_slide.plan.trace` counts them, and `engine_visit_s`
    for a block that passes through the window, each way, beside them; None where it was not asked for, without
    transformers, and where `why_none` says what failed."""

    resident_bytes: int
    engine_operation_s: float | None = None
    engine_visit_s: float | None = None
    why_none: str = ""


def measure_process(*, on_gpu: bool, under_engine: bool | None = None) -> ProcessFigures:
    """Of a fresh process with torch, transformers, DeepSpeed and DS-Slide. `on_gpu`: with a CUDA context.
    `under_engine`: the host's time, too; by default on a GPU only, as nothing waits for launches elsewhere. Without
    transformers its bytes are those of a product. Raises SlideError, with a reason that is part of a sentence, where no
    such process runs; its bytes are answered also where an engine fails in it."""
    asks = on_gpu if under_engine is None else under_engine
    out, why = _ran("cuda" if on_gpu else "cpu", *([_UNDER_ENGINE] if asks else ()))
    resident = _answer(out, _BYTES)
    if resident is None:
        raise SlideError(why or "it said nothing")
    operation, visit = (float(found) if (found := _answer(out, each)) else None for each in (_OPERATION, _VISIT))
    return ProcessFigures(int(resident), operation, visit, _answer(out, _WHY_NONE) or why)


def _ran(*arguments: str) -> tuple[str, str]:
    """What a process of this module has written, and why it failed, "" where it did not. Raises SlideError where it
    cannot be started."""
    package = Path(__file__).resolve().parents[3]
    command = (sys.executable, "-m", __name__, *arguments)
    try:
        # In the folder of the package: another one may have files with the names of libraries.
        ran = subprocess.run(command, cwd=package, capture_output=True, check=False, timeout=_LONGEST_S)
    except subprocess.TimeoutExpired as error:
        return (error.stdout or b"").decode(errors="replace"), f"it took more than {_LONGEST_S} s"
    except OSError as error:
        raise SlideError(f"{sys.executable} cannot be started, {error.strerror}") from error
    out, lines = ran.stdout.decode(errors="replace"), ran.stderr.decode(errors="replace").splitlines()
    if ran.returncode == 0:
        return out, ""
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return out, last or f"it ended with {ran.returncode} and said nothing"


def _answer(text: str, name: str) -> str | None:
    """What the last line of `text` that begins with `name` has behind it."""
    return next((line.removeprefix(name) for line in reversed(text.splitlines()) if line.startswith(name)), None)


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


def _engine_host_s(device: torch.device) -> tuple[float, float]:
    """Under engines that are built here. Raises whatever building them raises."""
    shape = {**_SHAPE, "num_hidden_layers": _TIMED_LAYERS}
    measure: Any = importlib.import_module(_HOST_TIME).engine_host_s
    operation, visit = measure(partial(_model, shape), _TIMED_LAYERS, _TOKENS, device)
    return float(operation), float(visit)


def _engine_lines(device: torch.device) -> str:
    """The answers about the host's time, or the reason why there are none: without them a plan is made, too."""
    try:
        operation, visit = _engine_host_s(device)
        return f"{_OPERATION}{operation}\n{_VISIT}{visit}"
    except Exception as error:
        first = next(iter(str(error).splitlines()), "")
        return f"{_WHY_NONE}{type(error).__name__}: {first}"


def _resident_bytes() -> int:
    """Pages of this process that are in memory, those of shared libraries too: what VmHWM is the most of, which is the
    host peak of a run in benchmarks/step.py. Raises OSError or SlideError where the system has no such figure."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise SlideError("/proc/self/status has no VmRSS")


def _write(answer: str) -> None:
    """On a line of its own, and at once."""
    sys.stdout.write(f"\n{answer}\n")
    sys.stdout.flush()


def _main() -> None:
    device = torch.device(sys.argv[1])
    _train(device)
    if device.type == "cuda":
        torch.cuda.synchronize()
    _write(f"{_BYTES}{_resident_bytes()}")
    # Behind it, because an engine stays in memory, and may end the process.
    if _UNDER_ENGINE in sys.argv and importlib.util.find_spec(TRANSFORMERS) is not None:
        _write(_engine_lines(device))
    # What libraries do at the end takes a second and may fail, and the answer is there.
    os._exit(0)


if __name__ == "__main__":
    _main()
