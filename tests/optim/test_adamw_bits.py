"""Every path of the CPU update gives the bits of the torch reference: instruction sets, threads, sizes, offsets."""

from __future__ import annotations

import itertools

import pytest
import torch

from ds_slide import _native
from ds_slide.optim.adamw import AdamWHyper
from ds_slide.optim.reference import encode_split

FORMATS = ("bf16_split", "fp32", "fp16_master")
GRADS = ("bf16", "fp16", "fp32")
HYPER = AdamWHyper(lr=3e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, step=7)
VARIANTS = (
    HYPER,
    AdamWHyper(lr=3e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, step=7, adam_w_mode=False),
    AdamWHyper(lr=1e-4, betas=(0.0, 0.999), eps=0.0, weight_decay=0.0, step=1, bias_correction=False),
)


@pytest.mark.parametrize(("weight_format", "grad_dtype"), list(itertools.product(FORMATS, GRADS)))
@pytest.mark.parametrize("wide", [False, True], ids=["usual", "wide"])
def test_bits_of_the_reference(
    isa, workers, make_state_buffers, run_native, run_reference, assert_same_bits, weight_format, grad_dtype, wide
):
    for seed, hyper in enumerate(VARIANTS):
        actual = make_state_buffers(weight_format, grad_dtype, 16384 + 77, wide=wide, seed=seed)
        expected = actual.clone()
        for _ in range(3):
            run_native(workers, actual, hyper, 0.37, isa)
            run_reference(expected, hyper, 0.37)
        assert_same_bits(actual, expected)


@pytest.mark.parametrize("numel", [0, 1, 7, 8, 15, 16, 17, 31, 33, 16383, 16385, 3 * 16384 + 5])
def test_any_size(isa, workers, make_state_buffers, run_native, run_reference, assert_same_bits, numel):
    actual = make_state_buffers("bf16_split", "bf16", numel)
    expected = actual.clone()
    run_native(workers, actual, HYPER, isa=isa)
    run_reference(expected, HYPER)
    assert_same_bits(actual, expected)


@pytest.mark.parametrize("offset", [1, 3, 13])
@pytest.mark.parametrize("weight_format", FORMATS)
def test_arrays_need_only_element_alignment(
    isa, workers, make_state_buffers, run_native, run_reference, assert_same_bits, weight_format, offset
):
    expected = make_state_buffers(weight_format, "fp16", 5000)
    actual = expected.clone(offset)
    assert actual.weight.data_ptr() % 32 != 0
    run_native(workers, actual, HYPER, isa=isa)
    run_reference(expected, HYPER)
    assert_same_bits(actual, expected)


def test_elements_outside_the_range_are_not_touched(isa, workers, make_state_buffers, run_native):
    state_buffers = make_state_buffers("bf16_split", "bf16", 64)
    before = state_buffers.clone()
    inner = state_buffers.clone()
    for name in ("weight", "remainder", "exp_avg", "exp_avg_sq", "grad"):
        setattr(inner, name, getattr(state_buffers, name)[3:60])
    run_native(workers, inner, HYPER, isa=isa)
    for name, after in state_buffers.outputs().items():
        changed = (after.view(torch.int16) != before.outputs()[name].view(torch.int16)).view(64, -1).any(1)
        assert not changed[:3].any() and not changed[60:].any()
    assert (state_buffers.exp_avg[3:60] != before.exp_avg[3:60]).all()


@pytest.mark.parametrize("num_threads", [1, 2, 3, 4])
def test_any_number_of_threads(make_state_buffers, run_native, run_reference, assert_same_bits, num_threads):
    actual = make_state_buffers("bf16_split", "bf16", 10 * 16384 + 99)
    expected = actual.clone()
    run_native(_native.Workers(num_threads, []), actual, HYPER)
    run_reference(expected, HYPER)
    assert_same_bits(actual, expected)


def test_any_split(workers, make_state_buffers, run_native, assert_same_bits):
    """A block updated in pieces, as its gradient arrives, has the bits of the block updated at once."""
    whole = make_state_buffers("bf16_split", "bf16", 50001)
    pieces = whole.clone()
    run_native(workers, whole, HYPER)
    for start, stop in itertools.pairwise([0, 1, 1000, 33333, 50001]):
        part = pieces.clone()
        for name in ("weight", "remainder", "exp_avg", "exp_avg_sq", "grad"):
            setattr(part, name, getattr(pieces, name)[start:stop])
        run_native(workers, part, HYPER)
    assert_same_bits(pieces, whole)


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("where", ["weight", "exp_avg", "exp_avg_sq", "grad"])
def test_nan_infinity_zero_and_subnormal_inputs(
    isa, workers, make_state_buffers, run_native, run_reference, assert_same_bits, weight_format, where
):
    special = [float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-45, -1e-40, 2.0**-126, -(2.0**-126), 3.4e38]
    actual = make_state_buffers(weight_format, "fp32", 40 * len(special))
    values = torch.tensor(special).repeat(40)
    if where == "weight" and weight_format == "bf16_split":
        hi, actual.remainder = encode_split(values)
        actual.weight = hi.view(torch.bfloat16)
    elif where == "weight":
        (actual.weight if actual.remainder is None else actual.remainder).copy_(values)
    else:
        getattr(actual, where).copy_(values)
    for hyper in VARIANTS:
        expected = actual.clone()
        state_buffers = actual.clone()
        run_native(workers, state_buffers, hyper, isa=isa)
        run_reference(expected, hyper)
        assert_same_bits(state_buffers, expected)


def test_flush_to_zero_at_its_very_edge(isa, workers, make_state_buffers, run_native, run_reference, assert_same_bits):
    """Products in [2^-126 - 2^-150, 2^-126 - 2^-151) round to 2^-126 in fp32, yet the processor's mode flushes them.

    An implementation that looks at the rounded result alone keeps them.
    """
    edge_products = 0
    for beta1 in torch.linspace(0.5, 0.99, 60).tolist():
        hyper = AdamWHyper(lr=1e-3, betas=(beta1, 0.999))
        center = torch.tensor(2.0**-126 / beta1).view(torch.int32)
        actual = make_state_buffers("fp32", "fp32", 64)
        actual.grad.zero_()
        actual.exp_avg.copy_((center + torch.arange(-32, 32, dtype=torch.int32)).view(torch.float32))
        product = actual.exp_avg.double() * torch.tensor(beta1).double()
        edge_products += int(((product >= 2.0**-126 - 2.0**-150) & (product < 2.0**-126 - 2.0**-151)).sum())
        expected = actual.clone()
        run_native(workers, actual, hyper, isa=isa)
        run_reference(expected, hyper)
        assert_same_bits(actual, expected)
    assert edge_products > 5


def test_a_processor_mode_of_the_caller_changes_nothing(
    make_state_buffers, run_native, run_reference, assert_same_bits
):
    """torch.set_flush_denormal sets the mode that a thread hands on to the threads it starts."""
    actual = make_state_buffers("fp32", "fp32", 40000, wide=True)
    expected = actual.clone()
    run_reference(expected, HYPER)
    tiny, sums = torch.full((8,), 1e-40), torch.full((8,), 1e-40)
    bits = tiny.view(torch.int32) * 2
    torch.set_flush_denormal(True)
    try:
        workers = _native.Workers(1, [])
        run_native(workers, actual, HYPER)
        _native.accumulate(workers, sums.data_ptr(), "fp32", tiny.data_ptr(), "fp32", 8)
    finally:
        torch.set_flush_denormal(False)
    assert_same_bits(actual, expected)
    assert bits[0] != 0 and torch.equal(sums.view(torch.int32), bits)
