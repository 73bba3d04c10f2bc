"""LayerNorm against their reference in fp64, under Triton's interpreter where there is no GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from norm_checks import EPS, FULL, HALF, TOLERANCE, assert_near, check, leaf, normal
from references.layer_norm import add_layer_norm_reference, layer_norm_reference

from ds_slide.errors import SlideError
from ds_slide.kernels.norm import launch as rows
from ds_slide.kernels.norm.layer_norm import add_layer_norm, layer_norm

pytestmark = [pytest.mark.usefixtures("nearest_bfloat16", "poisoned_memory", "few_programs"), pytest.mark.thinned(2)]


def parameters(columns: int, dtype: torch.dtype, kind: str) -> list[torch.Tensor | None]:
    weight, bias = normal(columns, dtype=dtype, seed=2), normal(columns, dtype=dtype, seed=3)
    return {"both": [weight, bias], "weight": [weight, None], "bias": [None, bias], "none": [None, None]}[kind]


def terms(shape: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    """x and residual of few bits, so that the reference's fp64 sum is the rounded one."""
    return [(normal(*shape, seed=seed) * 8).round().div(8).to(dtype) for seed in (0, 1)]


def test_the_reference_is_torchs_layer_norm() -> None:
    x, weight, bias = normal(5, 67).double(), normal(67).double(), normal(67, seed=1).double()
    expected = torch.nn.functional.layer_norm(x, (67,), weight, bias, EPS)
    torch.testing.assert_close(layer_norm_reference(x, weight, bias, EPS), expected)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(3, 5, 64), (5, 127)])
def test_norm_and_gradients(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    check(layer_norm, layer_norm_reference, [normal(*shape, dtype=dtype), *parameters(shape[-1], dtype, "both")], dtype)


@pytest.mark.parametrize("kind", ["both", "weight", "bias", "none"])
@pytest.mark.parametrize("shape", [(2,), (7, 2), (2, 3, 1, 5), (3, 2049)])
def test_other_shapes_and_parameters(shape: tuple[int, ...], kind: str) -> None:
    check(layer_norm, layer_norm_reference, [normal(*shape), *parameters(shape[-1], FULL, kind)], FULL)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(7, 100)])
def test_sum_with_the_residual(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    inputs = [*terms(shape, dtype), *parameters(shape[-1], dtype, "both")]
    check(add_layer_norm, add_layer_norm_reference, inputs, dtype)


@pytest.mark.parametrize("shape", [(41, 64), (9, 300)])
@pytest.mark.usefixtures("long_walks")
def test_programs_that_walk_many_rows(shape: tuple[int, ...]) -> None:
    for kind in ("both", "none"):
        inputs = [*terms(shape, FULL), *parameters(shape[-1], FULL, kind)]
        check(add_layer_norm, add_layer_norm_reference, inputs, FULL)


@pytest.mark.parametrize("kind", ["both", "none"])
@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("columns", [70, 96])
def test_rows_of_several_tiles(columns: int, ahead: bool, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    several = (rows.Tiling(128, 4, 32, ahead, not ahead, 2),)
    for name, value in (("TILE", 32), ("FORWARD_CENTRED", several), ("BACKWARD_CENTRED", several), ("PROCESSORS", 1)):
        monkeypatch.setattr(rows, name, value)
    inputs = [*terms((5, columns), HALF), *parameters(columns, HALF, kind)]
    check(add_layer_norm, add_layer_norm_reference, inputs, HALF)


@pytest.mark.parametrize("tile", [2048, 64])
def test_mean_far_from_zero(tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # The mean is good to an ulp of 1000, 6e-5; the squares' mean less the mean's square would lose 20 of 24 bits.
    monkeypatch.setattr(rows, "TILE", tile)
    monkeypatch.setattr(rows, "FORWARD_CENTRED", (rows.Tiling(2048, 4, 64, False, True, 1),))
    x = normal(4, 200) + 1000
    expected = layer_norm_reference(x.double(), None, None, 1e-5)
    torch.testing.assert_close(layer_norm(x, None, None, 1e-5).double(), expected, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("kind", ["both", "bias", "none"])
@pytest.mark.parametrize("dtype", [FULL, HALF])
def test_rows_too_long_for_registers(dtype: torch.dtype, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("LONGEST_ROW", 64), ("WIDE_BLOCK", 32), ("WIDE_SEGMENT", 4), ("TILE", 64)):
        monkeypatch.setattr(rows, name, value)
    monkeypatch.setattr(rows, "forward_kernel", None)
    monkeypatch.setattr(rows, "backward_kernel", None)
    weights = parameters(70, dtype, kind)
    x, residual = terms((5, 70), dtype)
    check(layer_norm, layer_norm_reference, [x, *weights], dtype)
    check(add_layer_norm, add_layer_norm_reference, [x, residual, *weights], dtype)


def test_two_sums_halve_the_longest_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "LONGEST_ROW", 128)
    monkeypatch.setattr(rows, "wide_forward_kernel", None)
    monkeypatch.setattr(rows, "backward_kernel", None)
    check(layer_norm, layer_norm_reference, [normal(7, 100), *parameters(100, FULL, "both")], FULL)


@pytest.mark.parametrize("asked", ["weight", "bias", "x"])
def test_gradient_of_one_input(asked: str) -> None:
    names = ("x", "weight", "bias")
    values = dict(zip(names, (normal(5, 64), normal(64), normal(64, seed=1)), strict=True))
    values[asked] = leaf(values[asked])
    layer_norm(*values.values(), EPS).square().sum().backward()
    wide = {name: leaf(value, wide=True) for name, value in values.items()}
    layer_norm_reference(*wide.values(), EPS).square().sum().backward()
    assert_near(values[asked].grad, wide[asked].grad, FULL)
    assert all(values[name].grad is None for name in names if name != asked)


def test_only_what_is_asked_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    x, residual, weight, bias = leaf(normal(3, 64)), leaf(normal(3, 64, seed=1)), normal(64), normal(64)
    monkeypatch.setattr(rows, "sum_programs_kernel", None)  # a launch would raise
    layer_norm(x, weight, bias, EPS).sum().backward()
    monkeypatch.setattr(rows, "backward_kernel", None)
    x.grad = None
    _, total = add_layer_norm(x, residual, leaf(weight), bias, EPS)
    (3 * total).sum().backward()
    assert (x.grad == 3).all() and (residual.grad == 3).all()


def test_heads_first() -> None:
    view = [normal(2, 3, 4, 64), *parameters(64, FULL, "both")]
    check(layer_norm, layer_norm_reference, view, FULL, view=lambda x: x.transpose(1, 2))


@pytest.mark.filterwarnings("ignore:Input #")
def test_gradcheck(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "TILE", 16)
    inputs = [leaf(normal(*shape)) for shape in ((2, 3), (2, 3), (3,), (3,))]
    # In fp32 a difference quotient over 2e-2 is good to about 1e-3.
    assert torch.autograd.gradcheck(lambda *given: add_layer_norm(*given, EPS), inputs, eps=1e-2, atol=1e-2, rtol=1e-2)


def test_second_derivative_is_refused() -> None:
    x = leaf(normal(3, 8))
    (gradient,) = torch.autograd.grad(layer_norm(x, None, None, EPS).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        gradient.sum().backward()


@pytest.mark.parametrize("shape", [(0, 64), (3, 0)])
def test_nothing_is_launched_for_nothing(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    for kernel in ("forward_kernel", "backward_kernel", "sum_programs_kernel"):
        monkeypatch.setattr(rows, kernel, None)
    x, weight, bias = leaf(normal(*shape)), leaf(normal(shape[-1])), leaf(normal(shape[-1]))
    layer_norm(x, weight, bias, EPS).sum().backward()
    assert x.grad.shape == shape
    assert (weight.grad == 0).all() and (bias.grad == 0).all()


def test_refusals() -> None:
    x = normal(3, 8)
    with pytest.raises(SlideError, match="float64"):
        layer_norm(x.double(), None, None, EPS)
    with pytest.raises(SlideError, match="last dimension"):
        layer_norm(x, None, normal(7), EPS)
    with pytest.raises(SlideError, match="one shape and dtype"):
        add_layer_norm(x, x[:1], None, None, EPS)


def test_operators_keep_the_rules_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "TILE", 16)
    x, weight, bias, operators = leaf(normal(6, 8)), leaf(normal(8)), leaf(normal(8)), torch.ops.ds_slide
    short = {"test_utils": ("test_schema", "test_autograd_registration", "test_faketensor")}
    torch.library.opcheck(operators.layer_norm.default, (x, weight, bias, EPS), **short)
    torch.library.opcheck(operators.add_layer_norm.default, (x, leaf(x), weight, None, EPS), **short)
    inputs = [value.detach() for value in (x, x, x, weight, bias, normal(6), normal(6).abs())]
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(operators.layer_norm_backward.default, (*inputs, True), test_utils=tests)


def test_compiled_without_a_break() -> None:
    def function(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        y, total = add_layer_norm(x, residual, weight, bias, EPS)
        return layer_norm(y * 2, weight, None, EPS) + total

    inputs = [leaf(normal(*shape)) for shape in ((3, 64), (3, 64), (64,), (64,))]
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    expected = torch.autograd.grad(function(*inputs).square().sum(), inputs)
    found = torch.autograd.grad(compiled(*inputs).square().sum(), inputs)
    torch.testing.assert_close(found, expected)
