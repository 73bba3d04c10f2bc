"""Loss and linear layer over a weight whose rows pass by: against fp64, in every cut, and what they may not touch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

from references.linear_cross_entropy import linear_cross_entropy as reference
from test_linear_cross_entropy import DEVICE, OPTIONS, TOLERANCE, Case, assert_near, refused_calls
from test_linear_cross_entropy import differentiate as differentiate_whole

from ds_slide.errors import SlideConfigError, SlideError
from ds_slide.kernels.loss import cross_entropy_launch, products
from ds_slide.kernels.loss import linear_cross_entropy as module
from ds_slide.kernels.loss.linear_cross_entropy import linear_cross_entropy
from ds_slide.kernels.loss.streamed_linear import streamed_linear
from ds_slide.kernels.loss.streamed_linear_cross_entropy import streamed_linear_cross_entropy
from ds_slide.kernels.loss.weight_rows import WeightRows

pytestmark = pytest.mark.usefixtures("poisoned_memory")
STEP = 40  # 101 words: two chunks of 40 and one of 21


class Rows:
    """A weight that passes through two buffers, all of them nan while they are not the reader's."""

    def __init__(self, weight: torch.Tensor, step: int = STEP, requires_grad: bool = True) -> None:
        self.weight, self.step = weight.detach(), step
        self.shape, self.dtype, self.requires_grad = weight.shape, weight.dtype, requires_grad
        self.gradient: torch.Tensor | None = None
        self.passes: list[str] = []
        """Those that were made to their end."""

    def _chunks(self) -> Iterator[tuple[int, torch.Tensor]]:
        height, width = self.shape
        buffers = [torch.full((self.step, width), torch.nan, dtype=self.dtype, device=DEVICE) for _ in range(2)]
        for number, first in enumerate(range(0, height, self.step)):
            rows = buffers[number % 2][: min(self.step, height - first)]
            rows.copy_(self.weight[first : first + self.step])
            yield first, rows
            rows.fill_(torch.nan)

    def rows(self) -> Iterator[tuple[int, torch.Tensor]]:
        yield from self._chunks()
        self.passes.append("rows")

    def rows_and_gradients(self) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        assert self.requires_grad
        parts = []
        buffer = torch.empty(self.step, self.shape[1], dtype=self.dtype, device=DEVICE)
        for first, rows in self._chunks():
            gradient = buffer[: rows.shape[0]].fill_(torch.nan)
            yield first, rows, gradient
            parts.append(gradient.clone())
        self.gradient = torch.cat(parts)
        self.passes.append("gradients")


def backward(
    result: torch.Tensor, leaves: list[torch.Tensor], upstream: torch.Tensor | None = None, retain_graph: bool = False
) -> list[torch.Tensor]:
    """What a plain backward leaves in `leaves`; unlike torch.autograd.grad it also wants the weight's gradient."""
    for leaf in leaves:
        leaf.grad = None
    result.backward(upstream, retain_graph=retain_graph)
    return [leaf.grad for leaf in leaves if leaf.grad is not None]


def differentiate(case: Case, step: int = STEP, grad_loss: float = 1.0) -> list[torch.Tensor]:
    """Loss and gradients (hidden, weight and, where there is one, bias) of the streamed loss."""
    hidden, weight, labels, bias = case.inputs()
    rows = Rows(weight, step)
    leaves = [leaf.requires_grad_() for leaf in (hidden, bias) if leaf is not None]
    loss = streamed_linear_cross_entropy(hidden, rows, labels, bias=bias, **case.options)
    gradients = backward(loss * grad_loss, leaves)
    assert rows.passes == ["rows", "gradients"] and rows.gradient is not None
    return [loss.detach(), gradients[0], rows.gradient, *gradients[1:]]


def compare(case: Case, step: int = STEP, grad_loss: float = 1.0, scale: float = 0.0) -> None:
    found = differentiate(case, step, grad_loss)
    assert_near(found, differentiate_whole(reference, case, True, grad_loss), case.dtype, scale)


@pytest.fixture
def token_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 4 tokens (three for 11, the last of 3), segments of 32 columns, slices of the sums of 7 rows."""
    monkeypatch.setattr(module, "CHUNK_BYTES", 1)
    monkeypatch.setattr(module, "LEAST_ROWS", 4)
    monkeypatch.setattr(cross_entropy_launch, "SEGMENT", 32)
    monkeypatch.setattr(products, "SLICE_BYTES", 7 * 4 * 24)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_loss_and_gradients_agree_with_fp64(options: dict[str, Any], dtype: torch.dtype) -> None:
    compare(Case(rows=6, dtype=dtype, options=options))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("options", [OPTIONS["plain"], OPTIONS["all"]], ids=["plain", "all"])
@pytest.mark.usefixtures("token_blocks")
def test_blocks_of_tokens_within_chunks_of_rows(options: dict[str, Any], dtype: torch.dtype) -> None:
    compare(Case(bias=True, dtype=dtype, options=options))


@pytest.mark.parametrize("kind", ["widen", "convert"])
@pytest.mark.usefixtures("token_blocks")
def test_sums_without_an_accumulating_product(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind == "widen" and DEVICE == "cpu":
        pytest.skip("torch has no product of 16-bit matrices in fp32 on the CPU")
    monkeypatch.setattr(products, "product_kind", lambda _device, _dtype: kind)
    compare(Case(dtype=torch.bfloat16))


@pytest.mark.parametrize("step", [1, 7, 32, 33, 64, 100, 101, 500])
def test_chunks_of_any_size_are_put_together(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # Segments of 32 columns: chunks within one, of several, that end within one; their partials fold or do not.
    monkeypatch.setattr(cross_entropy_launch, "SEGMENT", 32)
    compare(Case(rows=2, bias=True, ignored=False, options=OPTIONS["all"]), step)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_shape_in_any_cut(data: st.DataObject, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, width, words = (data.draw(st.integers(1, most)) for most in (5, 20, 50))
    step = data.draw(st.integers(max(1, words // 3), words))
    options = data.draw(st.sampled_from([OPTIONS["plain"], OPTIONS["all"], OPTIONS["smoothing"]]))
    bias, ignored, blocks = (data.draw(st.booleans()) for _ in range(3))
    if ignored and "num_items" not in options:
        rows += 1  # the first is ignored: a mean needs another
    with monkeypatch.context() as patch:
        patch.setattr(cross_entropy_launch, "SEGMENT", data.draw(st.sampled_from([16, 4096])))
        if blocks:
            patch.setattr(module, "CHUNK_BYTES", 1)
            patch.setattr(module, "LEAST_ROWS", 2)
        # Of one or two elements the largest may be next to nothing, its addends never are.
        compare(Case(rows, width, words, torch.float32, ignored, bias, options), step, scale=0.05)


@pytest.mark.parametrize("later", [64, 3])
def test_chunks_may_grow_and_shrink(later: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy_launch, "SEGMENT", 32)
    case = Case()

    class Uneven(Rows):
        def _chunks(self) -> Iterator[tuple[int, torch.Tensor]]:
            first = 0
            for count in (10, 0, later, 101 - 10 - later):
                yield first, self.weight[first : first + count].clone()
                first += count

    hidden, weight, labels, _ = case.inputs()
    rows = Uneven(weight, 101)
    streamed_linear_cross_entropy(hidden.requires_grad_(), rows, labels).backward()
    expected = differentiate(case)
    torch.testing.assert_close(hidden.grad, expected[1], rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(rows.gradient, expected[2], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("options", [OPTIONS["plain"], OPTIONS["all"]], ids=["plain", "all"])
def test_it_is_the_loss_of_the_whole_weight(options: dict[str, Any], dtype: torch.dtype) -> None:
    case = Case(rows=6, bias=True, dtype=dtype, options=options)
    expected = differentiate_whole(linear_cross_entropy, case, False, 1.0)
    assert torch.equal(differentiate(case, 101)[0], expected[0])
    for got, want in zip(differentiate(case), expected, strict=True):
        # Two roundings there and one here: a unit in the last place, two where the interpreter cuts off.
        room = max(2 * torch.finfo(dtype).eps, 1e-6)
        assert (got.float() - want.float()).abs().max() <= room * want.float().abs().max()


def test_num_items_as_a_tensor_is_the_int() -> None:
    case = Case(rows=4, options={"num_items": 41})
    expected = differentiate(case)
    for dtype in (torch.int64, torch.float32):
        found = differentiate(replace_options(case, num_items=torch.tensor(41, dtype=dtype)))
        assert all(torch.equal(got, want) for got, want in zip(found, expected, strict=True))


def replace_options(case: Case, **options: Any) -> Case:
    """`case` with the same inputs, which are seeded by what it shows."""
    changed = replace(case, options=options)
    changed.inputs = case.inputs  # type: ignore[method-assign]
    return changed


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("grad_loss", [65536.0, 1 / 3, -1e-3])
def test_the_incoming_gradient_scales(grad_loss: float, dtype: torch.dtype) -> None:
    compare(Case(rows=4, dtype=dtype, options={"num_items": 4000}), grad_loss=grad_loss)


def test_fp16_gradients_of_many_tokens_do_not_underflow() -> None:
    # 1 / count is 2^-30 here, below anything fp16 can hold; the loss scale of 2^24 brings the result back.
    compare(Case(dtype=torch.float16, bias=True, options={"num_items": 2**30}), grad_loss=2.0**24)


@pytest.mark.usefixtures("token_blocks")
def test_fp16_sums_may_pass_its_range_before_they_are_divided() -> None:
    hidden = torch.full((11, 24), 3e4, dtype=torch.float16, device=DEVICE)
    rows = Rows(torch.zeros(101, 24, dtype=torch.float16, device=DEVICE))
    streamed_linear_cross_entropy(hidden, rows, torch.zeros(11, dtype=torch.int64, device=DEVICE)).backward()
    expected = torch.full((24,), -3e4 * 100 / 101, device=DEVICE)
    assert rows.gradient is not None
    torch.testing.assert_close(rows.gradient[0].float(), expected, rtol=2e-3, atol=0.0)


@pytest.mark.parametrize("function", ["loss", "linear"])
@pytest.mark.parametrize("needed", [(), ("hidden",), ("weight",), ("bias",), ("hidden", "weight"), ("weight", "bias")])
def test_only_what_is_needed_is_computed(function: str, needed: tuple[str, ...]) -> None:
    case = Case(rows=4, bias=True)
    expected = dict(zip(("hidden", "weight", "bias"), _all_gradients(function, case), strict=True))
    hidden, weight, labels, bias = case.inputs()
    assert bias is not None
    rows = Rows(weight, requires_grad="weight" in needed)
    hidden.requires_grad_("hidden" in needed)
    bias.requires_grad_("bias" in needed)
    result = _result(function, hidden, rows, labels, bias)
    assert result.requires_grad == bool(needed) and rows.passes == ["rows"]
    if needed:
        result.backward()
    # The logits are needed for the gradient of the loss by the bias, but none for that of a linear layer.
    passes = {(): [], ("bias",): ["rows"] if function == "loss" else []}
    assert rows.passes[1:] == passes.get(needed, ["gradients" if "weight" in needed else "rows"])
    for name, found in (("hidden", hidden.grad), ("weight", rows.gradient), ("bias", bias.grad)):
        assert torch.equal(found, expected[name]) if name in needed else found is None


def _result(
    function: str, hidden: torch.Tensor, rows: WeightRows, labels: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    if function == "loss":
        return streamed_linear_cross_entropy(hidden, rows, labels, bias=bias)
    return streamed_linear(hidden, rows, bias).square().sum()


def _all_gradients(function: str, case: Case) -> list[torch.Tensor]:
    hidden, weight, labels, bias = case.inputs()
    assert bias is not None
    rows = Rows(weight)
    _result(function, hidden.requires_grad_(), rows, labels, bias.requires_grad_()).backward()
    assert hidden.grad is not None and rows.gradient is not None and bias.grad is not None
    return [hidden.grad, rows.gradient, bias.grad]


@pytest.mark.parametrize("function", ["loss", "linear"])
def test_without_gradients_it_passes_once_and_is_the_same(function: str) -> None:
    hidden, weight, labels, bias = Case(bias=True).inputs()
    rows = Rows(weight)
    expected = _result(function, hidden, rows, labels, bias)
    with torch.no_grad():
        found = _result(function, hidden, rows, labels, bias)
    assert torch.equal(found, expected.detach()) and expected.requires_grad and not found.requires_grad
    assert rows.passes == ["rows", "rows"]


@pytest.mark.parametrize("function", ["loss", "linear"])
def test_backward_twice_gives_the_same(function: str) -> None:
    hidden, weight, labels, bias = Case(dtype=torch.bfloat16, bias=True).inputs()
    assert bias is not None
    leaves, rows = [hidden.requires_grad_(), bias.requires_grad_()], Rows(weight)
    result = _result(function, hidden, rows, labels, bias)
    first = [*backward(result * 3, leaves, retain_graph=True), rows.gradient]
    rows.gradient = None
    second = [*backward(result * 3, leaves), rows.gradient]
    assert all(torch.equal(one, two) for one, two in zip(first, second, strict=True))


@pytest.mark.parametrize("function", ["loss", "linear"])
@pytest.mark.parametrize("trained", ["hidden", "bias"])
def test_second_derivatives_are_refused(function: str, trained: str) -> None:
    hidden, weight, labels, bias = Case(bias=True).inputs()
    assert bias is not None
    leaf = (hidden if trained == "hidden" else bias).requires_grad_()
    # As for the gradient's penalty: the loss's own incoming gradient is a constant.
    result = _result(function, hidden, Rows(weight), labels, bias)
    (gradient,) = torch.autograd.grad(result, leaf, create_graph=True)
    with pytest.raises(SlideError, match="second derivative"):
        gradient.sum().backward()


class Apart(Rows):
    """Gradients go nowhere: put together they would be as large as the weight."""

    def rows_and_gradients(self) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        for first, rows in self._chunks():
            yield first, rows, torch.empty_like(rows)


@pytest.mark.parametrize("backward", [False, True])
def test_nothing_of_the_size_of_the_weight_or_the_logits_exists(
    backward: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # 20 tokens in blocks of 8, 101 words in chunks of 25: the largest is a block of logits, [8, 64] with its padding,
    # where the weight would be 1,616 bytes and all logits 4,040.
    hidden, weight, labels, _ = Case(20, 8, 101, torch.bfloat16).inputs()
    rows = Apart(weight, 25)
    monkeypatch.setattr(module, "CHUNK_BYTES", 1)
    monkeypatch.setattr(module, "LEAST_ROWS", 8)
    sizes: list[int] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            sizes.extend(tensor.nbytes for tensor in [result] if isinstance(tensor, torch.Tensor))
            return result

    with Watch():
        loss = streamed_linear_cross_entropy(hidden.requires_grad_(), rows, labels, label_smoothing=0.1)
        if backward:
            loss.backward()
    assert len(sizes) > 20 and max(sizes) <= 8 * 64 * 2


def test_the_host_never_asks_for_a_value(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, labels, bias = Case(rows=4, bias=True, dtype=torch.bfloat16).inputs()
    assert bias is not None
    leaves, rows = [hidden.requires_grad_(), bias.requires_grad_()], Rows(weight)
    items = torch.tensor(9, device=DEVICE)

    def refuse(*_: Any) -> None:
        raise AssertionError("a value was read from the device")

    for function in ("loss", "linear"):
        _result(function, hidden, rows, labels, bias).backward()  # compiled, and the products tried
    with monkeypatch.context() as patch:
        for name in ("item", "tolist", "__bool__", "__int__", "__float__", "__index__"):
            patch.setattr(torch.Tensor, name, refuse)
        if DEVICE == "cuda":
            torch.cuda.set_sync_debug_mode("error")
        try:
            for options in ({}, {"num_items": items}, {"num_items": 9}, {"reduction": "sum"}):
                loss = streamed_linear_cross_entropy(hidden, rows, labels, bias=bias, **options)
                backward(loss, leaves)
            backward(_result("linear", hidden, rows, labels, bias), leaves)
        finally:
            if DEVICE == "cuda":
                torch.cuda.set_sync_debug_mode("default")


def test_strided_inputs() -> None:
    case = Case(rows=5, bias=True)
    hidden, weight, labels, bias = case.inputs()
    assert bias is not None
    expected = differentiate(case)
    spread = torch.stack([hidden, hidden], dim=2)[:, :, 0]
    for strided in (hidden.T.contiguous().T, spread):
        assert not strided.is_contiguous()
        every_other = torch.stack([labels, labels], dim=1)[:, 0]
        apart = torch.stack([bias, bias], dim=1)[:, 0]
        rows, leaf = Rows(weight), strided.detach().requires_grad_()
        loss = streamed_linear_cross_entropy(leaf, rows, every_other, bias=apart)
        loss.backward()
        for got, want in zip((loss.detach(), leaf.grad, rows.gradient), expected[:3], strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_a_mean_over_nothing_is_nan_with_gradients_of_zero(dtype: torch.dtype) -> None:
    hidden, weight, labels, bias = Case(dtype=dtype, bias=True).inputs()
    assert bias is not None
    leaves, rows = [hidden.requires_grad_(), bias.requires_grad_()], Rows(weight)
    loss = streamed_linear_cross_entropy(hidden, rows, torch.full_like(labels, -100), bias=bias)
    assert torch.isnan(loss)
    gradients = [*backward(loss, leaves), rows.gradient]
    assert not any(gradient.any() for gradient in gradients if gradient is not None) and rows.gradient is not None


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_no_tokens(dtype: torch.dtype) -> None:
    _, weight, _, bias = Case(dtype=dtype, bias=True).inputs()
    assert bias is not None
    hidden = torch.zeros(0, 24, dtype=dtype, device=DEVICE, requires_grad=True)
    labels, leaves = torch.zeros(0, dtype=torch.int64, device=DEVICE), [hidden, bias.requires_grad_()]
    assert torch.isnan(streamed_linear_cross_entropy(hidden, Rows(weight), labels))
    rows = Rows(weight)
    loss = streamed_linear_cross_entropy(hidden, rows, labels, bias=bias, reduction="sum")
    assert loss == 0.0
    for result in (loss, streamed_linear(hidden, rows, bias).sum()):
        rows.gradient = None
        gradients = [*backward(result, leaves), rows.gradient]
        assert [gradient.shape for gradient in gradients if gradient is not None] == [(0, 24), (101,), (101, 24)]
        assert not any(gradient.any() for gradient in gradients if gradient is not None)
    # As often as anybody's: whoever gathers the rows may do so together with others.
    assert sorted(rows.passes) == ["gradients", "gradients", "rows", "rows"]


@pytest.mark.parametrize("label", [-1, 101, 127, 2**40, -(2**63)])
def test_a_label_outside_the_vocabulary_is_nan_and_stays_in_its_row(label: int) -> None:
    hidden, weight, labels, _ = Case(ignored=False).inputs()
    labels[4] = label
    rows = Rows(weight)
    loss = streamed_linear_cross_entropy(hidden.requires_grad_(), rows, labels)
    assert torch.isnan(loss)
    broken = torch.isnan(backward(loss, [hidden])[0]).all(dim=1)
    assert broken.nonzero().flatten().tolist() == [4]
    assert rows.gradient is not None and rows.gradient.isnan().all()


@pytest.mark.usefixtures("token_blocks")
def test_large_and_infinite_logits() -> None:
    hidden, weight, labels, _ = Case().inputs()
    bias = torch.full((101,), float("-inf"), device=DEVICE)
    # Whole chunks are masked out, the first and the last among them, and the others are far from zero.
    bias[40:50] = torch.linspace(-9e4, 9e4, 10, device=DEVICE)
    labels = torch.where(labels == -100, labels, 49)
    for step in (10, 40):
        leaf = hidden.clone().requires_grad_()
        loss = streamed_linear_cross_entropy(leaf, Rows(weight, step), labels, bias=bias)
        wide = hidden.double().requires_grad_()
        expected = reference(wide, weight.double(), labels, bias=bias.double())
        torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-6)
        found, want = torch.autograd.grad(loss, leaf)[0], torch.autograd.grad(expected, wide)[0]
        torch.testing.assert_close(found.double(), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("top", [0, 39, 40, 80, 100])
def test_the_largest_logit_may_be_in_any_chunk(top: int) -> None:
    hidden, weight, labels, _ = Case(ignored=False).inputs()
    bias = torch.linspace(-9e3, 9e3, 101, device=DEVICE)
    bias[top] = 1e4
    labels[0], labels[1] = top, 100
    loss = streamed_linear_cross_entropy(hidden, Rows(weight), labels, bias=bias)
    expected = reference(hidden.double(), weight.double(), labels, bias=bias.double())
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=1e-6)


def test_nan_in_one_token_shows() -> None:
    hidden, weight, labels, _ = Case(ignored=False).inputs()
    hidden[3, 3] = float("nan")
    assert torch.isnan(streamed_linear_cross_entropy(hidden, Rows(weight), labels))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("shape", [(11, 24), (2, 3, 24), (24,), (0, 3, 24)], ids=str)
def test_the_linear_layer_is_torch_s(shape: tuple[int, ...], biased: bool, dtype: torch.dtype) -> None:
    _, weight, _, bias = Case(dtype=dtype, bias=True).inputs()
    hidden = torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(DEVICE, dtype)
    upstream = torch.randn((*shape[:-1], 101), generator=torch.Generator().manual_seed(9)).to(DEVICE, dtype)
    wide = [tensor.double().requires_grad_() for tensor in (hidden, weight, bias) if tensor is not None]
    wide = wide if biased else wide[:2]
    leaves, rows = [hidden.requires_grad_()], Rows(weight)
    if biased and bias is not None:
        leaves.append(bias.requires_grad_())
    expected = torch.nn.functional.linear(*wide)
    found = streamed_linear(hidden, rows, bias if biased else None)
    assert found.dtype == dtype and found.shape == expected.shape
    wanted = torch.autograd.grad(expected, wide, upstream.double())
    gradients = backward(found, leaves, upstream)
    assert rows.gradient is not None and rows.passes == ["rows", "gradients"]
    room = 4 * torch.finfo(dtype).eps
    pairs = zip((found, gradients[0], rows.gradient, *gradients[1:]), (expected, *wanted), strict=True)
    for got, want in pairs:
        assert got.dtype == dtype and got.shape == want.shape
        assert not want.numel() or (got.double() - want).abs().max() <= room * max(want.abs().max(), 1.0)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_gradients_of_logits_may_be_expanded(dtype: torch.dtype) -> None:
    hidden, weight, _, _ = Case(dtype=dtype).inputs()
    rows = Rows(weight)
    streamed_linear(hidden.requires_grad_(), rows).sum().backward()
    assert hidden.grad is not None and rows.gradient is not None
    room = 4 * torch.finfo(dtype).eps
    for got, want in ((hidden.grad, weight.double().sum(dim=0)), (rows.gradient, hidden.double().sum(dim=0))):
        assert (got.double() - want).abs().max() <= room * want.abs().max()


def test_a_compiled_model_breaks_its_graph_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    hidden, weight, labels, _ = Case().inputs()
    rows = Rows(weight)

    def model(hidden: torch.Tensor) -> torch.Tensor:
        return streamed_linear_cross_entropy(2 * hidden, rows, labels) + streamed_linear(hidden + 1, rows).sum() * 1e-3

    results = []
    for function in (model, torch.compile(model, backend="aot_eager")):
        leaf = hidden.clone().requires_grad_()
        loss = function(leaf)
        results.append((loss.detach(), *torch.autograd.grad(loss, leaf)))
    assert all(torch.equal(one, two) for one, two in zip(*results, strict=True))


@pytest.mark.parametrize("function", ["loss", "linear"])
@pytest.mark.parametrize("fault", ["gap", "again", "short", "long", "narrow", "dtype", "strided", "gradient"])
def test_rows_that_are_not_the_weight_are_refused(fault: str, function: str) -> None:
    hidden, weight, labels, _ = Case().inputs()
    chunks = {
        "gap": [(0, weight[:40]), (41, weight[41:])],
        "again": [(0, weight[:40]), (0, weight[:61])],
        "short": [(0, weight[:40])],
        "long": [(0, weight), (101, weight[:1])],
        "narrow": [(0, weight[:, :-1].contiguous())],
        "dtype": [(0, weight.half())],
        "strided": [(0, weight.T.contiguous().T)],
        "gradient": [(0, weight)],
    }[fault]

    class Faulty(Rows):
        def rows(self) -> Iterator[tuple[int, torch.Tensor]]:
            yield from ([(0, self.weight)] if fault == "gradient" else chunks)

        def rows_and_gradients(self) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
            yield 0, self.weight, torch.empty_like(self.weight)[:-1]

    with pytest.raises(SlideError, match="a streamed weight"):
        _result(function, hidden, Faulty(weight), labels, None).backward()


def test_what_cannot_be_used_is_refused() -> None:
    hidden, weight, _, _ = Case().inputs()
    rows = Rows(weight)
    for match, arguments, options in refused_calls(Rows):
        with pytest.raises(SlideConfigError, match=f"streamed_linear_cross_entropy.*{match}"):
            streamed_linear_cross_entropy(*arguments, **options)
    for match, others in (
        ("transpose", (hidden[:, :-1], rows)),
        ("cast to one dtype", (hidden.half(), rows)),
        ("bias", (hidden, rows, weight[:-1, 0])),
    ):
        with pytest.raises(SlideConfigError, match=f"streamed_linear .*{match}"):
            streamed_linear(*others)
    assert not rows.passes


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("function", ["loss", "linear"])
def test_a_pass_for_other_inputs_alone_makes_no_gradient_of_the_weight(function: str, with_bias: bool) -> None:
    """torch.autograd.grad(loss, embeddings) must not add to what the next backward hands to the engine."""
    hidden, weight, labels, bias = Case(bias=with_bias).inputs()
    rows = Rows(weight)
    result = _result(function, hidden.requires_grad_(), rows, labels, bias)
    (alone,) = torch.autograd.grad(result, hidden, retain_graph=True)
    result.backward(inputs=[hidden], retain_graph=True)
    assert rows.passes == ["rows"] * 3 and rows.gradient is None
    (together,) = backward(result, [hidden])
    assert rows.passes == [*["rows"] * 3, "gradients"]
    assert torch.equal(alone, together)
