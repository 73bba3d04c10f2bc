"""Orthogonal updates of a batch by the kernel in Triton's interpreter: beside torch, fp64, and one by one."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

pytest.importorskip("triton")

from ds_slide.kernels.offload import symmetric_product
from ds_slide.kernels.offload import tiles as tiles_module
from ds_slide.kernels.offload.tiles import Tiles
from ds_slide.optim import muon_batch, muon_groups
from ds_slide.optim.muon import Method, orthogonal
from ds_slide.optim.muon_batch import Batch, goes_together, orthogonal_together
from ds_slide.optim.muon_groups import Shape, batches, bytes_of, most_bytes, numel_of

METHODS: tuple[Method, ...] = ("gram", "standard")
DTYPES = {"gram": torch.float16, "standard": torch.bfloat16}
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BLOCK: list[Shape] = [(1, 32, 32), (1, 64, 32), (1, 64, 32), (1, 32, 64), (3, 32, 48)]
"""A square matrix, two tall ones, a wide one, and three in one parameter."""
LARGE: list[Shape] = [
    (1, 2048, 2048),
    (1, 256, 2048),
    (1, 256, 2048),
    (1, 2048, 2048),
    (1, 11008, 2048),
    (1, 11008, 2048),
    (1, 2048, 11008),
]
"""Of a block of Qwen2.5 3B."""


@pytest.fixture(autouse=True)
def _quick(quick_interpreter: None) -> None:
    """For all tests of this file."""


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles_module, "TILES", {16: Tiles(16, 32, 32, warps=1, stages=1)})
    monkeypatch.setattr(muon_batch, "has_kernel", lambda _: True)


def updates(shapes: Sequence[Shape]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(math.prod(shape), generator=generator).to(DEVICE) for shape in shapes]


def together(shapes: Sequence[Shape], given: Sequence[torch.Tensor], method: Method) -> list[torch.Tensor]:
    return list(orthogonal_together(shapes, iter(given), method, DTYPES[method], DEVICE))


@pytest.mark.parametrize(("method", "most"), [("gram", 0.02), ("standard", 0.15)])
def test_updates_are_near_those_in_fp64_and_those_of_torch(method: Method, most: float) -> None:
    shapes = sorted(BLOCK, key=lambda shape: max(shape[1:]))
    for shape, update, found in zip(shapes, updates(shapes), together(shapes, updates(shapes), method), strict=True):
        assert found.dtype == DTYPES[method]
        exact = orthogonal(update.view(shape).double(), method, torch.float64)
        assert float((found.view(shape).double() - exact).norm() / exact.norm()) < most
        plain = orthogonal(update.view(shape), method, DTYPES[method])
        assert float((found.view(shape).double() - plain.double()).norm() / exact.norm()) < most


@pytest.mark.parametrize("method", METHODS)
def test_a_batch_changes_no_bit(method: Method) -> None:
    given = updates(BLOCK)
    for shape, update, found in zip(BLOCK, given, together(BLOCK, given, method), strict=True):
        [alone] = together([shape], [update], method)
        assert torch.equal(found, alone)
    order = [3, 0, 4, 2, 1]
    again = together([BLOCK[each] for each in order], [given[each] for each in order], method)
    for index, found in zip(order, again, strict=True):
        [alone] = together([BLOCK[index]], [given[index]], method)
        assert torch.equal(found, alone)


def test_updates_are_taken_when_the_one_before_is_free() -> None:
    """The plan counts one update in fp32."""
    taken = 0

    def given() -> Iterator[torch.Tensor]:
        nonlocal taken
        for update in updates(BLOCK):
            taken += 1
            yield update

    results = orthogonal_together(BLOCK, given(), "gram", torch.float16, DEVICE)
    assert taken == 0
    next(results)
    assert taken == len(BLOCK)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shapes", [BLOCK, [(2, 32, 32)], [(1, 32, 256)]], ids=str)
def test_iterations_allocate_nothing_and_stay_in_their_memory(
    method: Method, shapes: list[Shape], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a CUDA graph needs it, and as the plan counts it."""
    numel, given, made = numel_of(shapes), updates(shapes), Allocations()
    by_kernel = symmetric_product.symmetric_product_

    def uncounted(*tensors: Any, **others: Any) -> None:
        with _disable_current_modes():  # the interpreter allocates
            by_kernel(*tensors, **others)

    monkeypatch.setattr(symmetric_product, "symmetric_product_", uncounted)
    memory = torch.full((numel + 64,), 7.0, dtype=DTYPES[method], device=DEVICE)
    batch = Batch(shapes, method, memory)
    for _ in range(2):
        batch.fill(iter(given))
        with made:
            results = batch.iterate()
        assert made.names == []
        assert all(each.untyped_storage().data_ptr() == memory.data_ptr() for each in results)
        assert torch.equal(memory[numel:], torch.full_like(memory[numel:], 7.0))
        for found, alone in zip(results, together(shapes, given, method), strict=True):
            assert torch.equal(found, alone)


class Allocations(TorchDispatchMode):
    """The operators that return memory of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **kwargs or {})
        given = [*args, *(kwargs or {}).values()]
        known = {each.untyped_storage().data_ptr() for each in given if isinstance(each, torch.Tensor)}
        if isinstance(result, torch.Tensor) and result.untyped_storage().data_ptr() not in known:
            self.names.append(str(function))
        return result


def test_what_goes_together() -> None:
    assert goes_together((1, 32, 64), torch.float16)
    assert not goes_together((1, 32, 64), torch.float32)
    assert not goes_together((1, 8, 64), torch.float16)
    assert not goes_together((1, 32, 65), torch.float16)


def test_a_cpu_has_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert not muon_batch.has_kernel(torch.device("cpu"))


def test_batches_have_equal_smaller_sides_and_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    assert batches(LARGE) == [[1, 2], [0, 3, 4, 5, 6]]
    monkeypatch.setattr(muon_groups, "MOST_BATCH_BYTES", bytes_of([LARGE[0], LARGE[0]]))
    assert batches(LARGE) == [[1, 2], [0, 3], [4], [5], [6]]


def test_the_bytes_of_a_batch() -> None:
    numel, square = 2 * 2048 * 2048 + 3 * 2048 * 11008, 5 * 2048 * 2048
    assert most_bytes(LARGE) == bytes_of([LARGE[each] for each in (0, 3, 4, 5, 6)])
    assert most_bytes(LARGE) == 4 * numel + 2 * square + 6 * 2048 * 11008
    # Three squares beside a place of the matrices, which is smaller.
    assert bytes_of([(1, 512, 512)]) == 2 * (2 + 1 + 2) * 512**2 + 6 * 512**2
    # A matrix that no kernel takes.
    assert most_bytes([*LARGE, (4, 2047, 2048)]) == most_bytes(LARGE) + 16 * 4 * 2047 * 2048
    assert most_bytes([(40, 2048, 11008)]) == muon_groups.MOST_BATCH_BYTES
    assert most_bytes([(40, 8, 11008)]) == 0
    # One parameter alone has what the plan counts for the largest matrix.
    for shape in [*LARGE, (1, 512, 512), (3, 512, 2048)]:
        assert bytes_of([shape]) <= 16 * math.prod(shape)
