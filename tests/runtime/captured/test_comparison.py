"""Tensors of replays beside those of the operators."""

from __future__ import annotations

import pytest
import torch

from ds_slide.runtime.captured.comparison import differ, run_beside

CPU = torch.device("cpu")
LARGE = torch.linspace(-1.0, 1.0, 1000)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ([LARGE, None], [LARGE.clone(), None]),
        ([LARGE * 1.01], [LARGE]),
        ([LARGE, torch.tensor([1e-4])], [LARGE, torch.tensor([-1e-4])]),
        ([LARGE, torch.tensor([float("nan")])], [LARGE, torch.tensor([float("inf")])]),
        ([], []),
    ],
    ids=["equal", "rounding", "next to nothing", "not finite", "none"],
)
def test_alike(found: list[torch.Tensor | None], expected: list[torch.Tensor | None]) -> None:
    assert not differ(found, expected)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ([LARGE.flip(0)], [LARGE]),
        ([LARGE, torch.tensor([9.0])], [LARGE, torch.tensor([3.0])]),
        ([LARGE, torch.zeros(1)], [LARGE, torch.tensor([1.0])]),
        ([torch.full((3,), float("nan"))], [torch.ones(3)]),
        ([None], [LARGE]),
    ],
    ids=["of another block", "a small one", "zero", "not finite", "missing"],
)
def test_differences(found: list[torch.Tensor | None], expected: list[torch.Tensor | None]) -> None:
    assert differ(found, expected)


def test_random_numbers_stay_as_they_are() -> None:
    torch.manual_seed(3)
    before = torch.default_generator.get_state()
    assert run_beside(lambda: torch.rand(3), CPU) is None
    assert torch.equal(torch.default_generator.get_state(), before)
    assert run_beside(lambda: 5, CPU) == 5


def test_without_memory_there_is_no_comparison() -> None:
    def run() -> int:
        raise torch.OutOfMemoryError("none left")

    assert run_beside(run, CPU) is None
