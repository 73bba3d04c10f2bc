"""Fused linear layer and cross-entropy against its reference in fp64: loss, gradients, chunks, refusals."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from references.linear_cross_entropy import linear_cross_entropy as reference

from ds_slide.errors import SlideConfigError, SlideError
from ds_slide.kernels.loss import cross_entropy_launch, products, weight_gradient
from ds_slide.kernels.loss import linear_cross_entropy as module
from ds_slide.kernels.loss.linear_cross_entropy import linear_cross_entropy

pytestmark = pytest.mark.usefixtures("poisoned_memory")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Relative to the largest element. 16-bit logits are rounded at up to 4: 2^-9 * 4 each, and their gradients once more.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@dataclass
class Case:
    """One problem with fresh inputs, seeded by its shape and options."""

    rows: int = 11
    width: int = 24
    vocabulary: int = 101
    dtype: torch.dtype = torch.float32
    ignored: bool = True
    bias: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def inputs(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        generator = torch.Generator().manual_seed(zlib.crc32(repr(self).encode()))

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator)

        hidden = normal(self.rows, self.width).to(self.dtype)
        weight = (1.5 * normal(self.vocabulary, self.width) / self.width**0.5).to(self.dtype)
        labels = torch.randint(self.vocabulary, (self.rows,), generator=generator)
        if self.ignored:
            labels[::3] = self.options.get("ignore_index", -100)
        bias = normal(self.vocabulary).to(self.dtype).to(DEVICE) if self.bias else None
        return hidden.to(DEVICE), weight.to(DEVICE), labels.to(DEVICE), bias


def differentiate(function: Any, case: Case, widen: bool, grad_loss: float = 1.0) -> list[torch.Tensor]:
    """Loss and gradients (hidden, weight and, where there is one, bias)."""
    hidden, weight, labels, bias = case.inputs()
    leaves = [hidden, weight] if bias is None else [hidden, weight, bias]
    leaves = [(leaf.double() if widen else leaf).requires_grad_() for leaf in leaves]
    options = dict(case.options, bias=leaves[2] if case.bias else None)
    loss = function(leaves[0], leaves[1], labels, **options)
    return [loss.detach(), *torch.autograd.grad(loss * grad_loss, leaves)]


def compare(case: Case, grad_loss: float = 1.0) -> None:
    found = differentiate(linear_cross_entropy, case, False, grad_loss)
    assert_near(found, differentiate(reference, case, True, grad_loss), case.dtype)


def assert_near(
    found: list[torch.Tensor], expected: list[torch.Tensor], dtype: torch.dtype, scale: float = 0.0
) -> None:
    """Within TOLERANCE of the largest element of each result, or of `scale` where that is larger."""
    assert found[0].dtype == torch.float32 and found[0].ndim == 0
    for name, got, want in zip(("loss", "hidden", "weight", "bias"), found, expected, strict=False):
        assert name == "loss" or got.dtype == dtype
        assert got.shape == want.shape
        # Half the smallest number that differs from zero, where a result is that small.
        floor = 2.0**-25 if got.dtype == torch.float16 else 1e-30
        bound = TOLERANCE[dtype] * max(want.abs().max().item(), scale) + floor
        assert (got.double() - want).abs().max() <= bound, (name, (got.double() - want).abs().max(), bound)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 4 rows (three for 11 rows, the last of 3), segments of 32 columns, slices of the sum of 7 rows."""
    monkeypatch.setattr(module, "CHUNK_BYTES", 1)
    monkeypatch.setattr(module, "LEAST_ROWS", 4)
    monkeypatch.setattr(module, "_step", lambda hidden, padded, *_: module.chunk_rows(hidden.shape[0], padded, 2))
    monkeypatch.setattr(cross_entropy_launch, "SEGMENT", 32)
    monkeypatch.setattr(products, "SLICE_BYTES", 7 * 4 * 24)


OPTIONS = {
    "plain": {},
    "sum": {"reduction": "sum"},
    "ignore_index": {"ignore_index": 5},
    "smoothing": {"label_smoothing": 0.1},
    "z_loss": {"z_loss": 0.02},
    "softcap": {"softcap": 2.0},
    "num_items": {"num_items": 37, "reduction": "sum"},
    "all": {"label_smoothing": 0.2, "z_loss": 0.01, "softcap": 3.0, "num_items": 5},
}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_loss_and_gradients_agree_with_fp64(options: dict[str, Any], dtype: torch.dtype) -> None:
    compare(Case(dtype=dtype, options=options))


@pytest.mark.parametrize("options", [OPTIONS["plain"], OPTIONS["all"]], ids=["plain", "all"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_a_bias_is_added_and_gets_its_gradient(options: dict[str, Any], dtype: torch.dtype) -> None:
    compare(Case(bias=True, dtype=dtype, options=options))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("options", [OPTIONS["plain"], OPTIONS["all"]], ids=["plain", "all"])
@pytest.mark.usefixtures("small_chunks")
def test_chunks_and_blocks_are_put_together(options: dict[str, Any], dtype: torch.dtype) -> None:
    compare(Case(bias=True, dtype=dtype, options=options))


@pytest.mark.parametrize("width", [1, 2, 12, 16, 20, 33, 264])
@pytest.mark.usefixtures("small_chunks")
def test_the_sum_of_any_width_is_rounded_in_its_own_place(width: int) -> None:
    """bf16 sums its left columns in the memory of the result; an odd width cannot, and a narrow one has none."""
    compare(Case(width=width, dtype=torch.bfloat16))


@pytest.mark.parametrize("kind", ["widen", "convert"])
@pytest.mark.usefixtures("small_chunks")
def test_sums_without_an_accumulating_product(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind == "widen" and DEVICE == "cpu":
        pytest.skip("torch has no product of 16-bit matrices in fp32 on the CPU")
    monkeypatch.setattr(products, "product_kind", lambda _device, _dtype: kind)
    compare(Case(dtype=torch.bfloat16))
    compare(Case(dtype=torch.float16))


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 17, 2), (3, 17, 64), (5, 8, 65), (2, 64, 1030)])
def test_odd_shapes(shape: tuple[int, int, int]) -> None:
    rows, width, vocabulary = shape
    compare(Case(rows, width, vocabulary, ignored=False))
    compare(Case(rows, width, vocabulary, dtype=torch.bfloat16, ignored=False))


@pytest.mark.parametrize("options", [{"softcap": 2.0}, {"softcap": 3.0, "label_smoothing": 0.2}], ids=str)
def test_a_capped_row_that_ends_within_a_segment(options: dict[str, Any]) -> None:
    # 192 columns need no padding but do not fill 256: the cap makes -softcap of the -inf beyond them.
    compare(Case(3, 8, 192, bias=True, options=options))


@pytest.mark.parametrize("options", [{}, {"reduction": "sum"}, {"label_smoothing": 0.3}, {"ignore_index": 7}], ids=str)
def test_the_reference_is_torch(options: dict[str, Any]) -> None:
    case = Case(bias=True, options=options)
    hidden, weight, labels, bias = case.inputs()
    logits = torch.nn.functional.linear(hidden.double(), weight.double(), bias.double())
    expected = torch.nn.functional.cross_entropy(logits, labels, **options)
    found = reference(hidden.double(), weight.double(), labels, bias=bias.double(), **options)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0.0)


def test_num_items_as_a_tensor_is_the_int() -> None:
    expected = differentiate(linear_cross_entropy, Case(options={"num_items": 41}), False)
    hidden, weight, labels, _ = Case(options={"num_items": 41}).inputs()
    hidden.requires_grad_()
    for dtype in (torch.int64, torch.float32):
        loss = linear_cross_entropy(hidden, weight, labels, num_items=torch.tensor(41, dtype=dtype))
        assert torch.equal(loss, expected[0])
        assert torch.equal(torch.autograd.grad(loss, hidden)[0], expected[1])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("grad_loss", [65536.0, 1 / 3, -1e-3])
def test_the_incoming_gradient_scales(grad_loss: float, dtype: torch.dtype) -> None:
    # 16 bits of range: the products of 65,536 stay below fp16's 65,504 only because the mean divides them first.
    compare(Case(dtype=dtype, options={"num_items": 4000}), grad_loss)


def test_fp16_gradients_of_many_tokens_do_not_underflow() -> None:
    # 1 / count is 2^-30 here, below anything fp16 can hold; the loss scale of 2^24 brings the result back.
    compare(Case(dtype=torch.float16, options={"num_items": 2**30}), 2.0**24)


@pytest.mark.usefixtures("small_chunks")
def test_fp16_sums_may_pass_its_range_before_they_are_divided() -> None:
    hidden = torch.full((11, 24), 3e4, dtype=torch.float16, device=DEVICE)
    weight = torch.zeros(101, 24, dtype=torch.float16, device=DEVICE, requires_grad=True)
    labels = torch.zeros(11, dtype=torch.int64, device=DEVICE)
    linear_cross_entropy(hidden, weight, labels).backward()
    expected = torch.full((24,), -3e4 * 100 / 101, device=DEVICE)
    torch.testing.assert_close(weight.grad[0].float(), expected, rtol=2e-3, atol=0.0)


@pytest.mark.parametrize("frozen", ["hidden", "weight", "both"])
def test_only_what_is_needed_is_computed(frozen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, labels, _ = Case().inputs()
    expected = differentiate(linear_cross_entropy, Case(), False)
    made = []
    monkeypatch.setattr(weight_gradient.WeightGradient, "finish", lambda self: made.append(self) or self.result)
    hidden.requires_grad_(frozen == "weight")
    weight.requires_grad_(frozen == "hidden")
    loss = linear_cross_entropy(hidden, weight, labels)
    assert torch.equal(loss, expected[0])
    assert loss.requires_grad == (frozen != "both")
    assert bool(made) == (frozen == "hidden")
    if frozen != "both":
        loss.backward()
    for tensor, wanted, want in ((hidden, "weight", expected[1]), (weight, "hidden", expected[2])):
        assert torch.equal(tensor.grad, want) if frozen == wanted else tensor.grad is None


def test_without_gradients_the_loss_is_the_same() -> None:
    hidden, weight, labels, _ = Case().inputs()
    weight.requires_grad_()
    expected = linear_cross_entropy(hidden, weight, labels)
    with torch.no_grad():
        found = linear_cross_entropy(hidden, weight, labels)
    assert torch.equal(found, expected.detach()) and not found.requires_grad


def test_backward_twice_gives_the_same_and_keeps_what_was_saved() -> None:
    hidden, weight, labels, _ = Case(dtype=torch.bfloat16).inputs()
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    loss = linear_cross_entropy(*leaves, labels)
    first = torch.autograd.grad(loss * 3, leaves, retain_graph=True)
    second = torch.autograd.grad(loss * 3, leaves)
    assert all(torch.equal(one, two) for one, two in zip(first, second, strict=True))


@pytest.mark.parametrize("index", [0, 1])
def test_second_derivatives_are_refused(index: int) -> None:
    hidden, weight, labels, _ = Case().inputs()
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    gradient = torch.autograd.grad(linear_cross_entropy(*leaves, labels), leaves, create_graph=True)[index]
    with pytest.raises(SlideError, match="second derivative"):
        gradient.square().sum().backward()


def test_the_host_never_asks_for_a_value(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, labels, bias = Case(bias=True, dtype=torch.bfloat16).inputs()
    leaves = [hidden.requires_grad_(), weight.requires_grad_(), bias.requires_grad_()]
    items = torch.tensor(9, device=DEVICE)

    def refuse(*_: Any) -> None:
        raise AssertionError("a value was read from the device")

    linear_cross_entropy(hidden, weight, labels).backward()  # compiled, and the products tried
    with monkeypatch.context() as patch:
        for name in ("item", "tolist", "__bool__", "__int__", "__float__", "__index__"):
            patch.setattr(torch.Tensor, name, refuse)
        if DEVICE == "cuda":
            torch.cuda.set_sync_debug_mode("error")
        try:
            for options in ({}, {"num_items": items}, {"num_items": 9}, {"reduction": "sum"}):
                loss = linear_cross_entropy(hidden, weight, labels, bias=bias, **options)
                torch.autograd.grad(loss, leaves)
        finally:
            if DEVICE == "cuda":
                torch.cuda.set_sync_debug_mode("default")


def test_strided_inputs() -> None:
    hidden, weight, labels, _ = Case().inputs()
    expected = linear_cross_entropy(hidden, weight, labels)
    spread = torch.stack([hidden, hidden], dim=2)[:, :, 0]
    for strided in (hidden.T.contiguous().T, spread):
        assert not strided.is_contiguous()
        columns = weight.T.contiguous().T.requires_grad_()
        every_other = torch.stack([labels, labels], dim=1)[:, 0]
        loss = linear_cross_entropy(strided, columns, every_other)
        torch.testing.assert_close(loss.detach(), expected, rtol=1e-6, atol=0.0)


def test_a_mean_over_nothing_is_nan_with_gradients_of_zero() -> None:
    hidden, weight, labels, _ = Case().inputs()
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    loss = linear_cross_entropy(*leaves, torch.full_like(labels, -100))
    assert torch.isnan(loss)
    assert not any(gradient.any() for gradient in torch.autograd.grad(loss, leaves))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_no_rows(dtype: torch.dtype) -> None:
    _, weight, _, bias = Case(dtype=dtype, bias=True).inputs()
    hidden = torch.zeros(0, 24, dtype=dtype, device=DEVICE, requires_grad=True)
    leaves = [hidden, weight.requires_grad_(), bias.requires_grad_()]
    labels = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    assert torch.isnan(linear_cross_entropy(hidden, weight, labels))
    loss = linear_cross_entropy(hidden, weight, labels, bias=bias, reduction="sum")
    assert loss == 0.0
    gradients = torch.autograd.grad(loss, leaves)
    assert [gradient.shape for gradient in gradients] == [leaf.shape for leaf in leaves]
    assert not any(gradient.any() for gradient in gradients)


@pytest.mark.parametrize("label", [-1, 101, 2**40])
def test_a_label_outside_the_vocabulary_is_nan_and_stays_in_its_row(label: int) -> None:
    hidden, weight, labels, _ = Case(ignored=False).inputs()
    labels[4] = label
    hidden.requires_grad_()
    loss = linear_cross_entropy(hidden, weight, labels)
    assert torch.isnan(loss)
    broken = torch.isnan(torch.autograd.grad(loss, hidden)[0]).all(dim=1)
    assert broken.nonzero().flatten().tolist() == [4]


@pytest.mark.usefixtures("small_chunks")
def test_large_and_infinite_logits() -> None:
    hidden, weight, labels, _ = Case().inputs()
    bias = torch.full((101,), float("-inf"), device=DEVICE)
    # Whole blocks of 32 columns are masked out, the first among them, and the others are far from zero.
    bias[40:50] = torch.linspace(-9e4, 9e4, 10, device=DEVICE)
    labels = torch.where(labels == -100, labels, 49)
    hidden.requires_grad_()
    loss = linear_cross_entropy(hidden, weight, labels, bias=bias, softcap=None)
    wide = hidden.detach().double().requires_grad_()
    expected = reference(wide, weight.double(), labels, bias=bias.double())
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-6)
    found, want = torch.autograd.grad(loss, hidden)[0], torch.autograd.grad(expected, wide)[0]
    torch.testing.assert_close(found.double(), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("dtype", "skip"), [*((dtype, True) for dtype in TOLERANCE), (torch.float32, False)], ids=str)
def test_the_largest_logit_may_be_anywhere(dtype: torch.dtype, skip: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of +-1e4 with the maximum in each segment in turn, the last column too; beyond the vocabulary lies nan."""
    monkeypatch.setattr(cross_entropy_launch, "SEGMENT", 32)
    monkeypatch.setattr(cross_entropy_launch, "SKIP_IGNORED", skip)
    generator = torch.Generator().manual_seed(zlib.crc32(repr((dtype, skip)).encode()))
    top = torch.tensor([0, 31, 32, 70, 96, 100, 100, 100, 5])
    rows, vocabulary, stride = len(top), 101, 128
    wide = 9e3 * (2 * torch.rand(rows, vocabulary, generator=generator) - 1)
    wide[torch.arange(rows), top] = 1e4
    wide[6] = torch.randn(vocabulary, generator=generator)
    wide[7, :3] = torch.tensor([9998.0, 9999.0, float("-inf")])
    wide = wide.to(dtype)
    wide[8, 50] = float("nan")
    labels = torch.randint(vocabulary, (rows,), generator=generator)
    labels[5], labels[7], labels[8] = 100, 0, -100
    buffer = torch.full((rows, stride), float("nan"), dtype=dtype, device=DEVICE)
    logits = buffer[:, :vocabulary]
    logits.copy_(wide)
    scales = torch.tensor([0.15, 1.2, 0.125], device=DEVICE)
    terms = cross_entropy_launch.LossTerms(-100, 0.0, 0.0, None)
    launches = cross_entropy_launch.CrossEntropyRows(rows, vocabulary, stride, None, scales, terms)
    losses = torch.empty(rows, device=DEVICE)
    launches.losses_(logits, labels.to(DEVICE), losses)
    launches.gradients_(logits, labels.to(DEVICE))

    double = wide[:8].double().requires_grad_()
    expected = torch.nn.functional.cross_entropy(double, labels[:8], reduction="none")
    (gradient,) = torch.autograd.grad(1.2 * expected.sum(), double)
    torch.testing.assert_close(losses[:8].cpu().double(), expected.detach(), rtol=1e-6, atol=1e-6)
    # Two units in the last place of a gradient of 1.2: the interpreter cuts bf16 off.
    assert (logits[:8].cpu().double() - gradient).abs().max() <= max(2 * torch.finfo(dtype).eps, 1e-6)
    assert losses[8] == 0.0 and not logits[8].any()


@pytest.mark.usefixtures("small_chunks")
def test_nan_in_one_row_shows() -> None:
    hidden, weight, labels, _ = Case(ignored=False).inputs()
    hidden[3, 3] = float("nan")
    assert torch.isnan(linear_cross_entropy(hidden, weight, labels))


def test_chunks_are_powers_of_two_within_the_limit() -> None:
    assert module.chunk_rows(16384, 151936, 2) == 1024
    assert module.chunk_rows(1100, 151936, 2) == 1024
    assert module.chunk_rows(8192, 256000, 2) == 1024  # 0.52 GB
    assert module.chunk_rows(8192, 512000, 2) == 512
    assert module.chunk_rows(100, 151936, 2) == 100
    assert module.chunk_rows(16384, 10**9, 4) == 128
    assert module.chunk_rows(16384, 151936, 2, 754 * 10**6) == 2048  # of an H200: 0.62 GB


@pytest.mark.parametrize(
    ("gigabytes", "summed", "expected"),
    [(24, 622, 320), (24, 2000, 320), (80, 622, 777.5), (80, 2000, 800), (150, 0, 750), (150, 622, 777.5)],
)
def test_chunks_grow_with_the_gpu_and_with_the_sum(
    gigabytes: int, summed: int, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    properties = SimpleNamespace(total_memory=gigabytes * 10**9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    assert module.chunk_bytes(torch.device("cuda"), summed * 10**6) == expected * 10**6


@pytest.mark.parametrize(
    ("rows", "width", "vocabulary", "need_weight", "expected"),
    [
        (16384, 2048, 151936, True, 1024),
        (4096, 4096, 151936, True, 4096),  # 1.24 GB of logits, where the sum of chunks would take as much and a chunk
        (8192, 4096, 128256, True, 1024),
        (2048, 2048, 151936, False, 1024),  # evaluation sums nothing
        (8, 2048, 151936, False, 8),
    ],
)
def test_one_chunk_where_several_would_take_more_memory(
    rows: int, width: int, vocabulary: int, need_weight: bool, expected: int
) -> None:
    hidden = torch.empty(rows, width, dtype=torch.bfloat16, device="meta")
    assert module._step(hidden, vocabulary, vocabulary, need_weight) == expected


@pytest.mark.parametrize(("needed", "dtype"), [(True, torch.bfloat16), (False, torch.float16)], ids=str)
def test_operators_are_registered_as_torch_expects(needed: bool, dtype: torch.dtype, monkeypatch: Any) -> None:
    monkeypatch.undo()
    hidden, weight, labels, bias = Case(2, bias=True, dtype=dtype, ignored=False).inputs()
    leaves = [tensor.requires_grad_(needed) for tensor in (hidden, weight, bias)]
    arguments = (leaves[0], leaves[1], labels, leaves[2], None, 1.0, module.MEAN, -100, 0.1, 0.01, 2.0)
    torch.library.opcheck(module._linear_cross_entropy, (*arguments, needed, needed, needed))
    scales = torch.tensor([0.3, 1.2, 0.25], device=DEVICE)
    grad_loss = torch.tensor(2.0, device=DEVICE)
    torch.library.opcheck(module._scale_gradient, (weight.detach(), grad_loss, scales, torch.float32))


def test_compiles_as_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    case = Case(dtype=torch.bfloat16, bias=True, options={"softcap": 3.0, "z_loss": 0.01})
    compiled = torch.compile(linear_cross_entropy, fullgraph=True, backend="aot_eager")
    expected = differentiate(linear_cross_entropy, case, False)
    for got, want in zip(differentiate(compiled, case, False), expected, strict=True):
        assert torch.equal(got, want)


def refused_calls(as_weight: Callable[[torch.Tensor], Any]) -> Iterator[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    """(what the refusal says, arguments, options); `as_weight`: of a tensor, what the loss takes."""
    hidden, tensor, labels, _ = Case().inputs()
    weight = as_weight(tensor)
    yield from [
        ("bfloat16.*float32", (hidden.bfloat16(), weight, labels), {}),
        ("float64", (hidden.double(), as_weight(tensor.double()), labels), {}),
        ("flatten", (hidden[None], weight, labels), {}),
        ("flatten", (hidden, as_weight(tensor[:, :-1]), labels), {}),
        ("int64 labels", (hidden, weight, labels[:-1]), {}),
        ("int64 labels", (hidden, weight, labels.int()), {}),
        ("bias", (hidden, weight, labels), {"bias": tensor[:-1, 0]}),
        ('"none"', (hidden, weight, labels), {"reduction": "none"}),
        ("softcap", (hidden, weight, labels), {"softcap": 0.0}),
        ("label_smoothing", (hidden, weight, labels), {"label_smoothing": 1.5}),
        ("num_items", (hidden, weight, labels), {"num_items": torch.ones(1)}),
    ]


def test_what_cannot_be_used_is_refused() -> None:
    for match, arguments, options in refused_calls(lambda weight: weight):
        with pytest.raises(SlideConfigError, match=match):
            linear_cross_entropy(*arguments, **options)
