"""What the tests of the kernels share."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

# The test files of these folders import `norm_checks`, `losses` and `references` (each kernel in plain torch, at any
# precision) by these names.
HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE / "norm"), str(HERE / "loss")]


@pytest.fixture(scope="module", autouse=True)
def _quick(quick_interpreter: None) -> None:
    """For all tests of this folder."""


@pytest.fixture
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch.empty and new_empty return is full of nan, or of bytes 0xFF: what nobody writes shows."""

    @torch.no_grad()  # torch's checkpoint makes an empty leaf that needs a gradient
    def poison(memory: torch.Tensor) -> torch.Tensor:
        if memory.is_floating_point():
            return memory.fill_(torch.nan)
        return memory.fill_(0xFF) if memory.dtype == torch.uint8 else memory

    empty, new_empty = torch.empty, torch.Tensor.new_empty

    def poisoned(*size: Any, **options: Any) -> torch.Tensor:
        return poison(empty(*size, **options))

    def new_poisoned(*arguments: Any, **options: Any) -> torch.Tensor:
        return poison(new_empty(*arguments, **options))

    monkeypatch.setattr(torch, "empty", poisoned)
    monkeypatch.setattr(torch.Tensor, "new_empty", new_poisoned)


@pytest.fixture
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter runs programs one by one: few for the sums over programs."""
    from ds_slide.kernels.norm import launch

    if not torch.cuda.is_available():
        monkeypatch.setattr(launch, "SUM_ROWS", 4)
        monkeypatch.setattr(launch, "SUM_COLUMNS", 2048)


@pytest.fixture
def long_walks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few programs, so that few rows suffice for walks of many tiles."""
    from ds_slide.kernels.norm import launch

    monkeypatch.setattr(launch, "PROCESSORS", 1)
    monkeypatch.setattr(launch, "SHORT_PROGRAMS", 1)
    monkeypatch.setattr(launch, "TILE", 256)
