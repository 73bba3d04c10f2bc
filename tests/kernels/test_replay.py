"""Replays of launches. Triton interprets the kernels where there is no GPU; replays then start the interpreter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from ds_slide.kernels.gated.gated_activation import _gated_packed
from ds_slide.kernels.norm.rms_norm import _add_rms_norm, _rms_norm_backward
from ds_slide.kernels.replay import Replayed, start
from ds_slide.kernels.rope.rotary import _rope

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def _twice_kernel(source, target, numel, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(source + place, mask=place < numel)
    tl.store(target + place, 2 * value, mask=place < numel)


class Counted:
    """A function, with the number of its calls."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.calls = 0
        self._function = function

    def __call__(self, *inputs: Any) -> Any:
        self.calls += 1
        return self._function(*inputs)


def twice(x: torch.Tensor) -> torch.Tensor:
    result = torch.empty_like(x)
    start(_twice_kernel, (triton.cdiv(x.numel(), 16),), x, result, x.numel(), BLOCK=16, num_warps=1)
    return result


def numbers(*shape: int) -> torch.Tensor:
    return torch.arange(1.0, 1 + torch.Size(shape).numel(), device=DEVICE).view(shape)


def test_the_second_call_of_a_kind_does_not_run_the_function() -> None:
    counted = Counted(twice)
    replayed = Replayed(counted)
    for _ in range(3):
        x = torch.randn(5, 8, device=DEVICE)
        assert replayed(x).equal(2 * x)
    assert counted.calls == 1


@pytest.mark.parametrize("other", [numbers(8, 5), numbers(5, 8).half(), numbers(8, 5).t()])
def test_another_shape_type_or_stride_is_another_kind(other: torch.Tensor) -> None:
    counted = Counted(twice)
    replayed = Replayed(counted)
    replayed(numbers(5, 8))
    result = replayed(other)
    assert counted.calls == 2 and result.shape == other.shape and result.dtype == other.dtype


def test_a_tensor_at_an_odd_address_is_not_replayed() -> None:
    """Triton has compiled the recorded kernel for pointers that are multiples of 16 bytes."""
    counted = Counted(twice)
    replayed = Replayed(counted)
    replayed(numbers(8))
    assert replayed(numbers(9)[1:]).equal(2 * numbers(9)[1:]) and counted.calls == 2


def test_a_call_that_copies_is_never_replayed() -> None:
    counted = Counted(lambda x: twice(x.contiguous()))
    replayed = Replayed(counted)
    for _ in range(2):
        x = torch.randn(8, 5, device=DEVICE).t()
        assert replayed(x).equal(2 * x)
    assert counted.calls == 2


def test_a_call_that_fills_is_never_replayed() -> None:
    counted = Counted(lambda x: (twice(x), torch.empty_like(x).zero_()))
    replayed = Replayed(counted)
    for _ in range(2):
        assert not replayed(numbers(8))[1].any()
    assert counted.calls == 2


def test_an_input_may_begin_anywhere_in_its_storage() -> None:
    counted = Counted(lambda x: twice(x[1]))
    replayed = Replayed(counted)
    for start_row in (0, 8, 4):
        x = numbers(16, 4)[start_row : start_row + 8].view(2, 4, 4)
        assert replayed(x).equal(2 * x[1])
    assert counted.calls == 1


def test_parts_of_inputs_that_share_a_storage_are_not_replayed() -> None:
    """The second input may lie at another distance from the first one next time."""
    counted = Counted(lambda x, y: (twice(x), twice(y.view(2, 8))))
    replayed = Replayed(counted)
    for second in (1, 2):
        x = numbers(3, 16)
        assert replayed(x[0], x[second])[1].equal(2 * x[second].view(2, 8))
    assert counted.calls == 2


def test_results_that_are_missing_stay_missing() -> None:
    replayed = Replayed(Counted(lambda x: (None, twice(x))))
    for _ in range(2):
        first, second = replayed(numbers(8))
        assert first is None and second.equal(2 * numbers(8))


def rows() -> list[torch.Tensor]:
    return [torch.randn(2, 6, 32, device=DEVICE, dtype=torch.bfloat16) for _ in range(2)]


def ones() -> torch.Tensor:
    return torch.ones(32, device=DEVICE, dtype=torch.bfloat16)


def heads(count: int) -> torch.Tensor:
    return torch.randn(2, 6, count, 16, device=DEVICE, dtype=torch.bfloat16).transpose(1, 2)


CASES: dict[str, tuple[Any, Callable[[], list[Any]]]] = {
    "norm": (_add_rms_norm, lambda: [*rows(), ones(), 1e-6, 0.0, True]),
    "norm backward": (
        _rms_norm_backward,
        lambda: [
            *rows(),
            rows()[0],
            torch.ones(32, device=DEVICE).bfloat16(),
            torch.rand(12, device=DEVICE),
            0.0,
            True,
            True,
        ],
    ),
    "rope": (
        _rope,
        lambda: [heads(4), heads(2), torch.rand(1, 6, 16, device=DEVICE), torch.rand(1, 6, 16, device=DEVICE)],
    ),
    "gated": (_gated_packed, lambda: [torch.randn(2, 6, 64, device=DEVICE, dtype=torch.bfloat16), "silu"]),
}


@pytest.mark.parametrize("name", CASES)
def test_an_operator_computes_the_same_in_a_replay(name: str) -> None:
    operator, make = CASES[name]
    inputs = [make() for _ in range(2)]
    launch = Counted(operator.launch)
    expected = [operator.launch(*each) for each in inputs]
    replayed = Replayed(launch)
    for given, results in zip(inputs, expected, strict=True):
        found = replayed(*given)
        results, found = (each if isinstance(each, tuple) else (each,) for each in (results, found))
        for one, other in zip(results, found, strict=True):
            assert one.equal(other) and one.stride() == other.stride()
    assert launch.calls == 1
