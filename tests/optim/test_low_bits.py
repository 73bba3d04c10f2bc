"""bf16 and 8-bit moments: every path of the CPU update gives the bits of the torch reference."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, fields

import pytest
import torch

from ds_slide.errors import SlideError
from ds_slide.optim.adamw import AdamWHyper
from ds_slide.optim.cpu import CpuUpdater
from ds_slide.optim.low_precision import STATE_FORMATS, from_fp32
from ds_slide.optim.reference import decode_split, encode_split

from .adamw_calls import adamw_reference_, native_adamw_, updater_adamw_

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
STATES = ("bf16", "8bit")
HYPER = AdamWHyper(lr=3e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, step=7)
VARIANTS = (
    HYPER,
    AdamWHyper(lr=3e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, step=9, adam_w_mode=False),
    AdamWHyper(lr=1e-4, betas=(0.0, 0.999), eps=0.0, weight_decay=0.0, step=1, bias_correction=False),
)
SEED, FIRST = 0xFEDCBA9876543210, 64 * 1000


@dataclass
class State:
    """One unit in the order of the arguments of an update; every tensor [numel] but the scales."""

    weight: torch.Tensor
    remainder: torch.Tensor | None
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    grad: torch.Tensor
    exp_avg_scale: torch.Tensor | None = None
    exp_avg_sq_scale: torch.Tensor | None = None

    def map(self, change) -> State:
        return State(
            *(each if each is None else change(each) for each in (getattr(self, f.name) for f in fields(self)))
        )

    def clone(self) -> State:
        return self.map(torch.Tensor.clone)

    def chunk(self, start: int, stop: int) -> State:
        """Elements [start, stop), in place."""
        scales = slice(start // 64, -(-stop // 64))
        numel = self.weight.numel()
        return self.map(lambda each: each[start:stop] if each.numel() == numel else each[scales])


def wide(numel: int, generator: torch.Generator) -> torch.Tensor:
    """Numbers of every magnitude of fp32 in one group, subnormals included."""
    exponent = torch.randint(-149, 60, (numel,), generator=generator).double()
    return (torch.randn(numel, generator=generator).double() * 2.0**exponent).float()


def make(weight_format: str, grad: str, state: str, numel: int, *, spread: bool = False, seed: int = 0) -> State:
    generator = torch.Generator().manual_seed(seed)
    draw = wide if spread else lambda n, g: torch.randn(n, generator=g)
    weight, remainder = draw(numel, generator), None
    if weight_format == "bf16_split":
        hi, remainder = encode_split(weight)
        weight = hi.view(torch.bfloat16)
    if weight_format == "fp16_master":
        weight, remainder = weight.half(), weight
    dtype = STATE_FORMATS[state].dtype
    exp_avg, exp_avg_scale = from_fp32(draw(numel, generator) * 0.1, dtype, signed=True)
    exp_avg_sq, exp_avg_sq_scale = from_fp32(draw(numel, generator).abs() * 0.01, dtype, signed=False)
    gradient = draw(numel, generator).to(DTYPES[grad])
    return State(weight, remainder, exp_avg, exp_avg_sq, gradient, exp_avg_scale, exp_avg_sq_scale)


def run_reference(
    s: State, hyper: AdamWHyper, grad_scale: float = 1.0, *, seed: int = SEED, first: int = FIRST
) -> None:
    adamw_reference_(
        s.weight, s.remainder, s.exp_avg, s.exp_avg_sq, s.grad, hyper, grad_scale,
        exp_avg_scale=s.exp_avg_scale, exp_avg_sq_scale=s.exp_avg_sq_scale, seed=seed, first=first,
    )  # fmt: skip


def run_native(workers, s: State, hyper: AdamWHyper, grad_scale: float = 1.0, isa: str = "auto", first=FIRST) -> None:
    native_adamw_(
        workers, s.weight, s.remainder, s.exp_avg, s.exp_avg_sq, s.grad, hyper, grad_scale, isa,
        exp_avg_scale=s.exp_avg_scale, exp_avg_sq_scale=s.exp_avg_sq_scale, seed=SEED, first=first,
    )  # fmt: skip


def assert_same_bits(actual: State, expected: State) -> None:
    for field in fields(State):
        got, want = getattr(actual, field.name), getattr(expected, field.name)
        if want is None:
            continue
        integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[want.element_size()]
        different = got.view(integer) != want.view(integer)
        if want.is_floating_point():
            different &= ~(got.isnan() & want.isnan())
        where = different.nonzero().flatten()
        assert not len(where), f"{field.name} differs at {len(where)} places, first {where[0]}"


@pytest.mark.parametrize(
    ("weight_format", "grad"), list(itertools.product(("bf16_split", "fp32", "fp16_master"), DTYPES))
)
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("spread", [False, True], ids=["usual", "wide"])
def test_bits_of_the_reference(isa, workers, weight_format, grad, state, spread):
    for seed, hyper in enumerate(VARIANTS):
        actual = make(weight_format, grad, state, 4096 + 77, spread=spread, seed=seed)
        expected = actual.clone()
        for _ in range(2):
            run_native(workers, actual, hyper, 0.37, isa)
            run_reference(expected, hyper, 0.37)
        assert_same_bits(actual, expected)


@pytest.mark.parametrize("state", STATES)
def test_every_low_half_of_the_masters_is_kept(isa, workers, state):
    """By the kernels of each format of the moments; of ties (0x8000) as of others, with even and odd upper halves."""
    uppers = torch.tensor([0x0080, 0x3F80, 0x3F81, 0x7F7F, 0xBF80, 0xBF81])
    bits = ((uppers << 16)[:, None] + torch.arange(1 << 16)).flatten()
    masters = torch.where(bits >= 1 << 31, bits - (1 << 32), bits).int().view(torch.float32)
    actual = make("bf16_split", "bf16", state, masters.numel())
    hi, actual.remainder = encode_split(masters)
    actual.weight = hi.view(torch.bfloat16)
    before = actual.clone()
    run_native(workers, actual, AdamWHyper(lr=0.0), isa=isa)
    assert torch.equal(actual.weight.view(torch.int16), before.weight.view(torch.int16))
    assert torch.equal(actual.remainder, before.remainder)
    assert torch.equal(decode_split(actual.weight, actual.remainder), masters)


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("numel", [0, 1, 7, 16, 63, 64, 65, 127, 16383, 16385, 3 * 16384 + 5])
def test_any_size(isa, workers, state, numel):
    actual = make("bf16_split", "bf16", state, numel)
    expected = actual.clone()
    run_native(workers, actual, HYPER, isa=isa)
    run_reference(expected, HYPER)
    assert_same_bits(actual, expected)


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("num_threads", [1, 2, 3, 4])
def test_any_number_of_threads(state, num_threads):
    actual = make("bf16_split", "bf16", state, 10 * 16384 + 99)
    expected = actual.clone()
    updater_adamw_(CpuUpdater(num_threads), **vars(actual), hyper=HYPER, seed=SEED, first=FIRST)
    run_reference(expected, HYPER)
    assert_same_bits(actual, expected)


@pytest.mark.parametrize("state", STATES)
def test_chunks_of_a_unit_have_the_bits_of_the_whole(isa, workers, state):
    """On the CPU, in the reference, and where the chunk's numbers pass 2^32."""
    for base in (0, (1 << 32) - 64 * 20):
        whole = make("bf16_split", "bf16", state, 5003)
        pieces = whole.clone()
        mixed = whole.clone()
        run_native(workers, whole, HYPER, isa=isa, first=base)
        for index, (start, stop) in enumerate(itertools.pairwise([0, 64, 1024, 3328, 5003])):
            run_native(workers, pieces.chunk(start, stop), HYPER, isa=isa, first=base + start)
            if index % 2:
                run_native(workers, mixed.chunk(start, stop), HYPER, isa=isa, first=base + start)
            else:
                run_reference(mixed.chunk(start, stop), HYPER, first=base + start)
        assert_same_bits(pieces, whole)
        assert_same_bits(mixed, whole)


@pytest.mark.parametrize("state", STATES)
def test_the_reference_works_in_chunks(monkeypatch, state):
    whole = make("bf16_split", "bf16", state, 5000)
    chunked = whole.clone()
    run_reference(whole, HYPER)
    monkeypatch.setattr("ds_slide.optim.reference._CHUNK", 960)
    run_reference(chunked, HYPER)
    assert_same_bits(chunked, whole)


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("what", ["seed", "first", "step"])
def test_other_units_elements_and_steps_round_differently(state, what):
    one = make("fp32", "fp32", state, 6400)
    other = one.clone()
    run_reference(one, HYPER)
    hyper = AdamWHyper(**(vars(HYPER) | {"step": 8, "bias_correction": True})) if what == "step" else HYPER
    run_reference(other, hyper, seed=SEED + (what == "seed"), first=FIRST + 64 * (what == "first"))
    integer = torch.int16 if state == "bf16" else torch.uint8
    for moment in ("exp_avg", "exp_avg_sq"):
        assert (getattr(one, moment).view(integer) != getattr(other, moment).view(integer)).float().mean() > 0.05


@pytest.mark.parametrize("state", STATES)
def test_elements_outside_the_range_are_not_touched(isa, workers, state):
    state_before = make("bf16_split", "bf16", state, 64 * 5)
    after = state_before.clone()
    run_native(workers, after.chunk(64, 250), HYPER, isa=isa)
    assert_same_bits(after.chunk(0, 64), state_before.chunk(0, 64))
    for name in ("weight", "remainder", "exp_avg", "exp_avg_sq"):
        assert torch.equal(getattr(after, name)[250:], getattr(state_before, name)[250:])
        assert not torch.equal(getattr(after, name)[64:250], getattr(state_before, name)[64:250])


@pytest.mark.parametrize("state", STATES)
def test_special_gradients(isa, workers, state):
    """The same in every path; an infinity or NaN in an 8-bit moment makes its group NaN from the next step on."""
    special = [float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-45, -1e-40, 2.0**-126, 3.4e38, 1e18]
    for index, value in enumerate(special):
        actual = make("fp32", "fp32", state, 192, seed=index)
        actual.grad[70] = value
        expected = actual.clone()
        for _ in range(2):
            run_native(workers, actual, HYPER, isa=isa)
            run_reference(expected, HYPER)
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
    arguments = vars(make("bf16_split", "bf16", "8bit", 100)) | {"hyper": HYPER} | change
    with pytest.raises(SlideError, match=words):
        updater_adamw_(CpuUpdater(1), **arguments)


def test_the_binding_checks_its_arguments(workers):
    with pytest.raises(ValueError, match="first is 32 but must be a multiple of 64"):
        run_native(workers, make("fp32", "fp32", "8bit", 64), HYPER, first=32)
    state = make("fp32", "fp32", "8bit", 64)
    state.exp_avg_scale = None
    with pytest.raises(ValueError, match="scale_ptrs is 0"):
        run_native(workers, state, HYPER)
