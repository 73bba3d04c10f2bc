"""What both losses do alike, with the weight in one piece and with one whose rows pass by: values, ranges, refusals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from losses import DEVICE, OPTIONS, TOLERANCE, WAYS, Case, Way, refused_calls
from references.linear_cross_entropy import linear_cross_entropy as reference

from ds_slide.errors import SlideConfigError
from ds_slide.kernels.loss import cross_entropy_launch, products
from ds_slide.kernels.loss import linear_cross_entropy as module
from ds_slide.kernels.loss.streamed_linear import streamed_linear

pytestmark = [
    pytest.mark.usefixtures("poisoned_memory"),
    pytest.mark.parametrize("way", WAYS.values(), ids=WAYS),
    pytest.mark.thinned(2),
]
dtypes = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
plain_and_all = pytest.mark.parametrize("options", [OPTIONS["plain"], OPTIONS["all"]], ids=["plain", "all"])


@pytest.fixture
def token_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 4 tokens (three for 11, the last of 3), segments of 32 columns, slices of the sums of 7 rows."""
    monkeypatch.setattr(module, "CHUNK_BYTES", 1)
    monkeypatch.setattr(module, "LEAST_ROWS", 4)
    monkeypatch.setattr(module, "_step", lambda hidden, padded, *_: module.chunk_rows(hidden.shape[0], padded, 2))
    monkeypatch.setattr(cross_entropy_launch, "SEGMENT", 32)
    monkeypatch.setattr(products, "SLICE_BYTES", 7 * 4 * 24)


@dtypes
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_loss_and_gradients_agree_with_fp64(way: Way, options: dict[str, Any], dtype: torch.dtype) -> None:
    way.compare(Case(rows=6, dtype=dtype, options=options))


@dtypes
@plain_and_all
@pytest.mark.usefixtures("token_blocks")
def test_blocks_of_tokens_are_put_together(way: Way, options: dict[str, Any], dtype: torch.dtype) -> None:
    way.compare(Case(bias=True, dtype=dtype, options=options))


@pytest.mark.parametrize("kind", ["widen", "convert"])
@pytest.mark.usefixtures("token_blocks")
def test_sums_without_an_accumulating_product(way: Way, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind == "widen" and DEVICE == "cpu":
        pytest.skip("torch has no product of 16-bit matrices in fp32 on the CPU")
    monkeypatch.setattr(products, "product_kind", lambda _device, _dtype: kind)
    way.compare(Case(dtype=torch.bfloat16))
    way.compare(Case(dtype=torch.float16))


def test_num_items_as_a_tensor_is_the_int(way: Way) -> None:
    case = Case(rows=4, options={"num_items": 41})
    expected = way.differentiate(case)
    for dtype in (torch.int64, torch.float32):
        changed = replace(case, options={"num_items": torch.tensor(41, dtype=dtype)})
        changed.inputs = case.inputs  # type: ignore[method-assign]  # they are seeded by what the case shows
        found = way.differentiate(changed)
        assert all(torch.equal(got, want) for got, want in zip(found, expected, strict=True))


@dtypes
@pytest.mark.parametrize("grad_loss", [65536.0, 1 / 3, -1e-3])
def test_the_incoming_gradient_scales(way: Way, grad_loss: float, dtype: torch.dtype) -> None:
    # 16 bits of range: the products of 65,536 stay below fp16's 65,504 only because the mean divides them first.
    way.compare(Case(rows=4, dtype=dtype, options={"num_items": 4000}), grad_loss)


def test_fp16_gradients_of_many_tokens_do_not_underflow(way: Way) -> None:
    # 1 / count is 2^-30 here, below anything fp16 can hold; the loss scale of 2^24 brings the result back.
    way.compare(Case(dtype=torch.float16, bias=True, options={"num_items": 2**30}), 2.0**24)


@pytest.mark.usefixtures("token_blocks")
def test_fp16_sums_may_pass_its_range_before_they_are_divided(way: Way) -> None:
    hidden = torch.full((11, 24), 3e4, dtype=torch.float16, device=DEVICE)
    weight = way.as_weight(torch.zeros(101, 24, dtype=torch.float16, device=DEVICE))
    loss = way.function(hidden, weight, torch.zeros(11, dtype=torch.int64, device=DEVICE))
    expected = torch.full((24,), -3e4 * 100 / 101, device=DEVICE)
    torch.testing.assert_close(way.backward(loss, [], weight)[-1][0].float(), expected, rtol=2e-3, atol=0.0)


def test_the_host_never_asks_for_a_value(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, tensor, labels, bias = Case(rows=4, bias=True, dtype=torch.bfloat16).inputs()
    leaves, weight = [hidden.requires_grad_(), bias.requires_grad_()], way.as_weight(tensor)
    losses = [
        lambda options=options: way.function(hidden, weight, labels, bias=bias, **options)
        for options in ({}, {"num_items": torch.tensor(9, device=DEVICE)}, {"num_items": 9}, {"reduction": "sum"})
    ]
    if way.name == "streamed":
        losses.append(lambda: streamed_linear(hidden, weight, bias).square().sum())

    def refuse(*_: Any) -> None:
        raise AssertionError("a value was read from the device")

    for loss in losses:
        loss().backward()  # compiled, and the products tried
    with monkeypatch.context() as patch:
        for name in ("item", "tolist", "__bool__", "__int__", "__float__", "__index__"):
            patch.setattr(torch.Tensor, name, refuse)
        if DEVICE == "cuda":
            torch.cuda.set_sync_debug_mode("error")
        try:
            for loss in losses:
                way.backward(loss(), leaves, weight)
        finally:
            if DEVICE == "cuda":
                torch.cuda.set_sync_debug_mode("default")


def test_strided_inputs(way: Way) -> None:
    case = Case(rows=5, bias=True)
    hidden, tensor, labels, bias = case.inputs()
    expected = way.differentiate(case)
    spread = torch.stack([hidden, hidden], dim=2)[:, :, 0]
    for strided in (hidden.T.contiguous().T, spread):
        assert not strided.is_contiguous()
        every_other = torch.stack([labels, labels], dim=1)[:, 0]
        apart = torch.stack([bias, bias], dim=1)[:, 0]
        weight, leaf = way.as_weight(tensor.T.contiguous().T), strided.detach().requires_grad_()
        loss = way.function(leaf, weight, every_other, bias=apart)
        for got, want in zip((loss.detach(), *way.backward(loss, [leaf], weight)), expected[:3], strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-7)


@dtypes
def test_a_mean_over_nothing_is_nan_with_gradients_of_zero(way: Way, dtype: torch.dtype) -> None:
    hidden, tensor, labels, bias = Case(dtype=dtype, bias=True).inputs()
    leaves, weight = [hidden.requires_grad_(), bias.requires_grad_()], way.as_weight(tensor)
    loss = way.function(hidden, weight, torch.full_like(labels, -100), bias=bias)
    assert torch.isnan(loss)
    assert not any(gradient.any() for gradient in way.backward(loss, leaves, weight))


@dtypes
def test_no_rows(way: Way, dtype: torch.dtype) -> None:
    _, tensor, _, bias = Case(dtype=dtype, bias=True).inputs()
    hidden = torch.zeros(0, 24, dtype=dtype, device=DEVICE, requires_grad=True)
    weight, labels = way.as_weight(tensor), torch.zeros(0, dtype=torch.int64, device=DEVICE)
    assert torch.isnan(way.function(hidden, weight, labels))
    loss = way.function(hidden, weight, labels, bias=bias.requires_grad_(), reduction="sum")
    assert loss == 0.0
    gradients = way.backward(loss, [hidden, bias], weight)
    assert [gradient.shape for gradient in gradients] == [(0, 24), (101,), (101, 24)]
    assert not any(gradient.any() for gradient in gradients)


@pytest.mark.parametrize("label", [-1, 101, 127, 2**40, -(2**63)])
def test_a_label_outside_the_vocabulary_is_nan_and_stays_in_its_row(way: Way, label: int) -> None:
    hidden, tensor, labels, _ = Case(ignored=False).inputs()
    labels[4] = label
    weight = way.as_weight(tensor)
    loss = way.function(hidden.requires_grad_(), weight, labels)
    assert torch.isnan(loss)
    of_hidden, of_weight = way.backward(loss, [hidden], weight)
    assert of_hidden.isnan().all(dim=1).nonzero().flatten().tolist() == [4]
    assert of_weight.isnan().all()


@pytest.mark.usefixtures("token_blocks")
def test_large_and_infinite_logits(way: Way) -> None:
    hidden, tensor, labels, _ = Case().inputs()
    bias = torch.full((101,), float("-inf"), device=DEVICE)
    # Whole chunks and segments are masked out, the first and the last among them, the others are far from zero.
    bias[40:50] = torch.linspace(-9e4, 9e4, 10, device=DEVICE)
    labels = torch.where(labels == -100, labels, 49)
    weight = way.as_weight(tensor)
    loss = way.function(hidden.requires_grad_(), weight, labels, bias=bias)
    wide = hidden.detach().double().requires_grad_()
    expected = reference(wide, tensor.double(), labels, bias=bias.double())
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-6)
    found, want = way.backward(loss, [hidden], weight)[0], torch.autograd.grad(expected, wide)[0]
    torch.testing.assert_close(found.double(), want, rtol=1e-5, atol=1e-6)


def test_nan_in_one_row_shows(way: Way) -> None:
    hidden, tensor, labels, _ = Case(ignored=False).inputs()
    hidden[3, 3] = float("nan")
    assert torch.isnan(way.function(hidden, way.as_weight(tensor), labels))


def test_what_cannot_be_used_is_refused(way: Way) -> None:
    for match, arguments, options in refused_calls(way.as_weight):
        with pytest.raises(
            SlideConfigError, match=f"{way.function.__name__}.*{match}" if way.name == "streamed" else match
        ):
            way.function(*arguments, **options)
