"""Projectors that are permutations, between which training with compressed gradients is exact."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from ds_slide.compression.lsp import codec
from ds_slide.compression.lsp.learning import Fit
from ds_slide.compression.lsp.projector import Projector
from ds_slide.runtime.core import settings
from ds_slide.runtime.gradients import learning


def permutation(rows: int, d: int, _r: int, generator: torch.Generator, device: Any) -> Projector:
    assert rows == d
    return Projector(torch.randperm(rows, generator=generator).int()[:, None], torch.ones(rows, 1), d).to(device)


def between_permutations(patch: pytest.MonkeyPatch) -> None:
    """Square matrices in subspaces of their own size, by permutations, other ones at each check."""

    def of_square(shape: Any, d: int) -> int:
        return d if len(shape) == 2 and min(shape) == max(shape) == d else 0

    def others(fits: Sequence[Fit], **_: Any) -> list[Any]:
        return [
            (*(permutation(s.rows, s.d, 1, fit.generator, s.device) for s in (fit.left, fit.right)), 0.0)
            for fit in fits
        ]

    patch.setattr(codec, "random_projector", permutation)
    patch.setattr(codec, "subspace", of_square)
    patch.setattr(settings, "subspace", of_square)
    patch.setattr(learning, "refit", others)
