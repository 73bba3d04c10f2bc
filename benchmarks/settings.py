"""One benchmark setting: which system trains which model on how many tokens, and with what limits."""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bases import BASES, TARGETS

SYSTEMS = ("slide", "stock", "gpu-only")
BUILDS = ("accelerator", "host", "partitioned")
OPTIMIZERS = ("adamw", "muon", "adafactor", "paged-adamw-8bit")
PATCHES = ("", "ours", "liger", "liger-plain-loss")
# What a page shows in place of a folder of the machine that it was made on.
HIDDEN_FOLDER = "DIR"


def option(default: Any, text: str, choices: Sequence[str] = ()) -> Any:
    """A field of `Setting` with what `--help` says of its option."""
    return dataclasses.field(default=default, metadata={"help": text, "choices": choices or None})


def json_option(text: str) -> Any:
    """The same for a JSON object, empty by default."""
    return dataclasses.field(default_factory=dict, metadata={"help": text + ", as JSON"})


@dataclass(frozen=True)
class Setting:
    """What `step.py` runs; every field is a command line option of the same name."""

    system: str
    """`slide` and `stock` share one DeepSpeed JSON, apart from the "ds_slide" key; `gpu-only` is plain torch."""
    model: str = option("qwen2.5-3b", "preset of examples/finetune_models.py, shape of shapes.py or a local directory")
    adapter: int = option(0, "rank of LoRA, 0: all weights are trained")
    targets: str = option("all-linear", "what has LoRA; experts: fused ones, and attention", TARGETS)
    base: str = option("bf16", "how the frozen weights of linear layers are kept, with --adapter", BASES)
    batch: int = option(8, "sequences of one micro batch")
    seq: int = option(2048, "tokens of one sequence")
    shortest: int = option(
        0, "tokens of the shortest sequence: each micro batch draws its length up to --seq; 0: no draw"
    )
    images: int = option(0, "with a vision-language model, ranks whose batches have images, from rank 0")
    grad_accum: int = option(1, "micro batches of one optimizer step")
    steps: int = option(8, "timed steps")
    # Stock ZeRO-3 prefetches nothing until it has recorded a trace.
    warmup: int = option(3, "steps before the clock starts")
    clip: float = option(1.0, "global gradient norm limit, 0: no clipping")
    lr: float = option(1e-5, "constant learning rate")
    optimizer: str = option("adamw", "of the JSON, or for the last two an object of the script", OPTIMIZERS)
    optimizer_params: dict[str, Any] = json_option("changes to the optimizer's parameters")  # noqa: RUF009
    seed: int = option(0, "seed of the weights; the tokens use seed + 1")
    # Repeated in turn, so that the loss falls and equal losses say something.
    distinct_batches: int = option(4, "different micro batches")
    # DeepSpeed's own sends the inputs of blocks to host memory, and needs a GPU.
    checkpointing: str = option(
        "non-reentrant", "of activations", ("non-reentrant", "reentrant", "deepspeed-cpu", "none")
    )
    gpu_fraction: float = option(1.0, "share of the GPU that torch may allocate, which imitates a smaller card")
    patch: str = option("", "kernels put into the model before the system sees it", PATCHES)
    compile: str = option(
        "", "torch.compile takes engine.compile() or the model of gpu-only, or each layer", ("", "model", "layers")
    )
    item: bool = option(True, "do not read the loss after every step, as a training loop that prints it does")
    build: str = option(
        "accelerator",
        "where the weights are made: there, or module by module and kept on the host, or under zero.Init",
        BUILDS,
    )
    offload: str = option("cpu", "of optimizer and parameters; nvme is ZeRO-Infinity for `stock`", ("cpu", "nvme"))
    nvme_path: str = option("", "folder on the disk of --offload nvme; every run uses and removes a folder in it")
    slide: dict[str, Any] = json_option('additions to "ds_slide"; "host_memory": "half" is half of the states')  # noqa: RUF009
    aio: dict[str, Any] = json_option('changes to "aio", with nvme')  # noqa: RUF009
    zero: dict[str, Any] = json_option('changes to "zero_optimization" of slide and stock')  # noqa: RUF009

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
            if field.name == "item":
                words.append("--no-item")
            else:
                words += [
                    "--" + field.name.replace("_", "-"),
                    json.dumps(value) if isinstance(value, dict) else str(value),
                ]
        return words

    def shown(self) -> Setting:
        """As a page may show it: without the name of a folder of this machine."""
        return dataclasses.replace(self, nvme_path=HIDDEN_FOLDER if self.nvme_path else "")

    def command(self) -> str:
        return "python3 benchmarks/step.py " + shlex.join(self.shown().arguments())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One option per field of `Setting`."""
    parser.add_argument("--system", choices=SYSTEMS, required=True)
    for field in dataclasses.fields(Setting)[1:]:
        default = getattr(Setting("slide"), field.name)
        name, text = "--" + field.name.replace("_", "-"), field.metadata["help"]
        if default is True:
            parser.add_argument(f"--no-{field.name}", dest=field.name, action="store_false", help=text)
            continue
        kind = json.loads if default == {} else type(default)
        parser.add_argument(name, type=kind, default=default, choices=field.metadata.get("choices"), help=text)


def from_arguments(arguments: argparse.Namespace) -> Setting:
    """Raises ValueError when --offload nvme has no folder to go to, a packed base has no adapters, the engine would
    patch what is patched, or half of the states of another optimizer than AdamW is asked for."""
    if arguments.patch and arguments.system == "slide" and arguments.slide.get("kernels") != "off":
        raise ValueError('--patch with --system slide needs --slide \'{"kernels": "off"}\', or the engine patches too')
    if arguments.base != "bf16" and not arguments.adapter:
        raise ValueError(f"--base {arguments.base} cannot be trained itself: add --adapter RANK")
    if arguments.slide.get("host_memory") == "half" and arguments.optimizer != "adamw":
        raise ValueError('"host_memory": "half" counts the states of AdamW; give a number of bytes')
    if arguments.offload == "nvme" and not arguments.nvme_path:
        raise ValueError("--offload nvme needs --nvme-path DIR, a folder on the disk to use")
    return Setting(**{field.name: getattr(arguments, field.name) for field in dataclasses.fields(Setting)})
