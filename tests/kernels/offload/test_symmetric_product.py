"""Products with a symmetric result by a kernel, beside fp64 and beside themselves in another batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from ds_slide.errors import SlideError
from ds_slide.kernels.offload.symmetric_product import divided_and_turned_, symmetric_product_
from ds_slide.kernels.offload.tiles import TILES, Tiles, has_tiles, tiles_of

pytestmark = pytest.mark.usefixtures("nearest_bfloat16", "poisoned_memory", "quick_interpreter")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = {
    "square": Tiles(16, 16, 16, warps=1, stages=1),
    "wide": Tiles(16, 32, 16, warps=1, stages=1),
    "high": Tiles(32, 16, 32, warps=1, stages=2),
    "neighbours": Tiles(16, 32, 16, group=2, warps=1, stages=1),
}
SIZES = [(64, 48), (50, 40), (16, 16), (37, 33), (112, 16)]
DESCRIBED = Tiles(16, 32, 16, warps=1, stages=1, described=True)


def factor(batch: int, n: int, k: int, dtype: torch.dtype, turned: bool = False) -> torch.Tensor:
    made = torch.randn(batch, n, k, generator=torch.Generator().manual_seed(n + k)).to(dtype).to(DEVICE)
    return made.mT.contiguous().mT if turned else made


def product(left: torch.Tensor, right: torch.Tensor, tiles: Tiles, **options: Any) -> torch.Tensor:
    result = torch.empty(left.shape[0], left.shape[1], left.shape[1], dtype=left.dtype, device=left.device)
    symmetric_product_(result, left, right, tiles, **options)
    return result


@pytest.mark.by_turns(4)
@pytest.mark.parametrize("turned", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("tiles", SMALL.values(), ids=SMALL)
def test_the_square_of_a_matrix(tiles: Tiles, size: tuple[int, int], dtype: torch.dtype, turned: bool) -> None:
    x = factor(2, *size, dtype, turned)
    found, exact = product(x, x, tiles, alpha=0.5), 0.5 * x.double() @ x.double().mT
    assert torch.equal(found, found.mT)
    torch.testing.assert_close(found.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-5)
    alone = product(factor(2, *size, dtype, turned)[1:], x[1:], tiles, alpha=0.5)
    assert torch.equal(alone[0], found[1])


@pytest.mark.parametrize("turned", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("size", [(64, 48), (56, 40), (40, 104)], ids=str)
def test_descriptors_change_no_bit(size: tuple[int, int], turned: bool) -> None:
    pytest.importorskip("triton.tools.tensor_descriptor")
    x = factor(3, *size, torch.float16, turned)
    assert torch.equal(product(x, x, DESCRIBED), product(x, x, replace(DESCRIBED, described=False)))


@pytest.mark.parametrize("n", [64, 37])
@pytest.mark.parametrize("tiles", SMALL.values(), ids=SMALL)
def test_polynomials_of_a_matrix(tiles: Tiles, n: int) -> None:
    """Their products are symmetric up to what was rounded before, and here to the bit."""
    x = factor(3, n, 48, torch.float16) / 10
    gram = product(x, x, tiles)
    shifted = torch.empty_like(gram)
    z = product(gram, gram, tiles, alpha=2.0, beta=-4.0, added=gram, shift=3.0, shifted=shifted)
    exact = 2 * gram.double() @ gram.double() - 4 * gram.double()
    torch.testing.assert_close(z.double(), exact, rtol=1e-3, atol=1e-3)
    assert torch.equal(shifted, z + 3 * torch.eye(n, dtype=z.dtype, device=z.device))
    found = product(z, shifted, tiles, beta=3.0, added=shifted)
    for each in (gram, z, shifted, found):
        assert torch.equal(each, each.mT)
    plain = z.double() @ shifted.double() + 3 * shifted.double()
    torch.testing.assert_close(found.double(), plain, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("tiles", [*SMALL.values(), *TILES.values(), Tiles(128, 128, group=4)], ids=repr)
@pytest.mark.parametrize("n", [16, 1024, 2048, 3584, 3600])
def test_programs_cover_the_triangle(n: int, tiles: Tiles) -> None:
    squares = -(-n // tiles.side)
    each = (tiles.side // tiles.rows) * (tiles.side // tiles.columns)
    assert tiles.programs(n) == sum(range(squares + 1)) * each
    assert tiles.programs(n) * tiles.rows * tiles.columns >= n * (n + 1) // 2


def test_tiles_are_chosen_by_the_shape() -> None:
    assert list(TILES) == sorted(TILES, reverse=True)
    assert tiles_of(2048) == tiles_of(11008) == next(iter(TILES.values()))
    assert has_tiles(2048, 11008) and has_tiles(256, 2048)
    assert not has_tiles(128, 2048) and not has_tiles(2040, 11008) and not has_tiles(2048, 11000)


@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [(2, 130, 70), (1, 64, 128), (3, 5, 7)], ids=str)
def test_divided_and_turned_is_what_torch_gives(size: tuple[int, int, int], source: torch.dtype) -> None:
    matrices = factor(*size, source)
    norms = matrices.norm(dim=(-2, -1), keepdim=True) + 1e-7
    dtype = torch.bfloat16 if source == torch.bfloat16 else torch.float16
    target = torch.empty(size[0], size[2], size[1], dtype=dtype, device=DEVICE)
    divided_and_turned_(target, matrices, norms)
    assert torch.equal(target, (matrices / norms).to(dtype).mT)


REFUSED: dict[str, tuple[Callable[[torch.Tensor], dict[str, Any]], str]] = {
    "length": (lambda x: {"result": x.new_empty(2, 16, 32)}, "result of symmetric_product_ must be contiguous and"),
    "strides": (
        lambda x: {"added": x.new_empty(2, 16, 32)[..., ::2]},
        "added of symmetric_product_ must be contiguous",
    ),
    "one turned": (lambda x: {"right": x.mT.contiguous().mT}, "right of symmetric_product_ must be contiguous"),
    "rows": (
        lambda x: {"left": x[..., :44].contiguous(), "right": x[..., :44].contiguous(), "tiles": DESCRIBED},
        "descriptors need sides of multiples",
    ),
    "dtype": (lambda x: {"right": x.float()}, "right of symmetric_product_ is torch.float32 on"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_it_refuses(case: str) -> None:
    x = factor(2, 16, 48, torch.float16)
    change, match = REFUSED[case]
    arguments: dict[str, Any] = {"result": x.new_empty(2, 16, 16), "left": x, "right": x, "tiles": SMALL["square"]}
    with pytest.raises(SlideError, match=match):
        symmetric_product_(**arguments | change(x))
