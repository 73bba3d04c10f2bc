"""Fused linear layer and cross-entropy with its weight in one piece: shapes, chunks, what it may not compute."""

from __future__ import annotations

import zlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from losses import DEVICE, OPTIONS, TOLERANCE, WAYS, Case, differentiate_whole
from references.linear_cross_entropy import linear_cross_entropy as reference

from ds_slide.errors import SlideError
from ds_slide.kernels.loss import cross_entropy_launch, products, weight_gradient
from ds_slide.kernels.loss import linear_cross_entropy as module
from ds_slide.kernels.loss.linear_cross_entropy import linear_cross_entropy

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def compare(case: Case) -> None:
    WAYS["whole"].compare(case)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 4 rows (three for 11 rows, the last of 3), segments of 32 columns, slices of the sum of 7 rows."""
    monkeypatch.setattr(module, "CHUNK_BYTES", 1)
    monkeypatch.setattr(module, "LEAST_ROWS", 4)
    monkeypatch.setattr(module, "_step", lambda hidden, padded, *_: module.chunk_rows(hidden.shape[0], padded, 2))
    monkeypatch.setattr(cross_entropy_launch, "SEGMENT", 32)
    monkeypatch.setattr(products, "SLICE_BYTES", 7 * 4 * 24)


@pytest.mark.parametrize("options", [OPTIONS["plain"], OPTIONS["all"]], ids=["plain", "all"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_a_bias_is_added_and_gets_its_gradient(options: dict[str, Any], dtype: torch.dtype) -> None:
    compare(Case(bias=True, dtype=dtype, options=options))


@pytest.mark.parametrize(
    "width", [1, 2, 16, 33, 264, *(pytest.param(width, marks=pytest.mark.slow) for width in (12, 20))]
)
@pytest.mark.usefixtures("small_chunks")
def test_the_sum_of_any_width_is_rounded_in_its_own_place(width: int) -> None:
    """bf16 sums its left columns in the memory of the result; an odd width cannot, and a narrow one has none."""
    compare(Case(width=width, dtype=torch.bfloat16))


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


@pytest.mark.parametrize("frozen", ["hidden", "weight", "both"])
def test_only_what_is_needed_is_computed(frozen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, labels, _ = Case().inputs()
    expected = differentiate_whole(linear_cross_entropy, Case(), False)
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
    [
        (24, 622, 320),
        (24, 2000, 320),
        (80, 0, 625),
        (80, 622, 777.5),
        (80, 2000, 800),
        (160, 0, 1250),
        (160, 622, 1250),
    ],
)
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_chunks_grow_with_the_gpu_and_with_the_sum(
    gigabytes: int, summed: int, expected: float, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As far as torch may take it."""
    properties = SimpleNamespace(total_memory=gigabytes / share * 10**9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda _: share, raising=False)
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


@pytest.mark.parametrize(("gigabytes", "expected"), [(24, 1024), (80, 2048), (150, 2048)])
def test_chunks_of_a_narrow_head_are_as_long_as_those_of_a_wide_one(gigabytes: int, expected: int) -> None:
    """Of GPUs that are not there: 16 chunks of 0.5 B, each of which reads and writes the whole sum, or 8."""
    hidden = torch.empty(16384, 896, dtype=torch.bfloat16, device="meta")
    assert module.rows_at_once(hidden, 151936, True, gigabytes * 10**9) == expected


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
    expected = differentiate_whole(linear_cross_entropy, case, False)
    for got, want in zip(differentiate_whole(compiled, case, False), expected, strict=True):
        assert torch.equal(got, want)
