"""One rank of `test_sequences`: trains sequences that are divided over two ranks, and leaves what came out.

python sequences_worker.py FOLDER RANKS NAME...
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
import two_ranks
from activation_runs import handle_of
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF, UlyssesSPDataLoaderAdapter
from harness import BATCH, Batch, batches, ds_config, engine_for, llama, on_ssd, states_of, train
from tiled import tiled
from torch import nn
from universal import convert, universal

from ds_slide.errors import SlideError

STEPS, BLOCKS, SEQUENCE = 4, 3, 2


@dataclass(frozen=True)
class Run:
    """`reentrant`: the form of the script's activation checkpointing; None without. `moves`: inputs of blocks that
    leave the GPU, whose memory a limit stands for. `resumes`: saved half way, and continued by another engine, from
    what was saved or from what DeepSpeed has made universal of it. `adapted`: LoRA in all blocks trains alone."""

    slide: dict[str, Any] | None = field(default_factory=lambda: {"window": 2})
    clip: float = 1.0
    accumulation: int = 1
    reentrant: bool | None = None
    moves: int = 0
    tiled: bool = False
    resumes: Literal["", "as saved", "universal"] = ""
    adapted: bool = False
    others: dict[str, Any] = field(default_factory=dict)

    @property
    def config(self) -> dict[str, Any]:
        return ds_config(self.slide, clip=self.clip, accumulation=self.accumulation, **self.others)


FP16: dict[str, Any] = {"bf16": None, "fp16": {"enabled": True, "initial_scale_power": 8}}
FP32_SUMS = {"data_types": {"grad_accum_dtype": "fp32"}}
LIMITED = {"window": 2, "gpu_memory": "1GiB"}
RUNS = {
    "clipping": Run(),
    "immediate": Run(clip=0.0),
    "accumulation": Run(accumulation=2),
    "checkpointed": Run(reentrant=False),
    "checkpointed-reentrant": Run(reentrant=True),
    "resumed": Run(resumes="as saved"),
    "universal": Run(resumes="universal"),
    "tiled": Run(tiled=True, reentrant=False),
    "moved": Run(LIMITED, reentrant=False, moves=2),
    "moved-reentrant": Run(LIMITED, clip=0.0, reentrant=True, moves=1),
    "taken-over": Run(LIMITED, reentrant=False),
    "unasked": Run(LIMITED),
    "as-written": Run({**LIMITED, "activations": "as_written"}, reentrant=False),
    "gathered": Run({"window": 2, "share_weights": False}),
    "gpu-states": Run({"window": 2, "gpu_states": 600_000}, clip=0.0),
    "ssd": Run({"window": 2, "host_memory": 0}),
    "delays": Run({"window": 3, "debug": {"lane_delay_ms": 3.0, "seed": 5}}, clip=0.0),
    "bf16-sums": Run(others={"seq_parallel_communication_data_type": "bf16"}),
    "fp16": Run(others=FP16),
    "adapters": Run(adapted=True),
    "adapters-checkpointed": Run(adapted=True, reentrant=False),
    "stock": Run(None),
    "stock-fp16": Run(None, others=FP16),
    "stock-adapters": Run(None, adapted=True),
    "stock-immediate": Run(None, clip=0.0),
    "stock-accumulation": Run(None, accumulation=2, others=FP32_SUMS),
    "stock-tiled": Run(None, tiled=True, reentrant=False),
}


def whole_batches(count: int) -> list[Batch]:
    """Whole sequences with the places of their tokens, which the adapter wants."""
    places = torch.arange(batches(1)[0]["input_ids"].shape[1]).repeat(BATCH, 1)
    return [{**batch, "position_ids": places} for batch in batches(count)]


def divided(data: list[Batch], mpu: ModuleType, ranks: int) -> list[Batch]:
    """This rank's pieces of the batches of all ranks, as DeepSpeed's own adapter makes them."""
    group, size = mpu.get_sequence_parallel_group(), mpu.get_sequence_parallel_world_size()
    own: Any = data[dist.get_rank() :: ranks]
    return list(UlyssesSPDataLoaderAdapter(own, mpu.get_sequence_parallel_rank(), group, size, torch.device("cpu")))


def loss_of_pieces(group: Any, engine: Any, batch: Batch) -> torch.Tensor:
    """The mean over the tokens of all pieces. DeepSpeed's and Hugging Face's pages gather the losses for it, whose
    backward torch does not run over gloo in a group without rank 0; a sum has the same gradient."""
    model: Any = engine.module
    logits = engine(**{name: batch[name] for name in ("input_ids", "position_ids")}).logits
    labels = batch["shift_labels"].contiguous()  # the loss views it as one line
    own = model.loss_function(logits, labels=None, shift_labels=labels, vocab_size=model.config.vocab_size)
    tokens = (labels != -100).sum()
    total: torch.Tensor = dist.nn.functional.all_reduce(own * tokens, group=group)
    dist.all_reduce(of_all := tokens.clone(), group=group)
    return total / of_all


def model_of(run: Run, seed: int) -> nn.Module:
    model: Any = llama(seed=seed, num_hidden_layers=BLOCKS)
    if run.reentrant is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": run.reentrant})
    if run.adapted:
        peft = pytest.importorskip("peft")
        torch.manual_seed(seed)
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    return tiled(model) if run.tiled else model


def trained(run: Run, mpu: ModuleType, ranks: int, folder: Path) -> dict[str, Any]:
    config = run.config if run.slide is None or "host_memory" not in run.slide else on_ssd(run.config, folder / "disk")
    # An adapter makes as many batches of one as ranks share a sequence.
    data = divided(whole_batches(STEPS * run.accumulation * ranks // SEQUENCE), mpu, ranks)
    loss_of = partial(loss_of_pieces, mpu.get_sequence_parallel_group())
    losses, norms, saved = [], [], {}
    saves = folder / f"saves {run.resumes}"
    for number, part in enumerate((data[: STEPS // 2], data[STEPS // 2 :]) if run.resumes else (data,)):
        # Rank 0's weights win, and then those of the checkpoint.
        model = model_of(run, seed=dist.get_rank() + 10 * number)
        with pytest.MonkeyPatch.context() as patch:
            if run.moves:
                handle_of(patch)(0, run.moves)
            with engine_for(model, config, mpu=mpu) as engine:
                if number:
                    engine.load_checkpoint(saves)
                result = train(engine, part, loss_of)
                losses, norms = losses + result.losses, norms + result.norms
                if run.resumes and not number:
                    engine.save_checkpoint(saves)
                    saved = states_of(engine.module)
                found = {"losses": losses, "norms": norms, "states": states_of(engine.module), "saved": saved}
                if run.slide is not None:
                    parts = engine.optimizer.runtime.parts
                    found["handled"] = parts.spare.activations.statistics
                    found["is_shared"] = parts.context.shared is not None
        if run.resumes == "universal" and not number:
            config = universal(config)
            if dist.get_rank() == 0:
                convert(saves)
            dist.barrier()
    return found


def refused_beside(mpu: ModuleType) -> str:
    """What an engine says that is built beside one without sequence parallelism."""
    with engine_for(llama(num_hidden_layers=BLOCKS), ds_config({"window": 2})):
        with pytest.raises(SlideError) as caught, engine_for(llama(num_hidden_layers=BLOCKS), ds_config({}), mpu=mpu):
            pass
    return str(caught.value)


def main(rank: int, folder: Path) -> None:
    ranks = int(sys.argv[2])
    get_accelerator().is_fp16_supported = lambda: True  # slow on a CPU, but it works
    with two_ranks.as_rank(rank, folder, ranks) as results:
        mpu = UlyssesSPAttentionHF.register_with_transformers(
            llama(num_hidden_layers=1), "sdpa", sequence_parallel_size=SEQUENCE, micro_batch_size=BATCH
        )
        # The first of all: DeepSpeed keeps an mpu for all later engines.
        results["beside"] = refused_beside(mpu)
        for name in sys.argv[3:]:
            results[name] = trained(RUNS[name], mpu, ranks, folder)


if __name__ == "__main__":
    two_ranks.fork_world(int(sys.argv[2]), main, Path(sys.argv[1]))
