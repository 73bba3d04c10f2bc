"""One benchmark setting: which system trains which model on how many tokens, and with what limits."""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
from dataclasses import dataclass
from typing import Any

SYSTEMS = ("slide", "stock", "gpu-only")
CHECKPOINTING = ("non-reentrant", "reentrant", "none")
OFFLOADS = ("cpu", "nvme")
BUILDS = ("accelerator", "host")
PATCHES = ("", "ours", "liger", "liger-plain-loss")
# What a page shows in place of a folder of the machine that it was made on.
HIDDEN_FOLDER = "DIR"


@dataclass(frozen=True)
class Setting:
    """What `step.py` runs; every field is a command line option of the same name."""

    system: str
    """`slide` and `stock` share one DeepSpeed JSON, apart from the "ds_slide" key; `gpu-only` is plain torch."""
    model: str = "qwen2.5-3b"
    """Preset of examples/finetune_models.py, shape of shapes.py or a local Hugging Face directory."""
    batch: int = 8
    """Sequences of one micro batch."""
    seq: int = 2048
    """Tokens of one sequence."""
    grad_accum: int = 1
    """Micro batches of one optimizer step."""
    steps: int = 8
    """Timed steps."""
    warmup: int = 3
    """Steps before the clock starts: stock ZeRO-3 prefetches nothing until it has recorded a trace."""
    clip: float = 1.0
    """Global gradient norm limit; 0 switches clipping off."""
    lr: float = 1e-5
    """Constant learning rate."""
    seed: int = 0
    """Seed of the weights; the tokens use seed + 1."""
    distinct_batches: int = 4
    """Different micro batches, repeated in turn: the loss then falls, so that equal losses say something."""
    checkpointing: str = "non-reentrant"
    """Gradient checkpointing: non-reentrant, reentrant or none."""
    gpu_fraction: float = 1.0
    """Share of the GPU that torch may allocate, which imitates a smaller card."""
    patch: str = ""
    """Kernels put into the model before the system sees it: `ours`, `liger`, or Liger's without its fused loss."""
    item: bool = True
    """Read the loss on the host after every step, as a training loop that prints it does."""
    build: str = "accelerator"
    """Where the weights are made: on the accelerator, or module by module there and kept in host memory."""
    offload: str = "cpu"
    """Device of offload_optimizer and offload_param: cpu, or nvme (ZeRO-Infinity for `stock`)."""
    nvme_path: str = ""
    """Folder on the disk of `--offload nvme`; every run uses and removes a folder of its own in it."""
    slide: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Additions to the "ds_slide" block (system `slide`). `"host_memory": "half"`: half of the states' bytes."""
    aio: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Changes to the "aio" block (with nvme)."""
    zero: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Changes to "zero_optimization" (systems `slide` and `stock`)."""

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.seq * self.grad_accum

    def arguments(self) -> list[str]:
        """The options of `step.py` that give this setting; defaults are left out."""
        words = ["--system", self.system]
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            default = field.default_factory() if callable(field.default_factory) else field.default
            if field.name == "system" or value == default:
                continue
            option = "--" + field.name.replace("_", "-")
            if field.name == "item":
                words.append("--no-item")
            else:
                words += [option, json.dumps(value) if isinstance(value, dict) else str(value)]
        return words

    def shown(self) -> Setting:
        """As a page may show it: without the name of a folder of this machine."""
        return dataclasses.replace(self, nvme_path=HIDDEN_FOLDER if self.nvme_path else "")

    def command(self) -> str:
        return "python3 benchmarks/step.py " + shlex.join(self.shown().arguments())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One option per field of `Setting`."""
    defaults = Setting("slide")
    parser.add_argument("--system", choices=SYSTEMS, required=True)
    parser.add_argument("--model", default=defaults.model, help="preset, shape of shapes.py, or a directory")
    parser.add_argument("--batch", type=int, default=defaults.batch, help="sequences of one micro batch")
    parser.add_argument("--seq", type=int, default=defaults.seq, help="tokens of one sequence")
    parser.add_argument("--grad-accum", type=int, default=defaults.grad_accum, help="micro batches of one step")
    parser.add_argument("--steps", type=int, default=defaults.steps, help="timed steps")
    parser.add_argument("--warmup", type=int, default=defaults.warmup, help="steps before the clock starts")
    parser.add_argument("--clip", type=float, default=defaults.clip, help="global gradient norm limit, 0: no clipping")
    parser.add_argument("--lr", type=float, default=defaults.lr)
    parser.add_argument("--seed", type=int, default=defaults.seed)
    parser.add_argument("--distinct-batches", type=int, default=defaults.distinct_batches)
    parser.add_argument("--checkpointing", choices=CHECKPOINTING, default=defaults.checkpointing)
    parser.add_argument("--gpu-fraction", type=float, default=defaults.gpu_fraction, help="share of the GPU to use")
    parser.add_argument("--patch", choices=PATCHES, default=defaults.patch, help="kernels to put into the model")
    parser.add_argument("--no-item", dest="item", action="store_false", help="do not read the loss after every step")
    parser.add_argument("--build", choices=BUILDS, default=defaults.build, help="where the weights are made and kept")
    parser.add_argument("--offload", choices=OFFLOADS, default=defaults.offload, help="where states and weights go")
    parser.add_argument("--nvme-path", default="", help="folder on the disk of --offload nvme")
    parser.add_argument("--aio", type=json.loads, default={}, help='changes to "aio", as JSON')
    parser.add_argument("--slide", type=json.loads, default={}, help='additions to "ds_slide", as JSON')
    parser.add_argument("--zero", type=json.loads, default={}, help='changes to "zero_optimization", as JSON')


def from_arguments(arguments: argparse.Namespace) -> Setting:
    """Raises ValueError when --offload nvme has no folder to go to, or the engine would patch what is patched."""
    if arguments.patch and arguments.system == "slide" and arguments.slide.get("kernels") != "off":
        raise ValueError('--patch with --system slide needs --slide \'{"kernels": "off"}\', or the engine patches too')
    if arguments.offload == "nvme" and not arguments.nvme_path:
        raise ValueError("--offload nvme needs --nvme-path DIR, a folder on the disk to use")
    return Setting(**{field.name: getattr(arguments, field.name) for field in dataclasses.fields(Setting)})
