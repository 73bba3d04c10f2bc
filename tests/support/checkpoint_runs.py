"""Trainings of a small model that are saved half way and go on, and what saving costs and leaves."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from harness import Result, batches, ds_config, engine_for, llama, states_of, train
from torch import nn

HALF = 4
WHOLE = 2 * HALF
GATHER = {"stage3_gather_16bit_weights_on_model_save": True}
WARMUP = {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 1e-3, "warmup_num_steps": 6}}


@dataclass(frozen=True)
class Case:
    """A kind of training. `prepare` changes the model and returns what `model_parameters` is."""

    clip: float = 1.0
    accumulation: int = 1
    zero: dict[str, Any] = field(default_factory=dict)
    others: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    slide: dict[str, Any] = field(default_factory=dict)
    prepare: Callable[[nn.Module], Any] | None = None

    def engine(self, seed: int, *, slide: bool = True) -> Any:
        """Context of an engine whose weights come from `seed`."""
        model = llama(seed, num_hidden_layers=3, **self.model)
        arguments = {} if self.prepare is None else {"model_parameters": self.prepare(model)}
        config = ds_config(
            {"window": 2, **self.slide} if slide else None,
            clip=self.clip,
            accumulation=self.accumulation,
            **self.others,
        )
        config["zero_optimization"] = {**config["zero_optimization"], **GATHER, **self.zero}
        return engine_for(model, config, **arguments)


def freeze(model: nn.Module) -> list[nn.Parameter]:
    model.model.embed_tokens.requires_grad_(False)
    model.model.layers[1].mlp.requires_grad_(False)
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    return [{"params": matrices}, {"params": vectors, "weight_decay": 0.0, "lr": 3e-3}]


CASES = {
    "clipping": Case(),
    "no_clipping": Case(clip=0.0),
    "accumulation_and_schedule": Case(accumulation=2, others={"scheduler": WARMUP}),
    "frozen": Case(prepare=freeze),
    "tied": Case(clip=0.0, model={"tie_word_embeddings": True}),
    "two_groups_in_sub_groups": Case(prepare=two_groups, zero={"sub_group_size": 20_000}),
    "fp32": Case(others={"bf16": None}),
    "states_on_the_gpu": Case(slide={"gpu_states": 400_000}),
}


@dataclass(frozen=True)
class Run:
    """A run that was saved half way and went on. `half`: its states then; `rest`: its second half."""

    folder: Path
    half: Result
    rest: Result


def continued(engine: Any, half: int) -> Result:
    """Train one half of the data and read everything back."""
    result = train(engine, batches(WHOLE)[half * HALF : (half + 1) * HALF])
    result.states = states_of(engine.module)
    return result


def saved_and_continued(case: Case, folder: Path, *, slide: bool = True) -> Run:
    """Saved with the last step's updates pending."""
    with case.engine(0, slide=slide) as engine:
        half = train(engine, batches(WHOLE)[:HALF])
        engine.save_checkpoint(folder, client_state={"note": "kept"})
        half.states = states_of(engine.module)
        engine.save_16bit_model(str(folder), "model.bin")
        return Run(folder, half, continued(engine, 1))


def leftovers(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]


class Wide(nn.Module):
    """16.8 million parameters: 200 MB of states."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2048, 2048, bias=False) for _ in range(4))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return hidden


M_MMAP_THRESHOLD = -3
"""Of glibc's `mallopt`."""


def peak_growth(action: Callable[[], Any]) -> int:
    """Bytes by which the resident memory of this process rose at most while `action` ran, without the pages of files
    (147 MB of libraries) that a busy machine had taken away and that came back."""

    def status(key: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(key))

    # What is freed goes back at once. glibc keeps pieces of 8 MiB for reuse, in a heap for each thread, once it has
    # seen such pieces freed: growth was 0 to 48 MiB by chance, and 72 MiB once in a suite; so it is 8 to 32.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 20)
    gc.collect()  # what earlier tests have left is not in the way
    before, files = status("VmRSS"), status("RssFile")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    action()
    return status("VmHWM") - before - max(0, status("RssFile") - files)
