"""Says without the GPU whether a batch has several sequences in a row.

In each forward with neither a mask nor a cache, transformers looks for jumps in the positions, and waits for the answer
behind all that the GPU has to do. Until the next blocks are launched the GPU then has nothing to do: 28 of 682 ms a
step of 3 B with 1 x 2048 x 8 tokens (benchmarks/results/2026-11-29_nvidia-h200_recorded-blocks.md).

Where the script gives no positions, a model of transformers counts the tokens itself, and there is no jump. The first
such forward of a model asks the GPU all the same.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

LIBRARY = "transformers.masking_utils"
QUESTION = "find_packed_sequence_indices"


class Positions:
    """The positions in forwards of one model. The thread that computes calls all methods."""

    def __init__(self, model: nn.Module) -> None:
        base: Any = getattr(model, "get_base_model", None)
        inner = base() if base is not None and type(model).__module__.startswith("peft.") else model
        self._may_know = type(inner).__module__.startswith("transformers.")
        self.have_no_jump: bool | None = None
        """What transformers has found where the model counted the tokens; None before."""
        if self._may_know:
            _install()

    def begin(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Begin a forward of the whole model with these arguments."""
        if self._may_know:
            are_given = len(args) > 1 or kwargs.get("position_ids") is not None
            _under_way.set(None if are_given else self)

    def end(self) -> None:
        _under_way.set(None)


_under_way: ContextVar[Positions | None] = ContextVar("the model that counts its tokens", default=None)


def _install() -> None:
    """Let transformers ask here first."""
    library = sys.modules.get(LIBRARY)
    ask = getattr(library, QUESTION, None)
    if ask is None or hasattr(ask, "_slide_asks"):
        return

    def find_packed_sequence_indices(position_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        is_asked = torch.compiler.is_compiling() or not _counts_tokens(position_ids)
        model = None if is_asked else _under_way.get()
        if model is not None and model.have_no_jump:
            return None
        found = ask(position_ids, *args, **kwargs)
        if model is not None and model.have_no_jump is None:
            model.have_no_jump = found is None
        return found

    find_packed_sequence_indices._slide_asks = ask  # type: ignore[attr-defined]
    setattr(library, QUESTION, find_packed_sequence_indices)


def _counts_tokens(positions: torch.Tensor) -> bool:
    """Whether positions [sequences, tokens] are one row for all sequences, made from a tensor [tokens]: then they do
    not depend on what the tokens are."""
    row = positions._base
    return row is not None and row.dim() == 1 and positions.dim() == 2 and row.numel() == positions.shape[1]
