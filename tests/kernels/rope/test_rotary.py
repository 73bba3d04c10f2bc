"""Rotary embedding kernel against its torch reference in fp64, forward and backward."""

import pytest
import torch

pytest.importorskip("triton")

from references.rope import rope_reference

from ds_slide.errors import SlideError
from ds_slide.kernels.rope.rotary import rope

pytestmark = pytest.mark.usefixtures("poisoned_memory")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Relative error of one rounding; Triton's interpreter truncates to bf16 instead of rounding.
ROUNDING = {
    torch.bfloat16: 2**-7 if DEVICE == "cpu" else 2**-8,
    torch.float16: 2**-11,
    torch.float32: 2**-23,
    torch.float64: 2**-50,
}
# batch, q_heads, k_heads, positions, d, r
SHAPES = [
    (2, 4, 2, 5, 64, 64),
    (1, 3, 1, 7, 96, 96),
    (2, 5, 5, 3, 96, 24),  # most dimensions pass through
    (1, 12, 4, 2, 80, 32),
    (1, 40, 8, 3, 16, 16),  # several tiles of query heads
    (1, 2, 11, 3, 16, 14),  # several tiles of key heads only
    (2, 2, 1, 17, 256, 256),  # several programs a sample, the last partly out of range
    (3, 1, 1, 33, 6, 2),
    (1, 1, 1, 1, 2, 2),
]
LAYOUTS = ["position_major", "head_major", "packed", "strided_last"]


def states(shape: tuple[int, ...], layout: str, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """[batch, heads, positions, d] in one of the layouts that models hand over."""
    batch, heads, positions, width = shape
    if layout == "position_major":
        values = torch.randn(batch, positions, heads, width, generator=generator).transpose(1, 2)
    elif layout == "head_major":
        values = torch.randn(batch, heads, positions, width, generator=generator)
    elif layout == "packed":
        values = torch.randn(batch, positions, heads, 3 * width, generator=generator)
        return values.to(dtype).to(DEVICE)[..., width : 2 * width].transpose(1, 2)
    else:
        values = torch.randn(batch, heads, width, positions, generator=generator).transpose(2, 3)
    return values.to(dtype).to(DEVICE)


def problem(shape, dtype, layout="position_major", angle_dtype=None, shared=False):
    """q, k, cos, sin; the two halves of cos and sin differ, as no rotary module gives them but the formula allows."""
    batch, q_heads, k_heads, positions, width, rotary = shape
    generator = torch.Generator().manual_seed(sum(shape) + LAYOUTS.index(layout))
    q = states((batch, q_heads, positions, width), layout, dtype, generator)
    k = states((batch, k_heads, positions, width), layout, dtype, generator)
    angles = torch.randn(2, 1 if shared else batch, positions, rotary, generator=generator) * 9
    cos, sin = angles[0].cos(), angles[1].sin()
    return q, k, cos.to(angle_dtype or dtype).to(DEVICE), sin.to(angle_dtype or dtype).to(DEVICE)


def assert_rounded(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype, scale: float = 4.0) -> None:
    """One rounding to the dtype, and fp32 (fp64) errors of the products before it, which may cancel."""
    assert found.dtype == dtype
    inside = 2**-52 if dtype == torch.float64 else 2**-23
    torch.testing.assert_close(found.double(), expected, rtol=ROUNDING[dtype], atol=scale * inside)


@pytest.mark.by_turns(2)
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [(shape, dtype) for shape in SHAPES for dtype in (torch.bfloat16, torch.float32)]
    + [(shape, dtype) for shape in SHAPES[:3] for dtype in (torch.float16, torch.float64)],
)
def test_values_and_gradients_agree_with_fp64(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    q, k, cos, sin = problem(shape, dtype)
    wide = [tensor.double().requires_grad_(index < 2) for index, tensor in enumerate((q, k, cos, sin))]
    q.requires_grad_(), k.requires_grad_()
    found, expected = rope(q, k, cos, sin), rope_reference(*wide)
    for got, want in zip(found, expected, strict=True):
        assert_rounded(got, want, dtype)
    grads = [torch.randn_like(output) for output in found]
    got = torch.autograd.grad(found, (q, k), grads)
    want = torch.autograd.grad(expected, wide[:2], [grad.double() for grad in grads])
    for name, one, other in zip("qk", got, want, strict=True):
        assert one.shape == other.shape, name
        assert_rounded(one, other, dtype)


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("grad_layout", LAYOUTS[1:])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_strides_in_and_the_same_order_out(layout: str, grad_layout: str) -> None:
    shape = (2, 4, 3, 5, 40, 12)
    q, k, cos, sin = problem(shape, torch.float32, layout)
    grads = problem(shape, torch.float32, grad_layout)[:2]
    wide = [tensor.double().requires_grad_() for tensor in (q, k)]
    expected = rope_reference(*wide, cos.double(), sin.double())
    found = rope(q.requires_grad_(), k.requires_grad_(), cos, sin)
    results = [*found, *torch.autograd.grad(found, (q, k), grads)]
    wanted = [*expected, *torch.autograd.grad(expected, wide, [grad.double() for grad in grads])]
    for got, want in zip(results, wanted, strict=True):
        assert_rounded(got, want, torch.float32)
        in_order = got.transpose(1, 2) if layout in ("position_major", "packed") else got
        assert in_order.is_contiguous()


@pytest.mark.parametrize("angle_dtype", [torch.float32, torch.bfloat16])
def test_angles_shared_by_the_batch_and_in_fp32(angle_dtype: torch.dtype) -> None:
    q, k, cos, sin = problem((3, 4, 2, 9, 32, 32), torch.bfloat16, angle_dtype=angle_dtype, shared=True)
    expected = rope_reference(q.double(), k.double(), cos.double(), sin.double())
    spread = torch.randn(2, 9, 3, 64, device=DEVICE).to(angle_dtype)[:, :, :1, ::2].transpose(1, 2)
    spread.copy_(torch.stack((cos, sin)))
    padded = torch.randn(2, 1, 9, 40, device=DEVICE).to(angle_dtype)[..., :32]
    padded.copy_(spread)
    for angles in ((cos, sin), (cos.expand(3, -1, -1), sin.expand(3, -1, -1)), (cos, spread[1]), spread, padded):
        for got, want in zip(rope(q, k, *angles), expected, strict=True):
            assert_rounded(got, want, torch.bfloat16)


def test_inputs_are_neither_changed_nor_returned_and_only_the_angles_are_saved() -> None:
    q, k, cos, sin = problem((2, 4, 2, 5, 16, 8), torch.float32)
    before = [tensor.clone() for tensor in (q, k, cos, sin)]
    saved = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor.data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = rope(q.requires_grad_(), k.requires_grad_(), cos, sin)
    assert sorted(saved) == sorted([cos.data_ptr(), sin.data_ptr()])
    loss = sum(output.square().sum() for output in outputs)
    first = torch.autograd.grad(loss, (q, k), retain_graph=True)
    second = torch.autograd.grad(loss, (q, k))
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)
    for tensor, copy in zip((q, k, cos, sin), before, strict=True):
        assert torch.equal(tensor, copy)


def test_gradient_of_one_output_alone_and_expanded() -> None:
    q, k, cos, sin = problem((2, 4, 2, 5, 16, 16), torch.float32)
    new_q, new_k = rope(q.requires_grad_(), k.requires_grad_(), cos, sin)
    grad_q, grad_k = torch.autograd.grad(new_q.sum(), (q, k), retain_graph=True, materialize_grads=True)
    wide = q.detach().double().requires_grad_()
    (want,) = torch.autograd.grad(rope_reference(wide, wide, cos.double(), sin.double())[0].sum(), wide)
    assert_rounded(grad_q, want, torch.float32)
    assert torch.equal(grad_k, torch.zeros_like(k))
    (alone,) = torch.autograd.grad(new_k.sum(), k)
    assert not torch.equal(alone, grad_k)


def test_gradcheck_and_refused_second_derivative() -> None:
    q, k, cos, sin = problem((1, 2, 1, 3, 6, 4), torch.float64)
    q.requires_grad_(), k.requires_grad_()
    assert torch.autograd.gradcheck(lambda q, k: rope(q, k, cos, sin), (q, k), fast_mode=True)
    new_q, _ = rope(q, k, cos, sin)
    grad_output = torch.ones_like(new_q, requires_grad=True)
    (grad,) = torch.autograd.grad(new_q, q, grad_output, create_graph=True)
    with pytest.raises(RuntimeError, match="autograd"):
        grad.sum().backward()


@pytest.mark.parametrize("shape", [(0, 4, 2, 5, 16, 16), (2, 4, 2, 0, 16, 16)])
def test_nothing_is_launched_for_nothing(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ds_slide.kernels.rope.rotary._rope_kernel", None)
    q, k, cos, sin = problem(shape, torch.float32)
    q.requires_grad_()
    new_q, new_k = rope(q, k, cos, sin)
    assert new_q.shape == q.shape and new_k.shape == k.shape
    new_q.sum().backward()
    assert q.grad is not None and q.grad.shape == q.shape


def test_refusals_name_what_is_wrong() -> None:
    q, k, cos, sin = problem((2, 4, 2, 5, 16, 16), torch.float32)
    for arguments, word in [
        ((q, k[:, :, :3], cos, sin), "alike"),
        ((q, k[:, :0], cos, sin), "at least one head"),
        ((q, k, cos[:, :3], sin[:, :3]), "batch or 1"),
        ((q, k, cos[..., :3], sin[..., :3]), "even number"),
        ((q[..., :8], k[..., :8], cos, sin), "even number"),
        ((q, k.bfloat16(), cos, sin), "one floating type"),
        ((q, k, cos.bfloat16(), sin.bfloat16()), "torch.float32"),
        ((q, k, cos.clone().requires_grad_(), sin), "no gradient"),
    ]:
        with pytest.raises(SlideError, match=word):
            rope(*arguments)


def test_registration_is_sound() -> None:
    q, _, cos, sin = problem((2, 4, 2, 3, 8, 4), torch.float32)
    k = problem((2, 4, 2, 3, 8, 4), torch.float32, "head_major")[1]
    short = ("test_schema", "test_faketensor")  # the rest is about autograd, which the backward does not have
    torch.library.opcheck(torch.ops.ds_slide.rope_backward.default, (q, k, cos, sin, True, False), test_utils=short)
    q.requires_grad_(), k.requires_grad_()
    torch.library.opcheck(torch.ops.ds_slide.rope.default, (q, k, cos, sin))


def test_torch_compile_goes_through() -> None:
    q, k, cos, sin = problem((2, 4, 2, 3, 8, 8), torch.float32)
    q.requires_grad_(), k.requires_grad_()

    def scores(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        new_q, new_k = rope(q * 2, k * 3, cos, sin)
        return (new_q[:, :2] * new_k).sum()

    expected = torch.autograd.grad(scores(q, k), (q, k))
    found = torch.autograd.grad(torch.compile(scores, fullgraph=True, backend="aot_eager")(q, k), (q, k))
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.skipif(DEVICE == "cpu", reason="9 GB of GPU memory")
def test_offsets_past_two_to_the_31() -> None:
    positions = 1 << 19
    q = torch.randn(1, 33, positions, 128, dtype=torch.bfloat16, device=DEVICE)
    angles = torch.randn(1, positions, 128, device=DEVICE)
    new_q, _ = rope(q, q[:, :1], angles.cos(), angles.sin())
    last = slice(positions - 8, positions)
    angles = angles[:, last].double()
    want, _ = rope_reference(q[:, :, last].double(), q[:, :1, last].double(), angles.cos(), angles.sin())
    torch.testing.assert_close(new_q[:, :, last].double(), want, rtol=2**-8, atol=1e-5)
