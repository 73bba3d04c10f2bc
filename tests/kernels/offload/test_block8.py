"""8-bit codes and scales bit by bit against `ds_slide.optim.low_precision`, and how large the error of a weight is."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from ds_slide.errors import SlideError
from ds_slide.kernels.offload.block8 import ROWS, block8_dequantise, block8_quantise
from ds_slide.kernels.reference.block8 import block8_dequantise_reference, block8_quantise_reference
from ds_slide.optim.low_precision import GROUP

pytestmark = pytest.mark.usefixtures("nearest_bfloat16", "poisoned_memory")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}
TILE = ROWS * GROUP
NUMELS = [1, 63, 64, 65, 17 * 64, TILE, TILE + 1, 2 * TILE + 3 * GROUP + 17]


def spread(numel: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Groups of many magnitudes, elements of many magnitudes within a group, zeros, subnormals and powers of two."""
    generator = torch.Generator().manual_seed(seed)

    def random(low: int, high: int, count: int) -> torch.Tensor:
        return torch.randint(low, high, (count,), generator=generator)

    groups = -(-numel // GROUP)
    exponents = random(-40, 4, groups).double().repeat_interleave(GROUP)[:numel]
    values = torch.randn(numel, generator=generator).double() * 10.0**exponents
    values *= 2.0 ** random(-36, 1, numel).double() ** random(0, 2, numel).double()
    values[random(0, 11, numel) == 0] = -0.0
    return values.to(dtype).to(DEVICE)


def same_bits(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """nan counts as nan, whatever its sign and payload."""
    numbers = ~expected.isnan()
    bits = BITS[expected.dtype]
    return torch.equal(found.isnan(), expected.isnan()) and torch.equal(
        found[numbers].view(bits), expected[numbers].view(bits)
    )


def check(values: torch.Tensor, signed: bool) -> None:
    codes, scales = block8_quantise(values, signed=signed)
    expected_codes, expected_scales = block8_quantise_reference(values, signed=signed)
    assert same_bits(scales, expected_scales)
    assert torch.equal(codes, expected_codes)
    for dtype in DTYPES:
        found = block8_dequantise(codes, scales, dtype, signed=signed)
        assert same_bits(found, block8_dequantise_reference(codes, scales, dtype, signed=signed)), dtype


@pytest.mark.parametrize("signed", [True, False])
def test_groups_whose_levels_begin_at_the_smallest_normal_number(signed: bool) -> None:
    """Maxima of 2^-112 to 2^-106: there a subnormal, which counts as zero, can lie above half of the least level."""
    generator = torch.Generator().manual_seed(5)
    groups = 240
    maxima = (1 + torch.rand(groups, 1, generator=generator)) * 2.0 ** torch.arange(-112, -106).repeat(40)[:, None]
    bits = torch.randint(0x00800000 - 40, 0x00800000 + 40, (groups, GROUP - 1), generator=generator, dtype=torch.int32)
    signs = torch.randint(0, 2, bits.shape, generator=generator) * 2 - 1
    check(torch.cat((maxima, bits.view(torch.float32) * signs), dim=1).flatten().to(DEVICE), signed)


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", NUMELS)
def test_bits(numel: int, dtype: torch.dtype, signed: bool) -> None:
    check(spread(numel, dtype, numel + 2 * signed), signed)


@pytest.mark.parametrize("signed", [True, False])
def test_rounding_at_every_boundary(signed: bool) -> None:
    """Values around each level and each half-way point between levels, in groups whose largest is 1 and 3."""
    steps = torch.arange(0x2F000000, 0x3F800001, 1 << 19, dtype=torch.int32)  # half a level
    points = torch.cat([steps - 1, steps, steps + 1]).view(torch.float32)
    points = torch.nn.functional.pad(points[points <= 1.0], (0, -int((points <= 1.0).sum()) % (GROUP - 1)))
    groups = torch.nn.functional.pad(points.view(-1, GROUP - 1), (0, 1), value=1.0)
    for factor in (1.0, -3.0 if signed else 3.0, 2.0**-120):
        check((groups * factor).reshape(-1).to(DEVICE), signed)


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 2.0**126, -(2.0**126)])
def test_a_group_that_is_not_finite(bad: float, signed: bool) -> None:
    values = spread(3 * GROUP + 5, torch.float32, 3)
    values[GROUP + 7] = bad
    check(values, signed)
    found = block8_dequantise(*block8_quantise(values, signed=signed), torch.float32, signed=signed)
    assert torch.equal(found.isnan().nonzero().flatten().cpu(), torch.arange(GROUP, 2 * GROUP))


@pytest.mark.parametrize("signed", [True, False])
def test_every_code(signed: bool) -> None:
    codes = torch.arange(256, dtype=torch.uint8, device=DEVICE)
    scales = torch.tensor([1.0, 3e-31, 1e38, 0.0], device=DEVICE).repeat_interleave(4)
    codes = codes.repeat(4)
    for dtype in DTYPES:
        found = block8_dequantise(codes, scales, dtype, signed=signed)
        assert same_bits(found, block8_dequantise_reference(codes, scales, dtype, signed=signed))


def test_quantising_again_changes_nothing() -> None:
    values = spread(TILE, torch.float32, 5)
    codes, scales = block8_quantise(values)
    again = block8_quantise(block8_dequantise(codes, scales, torch.float32))
    assert torch.equal(again[0], codes) and same_bits(again[1], scales)


def test_error_of_a_normally_distributed_weight() -> None:
    weight = torch.randn(64 * 1024, generator=torch.Generator().manual_seed(29)).to(DEVICE) * 0.02
    found = block8_dequantise(*block8_quantise(weight), torch.float32)
    error = (found - weight).double()
    # Eight levels a binade: half a step is at most 1/16 of the value. What is under half of the least level becomes 0.
    assert (error.abs() <= weight.abs() / 16 + 2.0**-16 * weight.abs().max()).all()
    # A step is 1/8 to 1/16 of the value, a uniform error in it 1/sqrt(12) of that: between 0.018 and 0.036.
    relative = error.square().mean().sqrt() / weight.double().square().mean().sqrt()
    assert abs(float(relative) - 0.0244) < 0.0003


def test_out() -> None:
    """Into a part of a larger buffer; nothing around it is touched."""
    numel = TILE + GROUP + 5
    values = spread(numel, torch.bfloat16, 31)
    codes = torch.full((numel + 128,), 7, dtype=torch.uint8, device=DEVICE)
    scales = torch.full((70,), 7.0, device=DEVICE)
    groups = -(-numel // GROUP)
    target = (codes[64 : 64 + numel], scales[2 : 2 + groups])
    assert block8_quantise(values, out=target) is target
    expected_codes, expected_scales = block8_quantise_reference(values)
    assert torch.equal(target[0], expected_codes) and torch.equal(target[1], expected_scales)
    assert (codes[:64] == 7).all() and (codes[64 + numel :] == 7).all()
    assert (scales[:2] == 7).all() and (scales[2 + groups :] == 7).all()

    window = torch.full((numel + 128,), 7.0, dtype=torch.bfloat16, device=DEVICE)
    out = window[64 : 64 + numel]
    assert block8_dequantise(*target, out=out) is out
    assert torch.equal(out, block8_dequantise_reference(*target, torch.bfloat16))
    assert (window[:64] == 7).all() and (window[64 + numel :] == 7).all()


def test_strided_inputs() -> None:
    values = spread(2 * 130, torch.bfloat16, 37)
    codes, scales = block8_quantise(values[::2])
    expected = block8_quantise_reference(values[::2].clone())
    assert torch.equal(codes, expected[0]) and torch.equal(scales, expected[1])
    twice = codes.repeat_interleave(2)[::2]
    found = block8_dequantise(twice, scales, torch.float32)
    assert torch.equal(found, block8_dequantise_reference(codes, scales, torch.float32))


def test_nothing() -> None:
    codes, scales = block8_quantise(torch.empty(0, device=DEVICE))
    assert codes.shape == scales.shape == (0,)
    assert block8_dequantise(codes, scales, torch.float16).shape == (0,)


def test_refusals() -> None:
    values = torch.ones(65, device=DEVICE)
    codes, scales = block8_quantise(values)
    with pytest.raises(SlideError, match="values must be flat"):
        block8_quantise(values.view(5, 13))
    with pytest.raises(SlideError, match=r"bfloat16, float16 or float32, but they are torch\.float64"):
        block8_quantise(values.double())
    with pytest.raises(SlideError, match="65 values need as many uint8 codes and 2 float32 scales"):
        block8_dequantise(codes, scales[:1], torch.float32)
    with pytest.raises(SlideError, match="65 values need as many uint8 codes"):
        block8_dequantise(codes.int(), scales, torch.float32)
    with pytest.raises(SlideError, match=r"they are torch\.float64"):
        block8_dequantise(codes, scales, torch.float64)
    with pytest.raises(SlideError, match="what is written must be contiguous"):
        block8_dequantise(codes, scales, out=torch.zeros(130, device=DEVICE)[::2])
    for wrong in ({}, {"dtype": torch.float32, "out": values}):
        with pytest.raises(SlideError, match="pass either `dtype`"):
            block8_dequantise(codes, scales, **wrong)


def test_no_silent_gradient() -> None:
    values = torch.ones(64, device=DEVICE, requires_grad=True)
    codes, scales = block8_quantise(values)
    with pytest.raises(RuntimeError):
        block8_dequantise(codes, scales, torch.float32).sum().backward()


def test_the_operators_are_registered_well() -> None:
    values = spread(65, torch.bfloat16, 41)
    codes, scales = block8_quantise(values)
    operators = torch.ops.ds_slide
    torch.library.opcheck(operators.block8_quantise, (values, True))
    torch.library.opcheck(operators.block8_quantise_out, (values, codes.clone(), scales.clone(), True))
    torch.library.opcheck(operators.block8_dequantise, (codes, scales, torch.bfloat16, True))
    torch.library.opcheck(operators.block8_dequantise_out, (codes, scales, values.clone(), True))


def test_torch_compile_goes_through() -> None:
    def linear(hidden: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return hidden @ block8_dequantise(codes, scales, torch.float32).view(16, 17)

    codes, scales = block8_quantise(spread(16 * 17, torch.float32, 43))
    hidden = torch.randn(3, 16, generator=torch.Generator().manual_seed(43)).to(DEVICE)
    compiled = torch.compile(linear, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(hidden, codes, scales), linear(hidden, codes, scales), rtol=0.0, atol=0.0)
