"""bf16 and 8-bit moments: what is theirs alone; test_bits.py compares their updates with the reference."""

from __future__ import annotations

import pytest
import torch

from ds_slide.errors import SlideError
from ds_slide.optim.adamw import AdamWHyper
from ds_slide.optim.cpu import CpuUpdater
from ds_slide.optim.reference import decode_split, encode_split

from .units import SEED, assert_same_bits, native, random_unit, reference, unit

STATES = ("bf16", "8bit")
HYPER = AdamWHyper(lr=3e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, step=7)


def ordinary(state: str, numel: int, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    weight, exp_avg, exp_avg_sq, grad = (torch.randn(numel, generator=generator) for _ in range(4))
    return unit(HYPER, weight, [exp_avg * 0.1, exp_avg_sq.abs() * 0.01], grad, "fp32", state)


@pytest.mark.parametrize("state", STATES)
def test_every_low_half_of_the_masters_is_kept(isa, workers, state):
    """By the kernels of each format of the moments; of ties (0x8000) as of others, with even and odd upper halves."""
    uppers = torch.tensor([0x0080, 0x3F80, 0x3F81, 0x7F7F, 0xBF80, 0xBF81])
    bits = ((uppers << 16)[:, None] + torch.arange(1 << 16)).flatten()
    masters = torch.where(bits >= 1 << 31, bits - (1 << 32), bits).int().view(torch.float32)
    actual = random_unit(HYPER, masters.numel(), state_format=state)
    hi, actual.remainder = encode_split(masters)
    actual.weight = hi.view(torch.bfloat16)
    before = actual.clone()
    native(workers, actual, AdamWHyper(lr=0.0), isa=isa)
    assert torch.equal(actual.weight.view(torch.int16), before.weight.view(torch.int16))
    assert torch.equal(actual.remainder, before.remainder)
    assert torch.equal(decode_split(actual.weight, actual.remainder), masters)


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("what", ["seed", "first", "step"])
def test_other_units_elements_and_steps_round_differently(state, what):
    one = ordinary(state, 6400)
    other = one.clone()
    reference(one, HYPER)
    hyper = AdamWHyper(**(vars(HYPER) | {"step": 8, "bias_correction": True})) if what == "step" else HYPER
    reference(other, hyper, seed=SEED + (what == "seed"), first=64 * (what == "first"))
    integer = torch.int16 if state == "bf16" else torch.uint8
    for moment, another in zip(one.states, other.states, strict=True):
        assert (moment.view(integer) != another.view(integer)).float().mean() > 0.05


@pytest.mark.parametrize("state", STATES)
def test_special_gradients(isa, workers, state):
    """The same in every path; an infinity or NaN in an 8-bit moment makes its group NaN from the next step on."""
    special = [float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-45, -1e-40, 2.0**-126, 3.4e38, 1e18]
    for index, value in enumerate(special):
        actual = ordinary(state, 192, seed=index)
        actual.grad[70] = value
        expected = actual.clone()
        for _ in range(2):
            native(workers, actual, HYPER, isa=isa)
            reference(expected, HYPER)
            assert_same_bits(actual, expected)
        spoiled = actual.weight.isnan()
        if state == "8bit" and not abs(value) <= 1e18:  # the square of 3.4e38 is infinite
            assert spoiled[64:128].all() and not spoiled[:64].any() and not spoiled[128:].any()
        else:
            assert spoiled.nonzero().flatten().tolist() == (
                [70] if abs(value) == float("inf") or value != value else []
            )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"exp_avg_scale": None}, "exp_avg_scale must be an fp32 tensor of 2 elements"),
        ({"exp_avg_sq_scale": torch.zeros(1)}, "exp_avg_sq_scale has 1 elements but 100 elements need 2"),
        ({"exp_avg_sq_scale": torch.zeros(2).double()}, "exp_avg_sq_scale is torch.float64 but must be torch.float32"),
        ({"exp_avg": torch.zeros(100)}, "exp_avg is torch.float32 but must be torch.uint8"),
        ({"exp_avg": torch.zeros(100), "exp_avg_sq": torch.zeros(100)}, "exp_avg_scale must be None"),
        ({"exp_avg_sq": torch.zeros(100).half()}, "exp_avg_sq is torch.float16; use float32, bfloat16 or uint8"),
        ({"first": 32}, "first is 32, but chunks of a unit begin at multiples of 64"),
    ],
)
def test_wrong_tensors_are_named(change, words):
    own = random_unit(HYPER, 100, state_format="8bit")
    named = dict(
        zip(("exp_avg", "exp_avg_sq", "exp_avg_scale", "exp_avg_sq_scale"), (*own.states, *own.scales), strict=True)
    )
    named |= change
    first = named.pop("first", 0)
    own.states, scales = [named["exp_avg"], named["exp_avg_sq"]], [named["exp_avg_scale"], named["exp_avg_sq_scale"]]
    with pytest.raises(SlideError, match=words):
        CpuUpdater(1).update_(own.elements(first=first)._replace(scales=scales), HYPER)


def test_the_binding_checks_its_arguments(workers):
    own = random_unit(HYPER, 64, "fp32", "8bit")
    with pytest.raises(ValueError, match="first is 32 but must be a multiple of 64"):
        native(workers, own, HYPER, first=32)
    own.scales[0] = torch.zeros(0)
    with pytest.raises(ValueError, match="scale_ptrs is 0"):
        native(workers, own, HYPER)
