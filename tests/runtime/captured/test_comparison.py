"""Tensors of replays beside those of the operators."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

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


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("none left"), RuntimeError("CUDA error: out of memory"), RuntimeError("another")]
)
def test_without_memory_there_is_no_comparison(error: RuntimeError, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: torch.Tensor) -> bool:
        raise error

    monkeypatch.setattr(torch.Tensor, "isfinite", run)
    if str(error) == "another":
        for compare in (lambda: run_beside(run, CPU), lambda: differ([LARGE.flip(0)], [LARGE])):
            with pytest.raises(RuntimeError, match="another"):
                compare()
    else:
        assert run_beside(run, CPU) is None
        assert not differ([LARGE.flip(0)], [LARGE])


def test_nothing_is_given_up_for_a_comparison() -> None:
    """The mode that gives something up sees no operator."""
    seen = []

    class Seeing(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(function)
            return function(*args, **(kwargs or {}))

    with Seeing():
        assert differ([LARGE.flip(0)], [LARGE]) and len(seen) == 1  # the flip
        run_beside(lambda: LARGE + 1, CPU)
    assert torch.ops.aten.add.Tensor not in seen
