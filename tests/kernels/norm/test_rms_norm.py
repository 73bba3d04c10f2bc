"""RMSNorm kernels against their reference in fp64, under Triton's interpreter where there is no GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from norm_checks import DEVICE, EPS, FULL, HALF, TOLERANCE, assert_near, check, leaf, normal
from references.rms_norm import add_rms_norm_reference, rms_norm_reference

from ds_slide.errors import SlideError
from ds_slide.kernels.norm import launch as module
from ds_slide.kernels.norm.rms_norm import add_rms_norm, rms_norm

pytestmark = [pytest.mark.usefixtures("nearest_bfloat16", "poisoned_memory", "few_programs"), pytest.mark.thinned(2)]
ROUNDED = [torch.float16, torch.bfloat16]
FLAVOURS = [
    pytest.param({"round_before_weight": True}, id="llama"),
    pytest.param({"round_before_weight": False, "offset": 1.0}, id="gemma"),
]


def test_the_reference_is_torchs_rms_norm() -> None:
    x, weight = normal(5, 67).double(), normal(67).double()
    expected = torch.nn.functional.rms_norm(x, (67,), weight, EPS)
    torch.testing.assert_close(rms_norm_reference(x, weight, EPS, round_before_weight=True), expected)
    torch.testing.assert_close(rms_norm_reference(x, weight - 1, EPS, offset=1.0, round_before_weight=False), expected)


@pytest.mark.parametrize("settings", FLAVOURS)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(3, 5, 64), (5, 127)])
def test_norm_and_gradients(shape: tuple[int, ...], dtype: torch.dtype, settings: dict) -> None:
    inputs = [normal(*shape, dtype=dtype), normal(shape[-1], dtype=dtype, seed=1)]
    check(rms_norm, rms_norm_reference, inputs, dtype, **settings)


@pytest.mark.parametrize("shape", [(1,), (7, 1), (2, 3, 1, 5), (33, 96), (2, 2049), (1, 8200)])
def test_other_shapes(shape: tuple[int, ...]) -> None:
    check(rms_norm, rms_norm_reference, [normal(*shape), normal(shape[-1], seed=1)], FULL, round_before_weight=True)


@pytest.mark.parametrize("settings", FLAVOURS)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(7, 100)])
def test_sum_with_the_residual(shape: tuple[int, ...], dtype: torch.dtype, settings: dict) -> None:
    # Terms of few bits, so that the reference's fp64 sum is the rounded one.
    x, residual = ((normal(*shape, seed=seed) * 8).round().div(8).to(dtype) for seed in (0, 1))
    inputs = [x, residual, normal(shape[-1], dtype=dtype, seed=2)]
    check(add_rms_norm, add_rms_norm_reference, inputs, dtype, **settings)


def test_the_norm_is_of_the_rounded_sum() -> None:
    x, residual = torch.full((1, 4), 2048.0, dtype=HALF), torch.tensor([[1.0, 1.0, 1.0, -2047.0]], dtype=HALF)
    y, total = add_rms_norm(x.to(DEVICE), residual.to(DEVICE), None, EPS, round_before_weight=True)
    # 2049 is no fp16 number: the tie goes to the even 2048.
    assert total.tolist() == [[2048.0, 2048.0, 2048.0, 1.0]]
    assert_near(y, rms_norm_reference(total.double(), None, EPS, round_before_weight=True), HALF)


@pytest.mark.parametrize("dtype", ROUNDED)
@pytest.mark.parametrize("weight_dtype", [None, FULL, "same"])
@pytest.mark.parametrize("settings", FLAVOURS)
def test_rounding_is_that_of_the_models(settings: dict, weight_dtype: object, dtype: torch.dtype) -> None:
    x = normal(16, 256, dtype=dtype)
    weight = None if weight_dtype is None else normal(256, dtype=dtype if weight_dtype == "same" else FULL, seed=1)
    found, expected = rms_norm(x, weight, EPS, **settings), rms_norm_reference(x, weight, EPS, **settings)
    assert found.dtype == expected.dtype
    # Sums in another order move the scale by an ulp of fp32, which moves few roundings; another rule moves a tenth.
    moved = ((found - expected).abs() > 1e-6 * expected.abs()).float().mean()
    assert moved < 3e-3
    torch.testing.assert_close(found, expected, rtol=TOLERANCE[dtype], atol=0.0)


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("shape", [(41, 64), (9, 300)])
@pytest.mark.usefixtures("long_walks")
def test_programs_that_walk_many_rows(shape: tuple[int, ...], weighted: bool) -> None:
    weight = normal(shape[-1], seed=2) if weighted else None
    check(rms_norm, rms_norm_reference, [normal(*shape), weight], FULL, round_before_weight=True)
    inputs = [normal(*shape), normal(*shape, seed=1), weight]
    check(add_rms_norm, add_rms_norm_reference, inputs, FULL, round_before_weight=True)


@pytest.mark.parametrize("held", [True, False])
@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("columns", [70, 96])
def test_rows_of_several_tiles(columns: int, ahead: bool, held: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    several = (module.Tiling(64, 4, 64, ahead, held, 2), module.Tiling(128, 4, 32, ahead, held, 2))
    for name, value in (("TILE", 32), ("FORWARD", several), ("BACKWARD", several), ("PROCESSORS", 1)):
        monkeypatch.setattr(module, name, value)
    x, residual = ((normal(5, columns, seed=seed) * 8).round().div(8).to(HALF) for seed in (0, 1))
    inputs = [x, residual, normal(columns, dtype=HALF, seed=2)]
    check(add_rms_norm, add_rms_norm_reference, inputs, HALF, round_before_weight=False, offset=1.0)
    monkeypatch.setattr(module, "SHORT_PROGRAMS", 1)
    check(rms_norm, rms_norm_reference, [normal(5, columns), None], FULL, round_before_weight=True)


def test_tables_hold_every_row_that_is_not_too_long() -> None:
    for table in (module.FORWARD, module.FORWARD_CENTRED, module.BACKWARD, module.BACKWARD_CENTRED):
        assert [tiling.longest for tiling in table] == sorted({tiling.longest for tiling in table})
        assert table[-1].longest == module.LONGEST_ROW
        for tiling in (module.SHORT, *table):
            assert tiling.width & (tiling.width - 1) == 0
            assert tiling.warps <= 16  # a program on AMD has no more
    for columns in range(1, module.LONGEST_ROW + 1, 61):
        _, _, constants = module._tiling(columns, module.BACKWARD)
        assert 0 <= constants["TILES"] * constants["WIDTH"] - columns < max(constants["WIDTH"], 1)


@pytest.mark.parametrize("dtype", [FULL, HALF])
def test_rows_too_long_for_registers(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("LONGEST_ROW", 64), ("WIDE_BLOCK", 32), ("WIDE_SEGMENT", 4), ("TILE", 64)):
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(module, "forward_kernel", None)
    monkeypatch.setattr(module, "backward_kernel", None)
    x, residual = ((normal(5, 70, seed=seed) * 8).round().div(8).to(dtype) for seed in (0, 1))
    weight = normal(70, dtype=dtype, seed=2)
    check(rms_norm, rms_norm_reference, [x, weight], dtype, round_before_weight=False, offset=1.0)
    check(add_rms_norm, add_rms_norm_reference, [x, residual, weight], dtype, round_before_weight=True)
    check(rms_norm, rms_norm_reference, [x, None], dtype, view=lambda x: x[:, :66], round_before_weight=True)


def test_the_shortest_row_too_long_for_registers() -> None:
    inputs = [normal(1, module.LONGEST_ROW + 1), normal(module.LONGEST_ROW + 1, seed=1)]
    check(rms_norm, rms_norm_reference, inputs, FULL, round_before_weight=True)


VIEWS = {
    "part of a wider row": ((3, 5, 90), lambda x: x[..., 8:72]),
    "heads of a fused projection": ((2, 3, 640), lambda x: x[..., 64:320].unflatten(-1, (4, 64))),
    "heads first": ((2, 3, 4, 64), lambda x: x.transpose(1, 2)),
    "heads first, of a fused projection": ((2, 3, 640), lambda x: x[..., :256].unflatten(-1, (4, 64)).transpose(1, 2)),
    "strided columns": ((4, 128), lambda x: x[:, ::2]),
    "columns first": ((64, 6), lambda x: x.t()),
    "one row many times": ((1, 64), lambda x: x.expand(5, 64)),
}


@pytest.mark.parametrize("cotangent", ["dense", "expanded", "transposed"])
@pytest.mark.parametrize("name", VIEWS)
def test_views_are_read_where_they_lie(name: str, cotangent: str) -> None:
    def make(y: torch.Tensor) -> torch.Tensor:
        if cotangent == "expanded":
            return torch.ones((), device=DEVICE).expand(y.shape)
        if cotangent == "transposed":
            return torch.randn(y.transpose(0, -2).shape, device=DEVICE).transpose(0, -2)
        return torch.randn(y.shape, device=DEVICE)

    shape, view = VIEWS[name]
    inputs = [normal(*shape), normal(64, seed=1)]
    check(rms_norm, rms_norm_reference, inputs, FULL, make, view, round_before_weight=True)


def test_residual_of_another_order_of_memory() -> None:
    x, residual = normal(2, 3, 4, 64), normal(2, 4, 3, 64, seed=1)
    for first, second in ((x.transpose(1, 2), residual), (residual, x.transpose(1, 2))):
        found = add_rms_norm(first, second, None, EPS, round_before_weight=True)
        expected = add_rms_norm_reference(first, second, None, EPS, round_before_weight=True)
        torch.testing.assert_close(found, expected)
        assert found[0].stride() == first.stride()


def test_no_copy_of_heads_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    x = normal(2, 3, 640)[..., 64:320].unflatten(-1, (4, 64))
    monkeypatch.setattr(torch.Tensor, "contiguous", lambda _: pytest.fail("copied"))
    for view in (x, normal(2, 3, 4, 64).transpose(1, 2), normal(6, 90)[:, :64]):
        rms_norm(view, None, EPS, round_before_weight=True)


@pytest.mark.filterwarnings("ignore:Input #")
def test_gradcheck(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TILE", 16)
    x, residual, weight = (leaf(normal(*shape)) for shape in ((2, 3), (2, 3), (3,)))

    def function(*inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return add_rms_norm(*inputs, 1e-2, offset=0.5, round_before_weight=False)

    # In fp32 a difference quotient over 2e-2 is good to about 1e-3.
    assert torch.autograd.gradcheck(function, (x, residual, weight), eps=1e-2, atol=5e-3, rtol=5e-3)


def test_only_what_is_asked_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    x, residual, weight = leaf(normal(3, 64)), leaf(normal(3, 64, seed=1)), normal(64)
    monkeypatch.setattr(module, "sum_programs_kernel", None)  # a launch would raise
    rms_norm(x, weight, EPS, round_before_weight=True).sum().backward()
    monkeypatch.setattr(module, "backward_kernel", None)
    x.grad = None
    _, total = add_rms_norm(x, residual, leaf(weight), EPS, round_before_weight=True)
    (3 * total).sum().backward()
    assert (x.grad == 3).all() and (residual.grad == 3).all()


def test_sum_that_is_not_used_gets_no_gradient() -> None:
    x, residual, weight = leaf(normal(3, 64)), leaf(normal(3, 64, seed=1)), leaf(normal(64, seed=2))
    wide = [leaf(value, wide=True) for value in (x, residual, weight)]
    add_rms_norm(x, residual, weight, EPS, round_before_weight=True)[0].square().sum().backward()
    add_rms_norm_reference(*wide, EPS, round_before_weight=True)[0].square().sum().backward()
    for got, want in zip((x, residual, weight), wide, strict=True):
        assert_near(got.grad, want.grad, FULL)


def test_graph_can_be_walked_again_with_the_same_bits() -> None:
    x, weight = leaf(normal(9, 65)), leaf(normal(65))
    y = rms_norm(x, weight, EPS, round_before_weight=True)
    first = torch.autograd.grad(y.sum(), (x, weight), retain_graph=True)
    second = torch.autograd.grad(y.sum(), (x, weight))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_second_derivative_is_refused() -> None:
    x = leaf(normal(3, 8))
    (gradient,) = torch.autograd.grad(
        rms_norm(x, None, EPS, round_before_weight=True).square().sum(), x, create_graph=True
    )
    with pytest.raises(RuntimeError, match="no autograd formula"):
        gradient.sum().backward()


@pytest.mark.parametrize("shape", [(0, 64), (3, 0), (2, 0, 8)])
def test_nothing_is_launched_for_nothing(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    for kernel in ("forward_kernel", "backward_kernel", "sum_programs_kernel"):
        monkeypatch.setattr(module, kernel, None)
    x, weight = leaf(normal(*shape)), leaf(normal(shape[-1]))
    y, total = add_rms_norm(x, x, weight, EPS, round_before_weight=True)
    (y + total).sum().backward()
    assert y.shape == total.shape == x.grad.shape == shape
    assert (weight.grad == 0).all() and weight.grad.shape == weight.shape


@pytest.mark.parametrize(
    ("x", "residual", "weight", "says"),
    [
        (torch.zeros(3, 8, dtype=torch.float64), None, None, "float64"),
        (torch.zeros(3, 8, dtype=torch.int32), None, None, "int32"),
        (torch.zeros(3, 8), None, torch.zeros(1), "last dimension"),
        (torch.zeros(3, 8), torch.zeros(3, 8, dtype=HALF), torch.zeros(8), "one shape and dtype"),
        (torch.zeros(3, 8), torch.zeros(1, 8), torch.zeros(8), "one shape and dtype"),
        (torch.zeros(()), None, None, "scalar"),
    ],
)
def test_refusals(x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor | None, says: str) -> None:
    with pytest.raises(SlideError, match=says):
        if residual is None:
            rms_norm(x, weight, EPS, round_before_weight=True)
        else:
            add_rms_norm(x, residual, weight, EPS, round_before_weight=True)


def test_operators_keep_the_rules_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TILE", 16)
    x, weight, operators = leaf(normal(2, 3, 8)), leaf(normal(8)), torch.ops.ds_slide
    torch.library.opcheck(operators.add_rms_norm.default, (x, leaf(x), weight, EPS, 0.0, True))
    short = {"test_utils": ("test_schema", "test_autograd_registration", "test_faketensor")}
    torch.library.opcheck(operators.rms_norm.default, (x, weight, EPS, 1.0, False), **short)
    torch.library.opcheck(operators.rms_norm.default, (x.transpose(0, 1), None, EPS, 0.0, True), **short)
    inputs = (x.detach(), None, x.detach(), weight.detach(), normal(6).abs(), 0.0, True, True)
    torch.library.opcheck(operators.rms_norm_backward.default, inputs, test_utils=("test_schema", "test_faketensor"))


def test_compiled_without_a_break() -> None:
    def function(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y, total = add_rms_norm(x, residual, weight, EPS, round_before_weight=True)
        return rms_norm(y * 2, weight, EPS, offset=1.0, round_before_weight=False) + total

    inputs = [leaf(normal(*shape)) for shape in ((3, 64), (3, 64), (64,))]
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    expected = torch.autograd.grad(function(*inputs).square().sum(), inputs)
    found = torch.autograd.grad(compiled(*inputs).square().sum(), inputs)
    torch.testing.assert_close(found, expected)
