"""Loss and linear layer over a weight whose rows pass by: against fp64, in every cut, and what they may not touch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

from losses import DEVICE, OPTIONS, STEP, TOLERANCE, Case, Rows, assert_near, backward, differentiate_whole
from losses import differentiate_streamed as differentiate
from references.linear_cross_entropy import linear_cross_entropy as reference

from ds_slide.errors import SlideConfigError, SlideError
from ds_slide.kernels.loss import cross_entropy_launch
from ds_slide.kernels.loss import linear_cross_entropy as module
from ds_slide.kernels.loss.linear_cross_entropy import linear_cross_entropy
from ds_slide.kernels.loss.streamed_linear import streamed_linear
from ds_slide.kernels.loss.streamed_linear_cross_entropy import streamed_linear_cross_entropy
from ds_slide.kernels.loss.weight_rows import WeightRows

pytestmark = [pytest.mark.usefixtures("poisoned_memory"), pytest.mark.thinned(2)]


def compare(case: Case, step: int = STEP, scale: float = 0.0) -> None:
    found = differentiate(case, step)
    assert_near(found, differentiate_whole(reference, case, True), case.dtype, scale)


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


@pytest.mark.parametrize("top", [0, 39, 40, 80, 100])
def test_the_largest_logit_may_be_in_any_chunk(top: int) -> None:
    hidden, weight, labels, _ = Case(ignored=False).inputs()
    bias = torch.linspace(-9e3, 9e3, 101, device=DEVICE)
    bias[top] = 1e4
    labels[0], labels[1] = top, 100
    loss = streamed_linear_cross_entropy(hidden, Rows(weight), labels, bias=bias)
    expected = reference(hidden.double(), weight.double(), labels, bias=bias.double())
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=1e-6)


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


def test_no_tokens() -> None:
    _, weight, _, bias = Case(bias=True).inputs()
    hidden = torch.zeros(0, 24, device=DEVICE, requires_grad=True)
    for function in ("loss", "linear"):
        rows = Rows(weight)
        _result(function, hidden, rows, torch.zeros(0, dtype=torch.int64, device=DEVICE), bias).backward()
        # As often as anybody's: whoever gathers the rows may do so together with others.
        assert rows.passes == ["rows", "gradients"] and rows.gradient.shape == (101, 24)


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


def test_what_the_linear_layer_cannot_use_is_refused() -> None:
    hidden, weight, _, _ = Case().inputs()
    rows = Rows(weight)
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
