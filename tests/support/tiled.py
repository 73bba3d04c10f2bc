"""Models whose MLPs and losses DeepSpeed's ALST computes tile by tile of the sequence, with backwards inside of it."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledFusedLogitsLoss, TiledMLP, sequence_tiled_compute
from harness import Batch, llama
from torch import nn
from torch.nn import functional
from transformers.models.llama.modeling_llama import LlamaMLP

TILES = 4


def plain_mlp(mlp: Any, x: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = mlp.down_proj(mlp.act_fn(mlp.gate_proj(x)) * mlp.up_proj(x))
    return y


class Tiled(LlamaMLP):
    """As DeepSpeed's page patches it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = [self.down_proj.weight, self.gate_proj.weight, self.up_proj.weight]
        y: torch.Tensor = TiledMLP.apply(plain_mlp, self, x, TILES, weights)
        return y


class Sliced(LlamaMLP):
    """With the general form."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = sequence_tiled_compute(
            fn=lambda x: plain_mlp(self, x),
            seqlen=x.shape[1],
            shards=TILES,
            kwargs_to_shard={"x": x},
            kwargs_to_pass={},
            grad_requiring_tensor_key="x",
            compute_params=[self.down_proj.weight, self.gate_proj.weight, self.up_proj.weight],
            output_reduction=None,
        )
        return y


def tiled(model: nn.Module, kind: type[LlamaMLP] = Tiled) -> nn.Module:
    """The model with its MLPs in tiles."""
    for module in model.modules():
        if type(module) is LlamaMLP:
            module.__class__ = kind
    return model


def _loss_of_tile(head: nn.Module, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(head(hidden).float(), labels, ignore_index=-100)


class LossInTiles(nn.Module):
    """A Llama that returns its loss, with logits of one tile at a time. `fused`: with the backward of each tile's
    logits inside of the forward; None: of all at once."""

    def __init__(self, *, fused: bool | None, **options: Any) -> None:
        super().__init__()
        self.model: Any = llama(**options)
        self.fused = fused

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.model.model(input_ids).last_hidden_state
        head = self.model.lm_head
        loss: torch.Tensor
        if self.fused is None:
            loss = _loss_of_tile(head, hidden.flatten(0, 1), labels.flatten())
        elif self.fused:
            loss = TiledFusedLogitsLoss.apply(_loss_of_tile, head, hidden, labels, None, TILES, [head.weight], "mean")
        else:
            loss = sequence_tiled_compute(
                fn=lambda hidden, labels: _loss_of_tile(head, hidden.flatten(0, 1), labels.flatten()),
                seqlen=hidden.shape[1],
                shards=TILES,
                kwargs_to_shard={"hidden": hidden, "labels": labels},
                kwargs_to_pass={},
                grad_requiring_tensor_key="hidden",
                compute_params=[head.weight],
                output_unshard_dimension=0,
                output_reduction="mean",
            )
        return loss


def own_loss(engine: Any, batch: Batch) -> torch.Tensor:
    loss: torch.Tensor = engine(**batch)
    return loss
