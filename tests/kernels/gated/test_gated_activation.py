"""Gated activation kernels against their torch reference in fp64, forward and backward."""

import math

import pytest
import torch

pytest.importorskip("triton")

from references.gated import activate, gated_packed_reference, gated_reference

from ds_slide.errors import SlideConfigError, SlideError
from ds_slide.kernels.gated.gated_activation import ACTIVATIONS, BLOCK, gated, gated_packed

pytestmark = pytest.mark.usefixtures("poisoned_memory")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Relative error of one rounding; Triton's interpreter truncates to bf16 instead of rounding.
ROUNDING = {
    torch.bfloat16: 2**-7 if DEVICE == "cpu" else 2**-8,
    torch.float16: 2**-11,
    torch.float32: 2**-23,
    torch.float64: 2**-50,
}
SHAPES = [(3, 17, 64), (1, BLOCK + 3), (7,)]


def draw(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (3 * values).to(dtype).to(DEVICE)


def assert_rounded(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype, roundings: int) -> None:
    """Roundings to the dtype, and the fp32 (fp64) error of the activation: of 1, or of x where it cancels."""
    assert found.dtype == dtype and found.is_contiguous()
    # The reference is fp64 too, and 1 + tanh(u) cancels there: 2.5e-15, times the other factors.
    inside = 2**-46 if dtype == torch.float64 else 2**-23
    # Subnormal fp16 results and intermediates have an absolute error of 2^-25, times another factor of about 16.
    subnormal = 2**-21 if dtype == torch.float16 else 0.0
    tolerance = {"rtol": roundings * ROUNDING[dtype] + 16 * inside, "atol": 32 * inside + subnormal}
    torch.testing.assert_close(found.double(), expected, **tolerance)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", list(ROUNDING))
@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_gradients_agree_with_fp64(shape: tuple[int, ...], dtype: torch.dtype, activation: str) -> None:
    gate, up, grad = (draw(shape, dtype, sum(shape) + index) for index in range(3))
    wide = [tensor.double().requires_grad_() for tensor in (gate, up)]
    found = gated(gate.requires_grad_(), up.requires_grad_(), activation)
    expected = gated_reference(*wide, activation)
    assert_rounded(found, expected, dtype, roundings=2)
    got = torch.autograd.grad(found, (gate, up), grad)
    want = torch.autograd.grad(expected, wide, grad.double())
    assert_rounded(got[0], want[0], dtype, roundings=1)
    assert_rounded(got[1], want[1], dtype, roundings=2)


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(3, 5, 66), (2, 2 * BLOCK + 6)])
def test_packed_agrees_and_has_one_packed_gradient(shape: tuple[int, ...], dtype: torch.dtype, activation: str) -> None:
    packed = draw(shape, dtype, sum(shape)).requires_grad_()
    wide = packed.detach().double().requires_grad_()
    found, expected = gated_packed(packed, activation), gated_packed_reference(wide, activation)
    assert_rounded(found, expected, dtype, roundings=2)
    grad = draw(tuple(found.shape), dtype, 1)
    (got,) = torch.autograd.grad(found, packed, grad)
    (want,) = torch.autograd.grad(expected, wide, grad.double())
    assert_rounded(got, want, dtype, roundings=2)
    halves = [half.detach().requires_grad_() for half in packed.chunk(2, dim=-1)]
    assert torch.equal(gated(*halves, activation), found)
    assert torch.equal(torch.cat(torch.autograd.grad(gated(*halves, activation), halves, grad), dim=-1), got)


LAYOUTS = {
    "halves": lambda values: torch.cat((values, values.flip(-1)), dim=-1)[..., : values.shape[-1]],
    "uneven rows": lambda values: values.repeat(1, 2, 1)[:, : values.shape[1]],
    "transposed": lambda values: values.transpose(0, 2).contiguous().transpose(0, 2),
    "every other column": lambda values: values.repeat_interleave(2, dim=-1)[..., ::2],
    "swapped rows": lambda values: values.transpose(0, 1).contiguous().transpose(0, 1),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("place", range(3))
def test_any_strides(place: int, layout: str) -> None:
    tensors = [draw((3, 5, 33), torch.float32, index) for index in range(3)]
    plain = [tensor.clone().requires_grad_() for tensor in tensors]
    tensors[place] = LAYOUTS[layout](tensors[place])
    assert not tensors[place].is_contiguous() and torch.equal(tensors[place], plain[place])
    gate, up, grad = tensors
    found = gated(gate.requires_grad_(), up.requires_grad_(), "silu")
    expected = gated(*plain[:2], "silu")
    assert torch.equal(found, expected) and found.is_contiguous()
    for got, want in zip(
        torch.autograd.grad(found, (gate, up), grad), torch.autograd.grad(expected, plain[:2], plain[2]), strict=True
    ):
        assert torch.equal(got, want)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_packed_with_any_strides(layout: str) -> None:
    plain = draw((3, 5, 34), torch.float32, 1).requires_grad_()
    packed = LAYOUTS[layout](plain.detach()).requires_grad_()
    found, expected = gated_packed(packed, "gelu_tanh"), gated_packed(plain, "gelu_tanh")
    assert torch.equal(found, expected)
    grads = [torch.autograd.grad(output.sum(), inputs)[0] for output, inputs in ((found, packed), (expected, plain))]
    assert torch.equal(*grads)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_no_overflow_and_accurate_tails(activation: str) -> None:
    """Gates over all magnitudes: exp overflows, tanh rounds to 1, probabilities underflow."""
    magnitudes = torch.logspace(-30, 30, 241, dtype=torch.float64)
    gate = torch.cat((magnitudes, torch.zeros(1), -magnitudes)).float().to(DEVICE).requires_grad_()
    wide = gate.detach().double().requires_grad_()
    found, expected = gated(gate, torch.ones_like(gate), activation), activate(wide, activation)
    (got,), (want,) = torch.autograd.grad(found.sum(), gate), torch.autograd.grad(expected.sum(), wide)
    torch.testing.assert_close(found.double(), expected, rtol=2e-6, atol=1e-6)
    torch.testing.assert_close(got.double(), want, rtol=2e-6, atol=1e-6)
    if activation != "gelu":  # 1 + erf cancels here as it does in torch
        tail = (wide < -0.5) & (expected.abs() > 1e-30)
        # exp multiplies the rounding error of its argument, of up to 70, by that argument.
        torch.testing.assert_close(found[tail].double(), expected[tail], rtol=2e-5, atol=0.0)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_stays_so(value: float, activation: str) -> None:
    gate = torch.tensor([value, 1.0, 1.0], device=DEVICE)
    up = torch.tensor([1.0, value, 1.0], device=DEVICE)
    found = gated(gate, up, activation)
    assert torch.equal(torch.isfinite(found), torch.tensor([False, False, True], device=DEVICE))


@pytest.mark.parametrize("dtype", [torch.float16] if DEVICE == "cpu" else [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_values_are_those_of_eager_torch(activation: str, dtype: torch.dtype) -> None:
    """The same bits but for activations within a few fp32 units of a rounding boundary."""
    gate, up = draw((64, 256), dtype, 5), draw((64, 256), dtype, 6)
    found, eager = gated(gate, up, activation), gated_reference(gate, up, activation)
    # A boundary every 2^13 fp32 units (fp16) and some units of error leave 1e-3. Below -2 eager's gelus cancel.
    compared = gate > (-2 if activation != "silu" else -math.inf)
    differing = (found != eager)[compared].double().mean().item()
    assert differing < 1e-3, differing
    # The activation and the product may each lie across a boundary: two units in the last place.
    rtol, atol = (2**-9, 2**-18) if dtype == torch.float16 else (2**-6, 2**-16)
    torch.testing.assert_close(found, eager, rtol=rtol, atol=atol)


def test_inputs_are_unchanged_and_alone_are_saved() -> None:
    gate, up = draw((4, 20), torch.float32, 1), draw((4, 20), torch.float32, 2)
    packed = torch.cat((gate, up), dim=-1)
    before = [tensor.clone() for tensor in (gate, up, packed)]
    saved = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor.data_ptr())
        return tensor

    inputs = [tensor.requires_grad_() for tensor in (gate, up, packed)]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = gated(gate, up, "silu"), gated_packed(packed, "silu")
    assert saved == [tensor.data_ptr() for tensor in inputs]
    first = torch.autograd.grad([output.sum() for output in outputs], inputs, retain_graph=True)
    second = torch.autograd.grad([output.sum() for output in outputs], inputs)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(inputs, before, strict=True))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradcheck_and_refused_second_derivative(activation: str) -> None:
    gate, up = (draw((2, 3), torch.float64, index).requires_grad_() for index in range(2))
    packed = draw((2, 6), torch.float64, 3).requires_grad_()
    assert torch.autograd.gradcheck(lambda *inputs: gated(*inputs, activation), (gate, up), fast_mode=True)
    assert torch.autograd.gradcheck(lambda inputs: gated_packed(inputs, activation), (packed,), fast_mode=True)
    for output, inputs in ((gated(gate, up, activation), gate), (gated_packed(packed, activation), packed)):
        (grad,) = torch.autograd.grad(output.sum(), inputs, create_graph=True)
        with pytest.raises(RuntimeError, match="autograd"):
            grad.sum().backward()


@pytest.mark.parametrize("shape", [(0, 8), (4, 0)])
def test_nothing_is_launched_for_nothing(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ds_slide.kernels.gated.gated_activation._gated_kernel", None)
    monkeypatch.setattr("ds_slide.kernels.gated.gated_activation._gated_backward_kernel", None)
    gate, packed = (torch.ones(shape, device=DEVICE, requires_grad=True) for _ in range(2))
    outputs = gated(gate, gate, "silu"), gated_packed(packed, "silu")
    assert outputs[0].shape == shape and outputs[1].shape == (shape[0], shape[1] // 2)
    (outputs[0].sum() + outputs[1].sum()).backward()
    assert gate.grad is not None and packed.grad is not None and packed.grad.shape == shape


def test_refusals_name_what_is_wrong() -> None:
    gate = torch.ones(2, 5, device=DEVICE)
    with pytest.raises(SlideConfigError, match="'relu' is unknown"):
        gated(gate, gate, "relu")
    with pytest.raises(SlideConfigError, match="'relu' is unknown"):
        gated_packed(gate, "relu")
    with pytest.raises(SlideError, match="alike"):
        gated(gate, gate[:1], "silu")
    with pytest.raises(SlideError, match="alike"):
        gated(gate, gate.half(), "silu")
    with pytest.raises(SlideError, match="floating type"):
        gated(gate.int(), gate.int(), "silu")
    with pytest.raises(SlideError, match="at least one dimension"):
        gated(gate[0, 0], gate[0, 0], "silu")
    with pytest.raises(SlideError, match="odd"):
        gated_packed(gate, "silu")


def test_registration_is_sound() -> None:
    gate, up, packed = (draw((3, size), torch.float32, 1) for size in (6, 6, 12))
    short = ("test_schema", "test_faketensor")  # the rest is about autograd, which the backward does not have
    torch.library.opcheck(torch.ops.ds_slide.gated_backward.default, (gate, gate, up, "gelu"), test_utils=short)
    torch.library.opcheck(torch.ops.ds_slide.gated_packed_backward.default, (gate, packed, "gelu"), test_utils=short)
    gate.requires_grad_(), up.requires_grad_(), packed.requires_grad_()
    torch.library.opcheck(torch.ops.ds_slide.gated.default, (gate, up, "silu"))
    torch.library.opcheck(torch.ops.ds_slide.gated_packed.default, (packed, "silu"))


def test_torch_compile_goes_through() -> None:
    gate, up = (draw((3, 8), torch.float32, index).requires_grad_() for index in range(2))

    def mix(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return (gated(gate * 2, up, "silu") + gated_packed(torch.cat((up, gate), dim=-1), "gelu_tanh")).square().sum()

    expected = torch.autograd.grad(mix(gate, up), (gate, up))
    found = torch.autograd.grad(torch.compile(mix, fullgraph=True, backend="aot_eager")(gate, up), (gate, up))
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.skipif(DEVICE == "cpu", reason="20 GB of GPU memory")
@pytest.mark.parametrize("rows", [1, 1 << 16])
def test_offsets_past_two_to_the_31(rows: int) -> None:
    packed = torch.randn(rows, (1 << 32) // rows + 32, dtype=torch.bfloat16, device=DEVICE)
    found = gated_packed(packed, "silu")
    want = gated_packed_reference(packed[-1:], "silu")
    torch.testing.assert_close(found[-1:, -4096:], want[:, -4096:], rtol=2**-7, atol=1e-6)
