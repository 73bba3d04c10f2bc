"""What the formats of the moments can hold, and how stochastic rounding distributes."""

from __future__ import annotations

import math

import pytest
import torch

from ds_slide.errors import SlideError
from ds_slide.optim.adamw import AdamWHyper
from ds_slide.optim.cpu import CpuUpdater
from ds_slide.optim.low_precision import STATE_FORMATS, from_fp32, least_level, to_fp32
from ds_slide.optim.rounding import random_bits, round_8bit, round_bf16
from ds_slide.optim.rule import Elements

SIGNED = pytest.mark.parametrize("signed", [True, False], ids=["exp_avg", "exp_avg_sq"])


def randn(numel: int, signed: bool, seed: int = 0) -> torch.Tensor:
    values = torch.randn(numel, generator=torch.Generator().manual_seed(seed))
    return values if signed else values.square()


def test_bytes():
    assert {name: each.dtype.itemsize for name, each in STATE_FORMATS.items()} == {"fp32": 4, "bf16": 2, "8bit": 1}
    assert [STATE_FORMATS["8bit"].scale_numel(numel) for numel in (0, 1, 64, 65)] == [0, 1, 1, 2]
    assert STATE_FORMATS["bf16"].scale_numel(65) == 0


@SIGNED
def test_every_code_is_a_number_of_its_own_and_comes_back(signed):
    """All codes under scales over the whole range of fp32: a checkpoint in fp32 resumes to the bit."""
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[codes != 0x80] if signed else codes
    exponents = torch.arange(-110 if signed else -94, 126)
    mantissas = torch.cat([torch.tensor([1.0, 2 - 2.0**-23]), 1 + torch.rand(18)])
    scales = (mantissas.double() * 2.0 ** exponents.double()[:, None]).float().flatten()
    top = torch.tensor(127 if signed else 255, dtype=torch.uint8)
    # Groups that hold the largest code, as every group does.
    groups = torch.stack([torch.cat([top[None], part]) for part in torch.cat([codes, codes[:60]])[:315].split(63)])
    stored = groups.repeat(len(scales), 1, 1).flatten()
    scale = scales.repeat_interleave(len(groups))
    values = to_fp32(stored, scale, signed=signed)
    assert values.isfinite().all()
    again, again_scale = from_fp32(values, torch.uint8, signed=signed)
    assert torch.equal(again, stored) and torch.equal(again_scale, scale)
    for number in (0, 0xFFFF):  # nor does stochastic rounding move them
        moved, moved_scale = round_8bit(values, torch.full(values.shape, number), signed=signed)
        assert torch.equal(moved, stored) and torch.equal(moved_scale, scale)
    magnitudes = to_fp32(torch.arange(128 if signed else 256, dtype=torch.uint8), torch.ones(4)[: 2 if signed else 4],
                         signed=signed)  # fmt: skip
    assert magnitudes[0] == 0 and magnitudes[1] == least_level(signed) and magnitudes[-1] == 1
    assert (magnitudes.diff() > 0).all() and (magnitudes[2:] / magnitudes[1:-1]).max() <= 1.125


@pytest.mark.parametrize("name", STATE_FORMATS)
@SIGNED
def test_error_of_rounding_to_nearest(name, signed):
    values = randn(10_000, signed)
    stored, scale = from_fp32(values, STATE_FORMATS[name].dtype, signed=signed)
    back = to_fp32(stored, scale, signed=signed)
    assert stored.dtype == STATE_FORMATS[name].dtype and back.dtype == torch.float32
    bound = {"fp32": 0.0, "bf16": 2.0**-8, "8bit": 1 / 16}[name]
    floor = 0 if scale is None else least_level(signed) * scale.repeat_interleave(64)[:10_000]
    assert ((back - values).abs() <= bound * values.abs() + floor).all()
    again, again_scale = from_fp32(back, stored.dtype, signed=signed)
    assert torch.equal(again.view(torch.uint8), stored.view(torch.uint8))
    if scale is not None:
        assert torch.equal(again_scale, scale)
        padded = torch.nn.functional.pad(values.abs(), (0, -10_000 % 64)).view(-1, 64)
        assert torch.equal(scale, padded.amax(1)), "the largest magnitude of a group is its scale"
        assert torch.equal(back.abs()[padded.argmax(1) + 64 * torch.arange(len(scale))], scale), "and exact"


@SIGNED
def test_ends_of_the_range(signed):
    top = -0.5 if signed else 0.5
    values = torch.tensor([top, 1e-30, 0.0, -0.0, 1e-42, 0.5 * 1.25 * 2.0 ** (-16 if signed else -32)])
    stored, _ = from_fp32(values, torch.uint8, signed=signed)
    if signed:
        assert stored.tolist() == [0xFF, 0, 0, 0, 0, 1]
    else:
        assert stored.tolist() == [0xFF, 1, 0, 0, 0, 1], "a positive exp_avg_sq is never stored as zero"
    for tiny in (2.0**-126, 2.0**-112):
        stored, scale = from_fp32(torch.tensor([tiny, 0.0]), torch.uint8, signed=signed)
        assert stored[1] == 0 and to_fp32(stored, scale, signed=signed)[0] <= 2 * tiny
    stored, scale = from_fp32(torch.tensor([1.0, math.nan] + 62 * [1.0] + [2.0]), torch.uint8, signed=signed)
    back = to_fp32(stored, scale, signed=signed)
    assert back[:64].isnan().all() and back[64] == 2
    stored, scale = from_fp32(torch.zeros(100), torch.uint8, signed=signed)
    assert not stored.any() and not scale.any()


@SIGNED
def test_stochastic_rounding_is_unbiased(signed):
    """Each random number once: the mean over all of them is the value, to 2^-17 of the distance of two levels."""
    values = torch.cat([randn(20, signed), torch.tensor([3.0]), torch.full((1,), 3 * 2.0**-18) / 1.3])
    random = torch.arange(1 << 16)
    for index, value in enumerate(values.tolist()):
        if not signed and value < 3 * 2.0**-30:
            continue
        group = torch.tensor([3.0, value]).repeat(1 << 16, 32).flatten()
        codes, scale = round_8bit(group[: 64 * 2048], random[:2048].repeat_interleave(64) * 32 + 16, signed=signed)
        mean = to_fp32(codes, scale, signed=signed)[1::64].double().mean().item()
        level = max(abs(value) / 8, 3 * least_level(signed))
        assert abs(mean - value) <= level * 2.0**-10, (index, value, mean)
    mean = round_bf16(values.repeat_interleave(1 << 16), random.repeat(len(values))).double().view(-1, 1 << 16).mean(1)
    assert ((mean - values).abs() <= values.abs() * 2.0**-22).all()


def test_stochastic_bf16_keeps_what_bf16_holds():
    numbers = torch.arange(-(1 << 15), 1 << 15).short().view(torch.bfloat16)
    for random in (0, 1, 0x8000, 0xFFFF):
        rounded = round_bf16(numbers.float(), torch.full((1 << 16,), random))
        same = (rounded.view(torch.int16) == numbers.view(torch.int16)) | (rounded.isnan() & numbers.isnan())
        assert same.all()


def test_random_bits_are_uniform_and_unrelated():
    """Over elements, steps, seeds and the two halves that round the two moments."""
    numel = 1 << 16
    sigma = 1 / math.sqrt(numel)

    def halves(seed: int, step: int, first: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        bits = random_bits(seed, step, first, numel)
        return tuple(half.double() / 0xFFFF - 0.5 for half in (bits >> 16, bits & 0xFFFF))

    base = halves(1, 1)
    for mine in base:
        histogram = torch.histc(mine, 64, -0.5, 0.5)
        chi_squared = ((histogram - numel / 64) ** 2 / (numel / 64)).sum().item()
        assert chi_squared < 63 + 5 * math.sqrt(2 * 63)
        for shift in (1, 2, 3, 16, 64, 128, 4096):
            assert abs((mine * mine.roll(shift)).mean()) * 12 < 5 * sigma, shift
    others = [*halves(1, 2), *halves(1, 3), *halves(2, 1), *halves(2, 2), *halves(1, 1, 1 << 32), *halves(1, 1, numel)]
    for other in (*others, base[1]):
        assert abs((base[0] * other).mean()) * 12 < 5 * sigma
    one_element = torch.cat([random_bits(1, step, 4224, 1) for step in range(1, 2000)]).double() / 2**32 - 0.5
    assert abs(one_element.mean()) < 5 / math.sqrt(12 * 2000)
    assert abs((one_element[1:] * one_element[:-1]).mean()) * 12 < 5 / math.sqrt(2000)


def test_random_bits_go_on_beyond_32_bits():
    at, numel = (1 << 32) - 64, 128
    whole = random_bits(5, 9, at, numel)
    assert torch.equal(whole, torch.cat([random_bits(5, 9, at, 64), random_bits(5, 9, at + 64, 64)]))
    assert not torch.equal(whole[64:], random_bits(5, 9, 0, 64))


@pytest.mark.parametrize("state", ["bf16", "8bit"])
def test_zero_gradients_decay_the_moments_and_nothing_else(state):
    numel, dtype = 6400, STATE_FORMATS[state].dtype
    exp_avg, m_scale = from_fp32(randn(numel, True), dtype, signed=True)
    exp_avg_sq, v_scale = from_fp32(randn(numel, False), dtype, signed=False)
    start = [to_fp32(exp_avg, m_scale, signed=True), to_fp32(exp_avg_sq, v_scale, signed=False)]
    weight = torch.zeros(numel)
    for step in range(1, 51):
        hyper = AdamWHyper(lr=0.0, betas=(0.9, 0.99), step=step)
        moments, scales = (exp_avg, exp_avg_sq), (m_scale, v_scale)
        CpuUpdater(1).update_(Elements(weight, None, moments, torch.zeros(numel), scales, seed=3), hyper)
    assert not weight.any()
    ends = [to_fp32(exp_avg, m_scale, signed=True), to_fp32(exp_avg_sq, v_scale, signed=False)]
    for begin, end, beta in zip(start, ends, (0.9, 0.99), strict=True):
        assert end.abs().double().sum() / begin.abs().double().sum() == pytest.approx(beta**50, rel=0.01)
        if state == "8bit":  # codes do not move at all: only the scales decay
            torch.testing.assert_close(end, begin * beta**50, rtol=1e-5, atol=0)
    fresh = [torch.zeros(numel, dtype=dtype), torch.zeros(numel, dtype=dtype)]
    scales = [None if each is None else torch.zeros_like(each) for each in (m_scale, v_scale)]
    CpuUpdater(1).update_(Elements(weight, None, fresh, torch.zeros(numel), scales), AdamWHyper(lr=1.0))
    assert not any(each.any() for each in (weight, *fresh, *(s for s in scales if s is not None)))


@pytest.mark.parametrize("state", ["bf16", "8bit"])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.9, 0.95)])
def test_no_step_is_long_however_gradients_spread_in_a_group(state, betas):
    """Gradients over 40 binades side by side, with bursts: fp32 moments bound |step| by lr * C; so do these, nearly.

    An exp_avg_sq that rounded to zero under an exp_avg that did not would make steps of 1e3 * lr and more here.
    """
    numel, lr, updater = 64 * 200, 1.0, CpuUpdater(1)
    generator = torch.Generator().manual_seed(1)
    magnitude = torch.ldexp(torch.ones(numel), -torch.randint(0, 40, (numel,), generator=generator))
    longest = {}
    for name in ("fp32", state):
        chosen = STATE_FORMATS[name]
        moments = [torch.zeros(numel, dtype=chosen.dtype) for _ in range(2)]
        scales = [torch.zeros(chosen.scale_numel(numel)) if chosen.has_scales else None for _ in range(2)]
        weight, longest[name] = torch.zeros(numel), 0.0
        noise = torch.Generator().manual_seed(2)
        for step in range(1, 61):
            burst = torch.where(torch.rand(numel, generator=noise) < 0.05, 1e3, 1.0)
            grad = torch.randn(numel, generator=noise) * magnitude * burst
            before = weight.clone()
            hyper = AdamWHyper(lr=lr, betas=betas, eps=1e-30, step=step)
            updater.update_(Elements(weight, None, moments, grad, scales, seed=4), hyper)
            longest[name] = max(longest[name], (weight - before).abs().max().item())
    assert longest[state] <= 1.5 * longest["fp32"]


def test_what_cannot_be_converted_is_refused():
    with pytest.raises(SlideError, match=r"need 2 scales of torch\.float32, .* but there are none"):
        to_fp32(torch.zeros(65, dtype=torch.uint8), signed=True)
    with pytest.raises(SlideError, match=r"1 of torch\.float32"):
        to_fp32(torch.zeros(65, dtype=torch.uint8), torch.zeros(1), signed=True)
    with pytest.raises(SlideError, match=r"torch\.float16"):
        to_fp32(torch.zeros(65, dtype=torch.float16), signed=True)
    with pytest.raises(SlideError, match=r"torch\.int8"):
        from_fp32(torch.zeros(65), torch.int8, signed=True)
