"""A head whose weight is not on the GPU: its rows come in chunks while it computes, and their gradients go."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from ds_slide.patching.head import LossLinear
from ds_slide.patching.rows import ROWS, HeadRows, streamed_logits


class StreamedLinear(nn.Linear):
    """A head that computes logits; `LossLinear` is the one that computes the loss, too."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return streamed_logits(self, input)


@dataclass(frozen=True)
class StreamedHeadPatch:
    head: nn.Module

    def undo(self) -> None:
        self.head.__dict__.pop(ROWS, None)
        if type(self.head) is StreamedLinear:
            self.head.__class__ = nn.Linear  # type: ignore[assignment]


def stream_head(head: nn.Linear, rows: HeadRows) -> StreamedHeadPatch:
    """Make `head`, a plain nn.Linear or the loss's, compute with `rows` instead of its weight."""
    head.__dict__[ROWS] = rows
    if type(head) is not LossLinear:
        assert type(head) is nn.Linear
        head.__class__ = StreamedLinear
    return StreamedHeadPatch(head)
