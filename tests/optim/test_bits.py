"""Every path of the CPU update gives the bits of the torch reference: formats, instruction sets, threads, sizes."""

from __future__ import annotations

import itertools

import pytest
import torch

from ds_slide import _native
from ds_slide.optim.adamw import AdamWHyper
from ds_slide.optim.cpu import CpuUpdater
from ds_slide.optim.lion import LionHyper
from ds_slide.optim.rule import Hyper
from ds_slide.optim.sgd import SgdHyper

from .units import GRADIENTS, SEED, SPECIAL, WEIGHT_FORMATS, assert_same_bits, native, random_unit, reference, unit

ADAMW = AdamWHyper(lr=3e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, step=7)
ADAMS: dict[str, Hyper] = {
    "adamw": ADAMW,
    "adam": AdamWHyper(lr=3e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, step=9, adam_w_mode=False),
    "adamw_bare": AdamWHyper(lr=1e-4, betas=(0.0, 0.999), eps=0.0, weight_decay=0.0, bias_correction=False),
}
HYPERS: dict[str, Hyper] = {
    **ADAMS,
    "lion": LionHyper(lr=3e-3, betas=(0.9, 0.99), weight_decay=0.1, step=4),
    "lion_bare": LionHyper(lr=1e-4, betas=(0.0, 0.5)),
    "sgd": SgdHyper(lr=0.1, weight_decay=0.01, keeps_momentum=False),
    "sgd_momentum": SgdHyper(lr=0.1, momentum=0.9, weight_decay=0.01, step=1),
    "sgd_dampened": SgdHyper(lr=0.1, momentum=0.9, dampening=0.3, step=2),
    "sgd_nesterov": SgdHyper(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01, step=3),
    "sgd_group_without": SgdHyper(lr=0.1, step=5),
}
SHORT = ("bf16", "8bit")
SECTION = 16384  # elements that a thread takes at once

by_hyper = pytest.mark.parametrize("hyper", HYPERS.values(), ids=HYPERS)
by_hyper_and_state = pytest.mark.parametrize(
    ("hyper", "state"),
    [
        *(pytest.param(hyper, "fp32", id=name) for name, hyper in HYPERS.items()),
        *(pytest.param(hyper, state, id=f"{name}-{state}") for name, hyper in ADAMS.items() for state in SHORT),
    ],
)
by_state = pytest.mark.parametrize("state", ["fp32", *SHORT])


@by_hyper_and_state
def test_bits_of_the_reference_in_every_format(isa: str, workers: _native.Workers, hyper: Hyper, state: str) -> None:
    for seed, (weight_format, grad) in enumerate(itertools.product(WEIGHT_FORMATS, GRADIENTS)):
        actual = random_unit(hyper, 4096 + 77, weight_format, state, grad, seed)
        expected = actual.clone()
        for _ in range(3):
            native(workers, actual, hyper, 0.37, isa, first=64 * 1000)
            reference(expected, hyper, 0.37, first=64 * 1000)
        assert_same_bits(actual, expected)


@by_hyper_and_state
def test_any_size_and_alignment(isa: str, workers: _native.Workers, hyper: Hyper, state: str) -> None:
    for numel in (0, 1, 7, 8, 15, 16, 17, 31, 33, 63, 64, 65, 127, SECTION - 1, SECTION + 1):
        expected = random_unit(hyper, numel, state_format=state)
        actual = expected.map(lambda tensor: torch.cat([tensor[:0].new_zeros(1), tensor])[1:])
        native(workers, actual, hyper, 1.0, isa)
        reference(expected, hyper)
        assert_same_bits(actual, expected)


@by_hyper
def test_nan_infinity_zero_and_subnormals(isa: str, workers: _native.Workers, hyper: Hyper) -> None:
    values, ones = torch.tensor(SPECIAL).repeat(9), torch.ones(9 * len(SPECIAL))
    for where in ("weight", "grad", *hyper.rule.state_names):
        weight, grad = (values if name == where else ones for name in ("weight", "grad"))
        states = [values if name == where else ones for name in hyper.rule.state_names]
        for weight_format in WEIGHT_FORMATS:
            actual = unit(hyper, weight, states, grad, weight_format)
            expected = actual.clone()
            native(workers, actual, hyper, 1.0, isa)
            reference(expected, hyper)
            assert_same_bits(actual, expected)
        assert actual.weight.isnan()[:: len(SPECIAL)].all()


@by_hyper_and_state
def test_threads_and_chunks_change_nothing(hyper: Hyper, state: str) -> None:
    """A unit that is updated in chunks, by the threads or by the reference, also where its numbers pass 2^32."""
    numel = 3 * SECTION + 5
    for threads, weight_format, base in zip((1, 3, 4), WEIGHT_FORMATS, (0, 64, (1 << 32) - 64 * 20), strict=True):
        updater, expected = CpuUpdater(threads), random_unit(hyper, numel, weight_format, state)
        whole, chunks = expected.clone(), expected.clone()
        reference(expected, hyper, 0.5, first=base)
        updater.update_(whole.elements(seed=SEED, first=base), hyper, 0.5)
        assert_same_bits(whole, expected)
        for number, (start, stop) in enumerate(itertools.pairwise([0, 64, 1024, 3328, 20032, numel])):
            part = chunks.chunk(start, stop)
            if number % 2:
                reference(part, hyper, 0.5, first=base + start)
            else:
                updater.update_(part.elements(seed=SEED, first=base + start), hyper, 0.5)
        assert_same_bits(chunks, expected)


@by_state
def test_elements_outside_the_range_are_not_touched(isa: str, workers: _native.Workers, state: str) -> None:
    before = random_unit(ADAMW, 64 * 5, state_format=state)
    after = before.clone()
    native(workers, after.chunk(64, 250), ADAMW, isa=isa)
    assert_same_bits(after.chunk(0, 64), before.chunk(0, 64))
    for one, other in zip(after.written(), before.written(), strict=True):
        assert torch.equal(one[250:], other[250:])
        assert not torch.equal(one[64:250], other[64:250]) or one.numel() < 64


@by_state
def test_the_reference_works_in_chunks(monkeypatch: pytest.MonkeyPatch, state: str) -> None:
    whole = random_unit(ADAMW, 5000, state_format=state)
    chunked = whole.clone()
    reference(whole, ADAMW)
    monkeypatch.setattr("ds_slide.optim.reference.CHUNK", 960)
    reference(chunked, ADAMW)
    assert_same_bits(chunked, whole)


def test_flush_to_zero_at_its_very_edge(isa: str, workers: _native.Workers) -> None:
    """Products in [2^-126 - 2^-150, 2^-126 - 2^-151) round to 2^-126 in fp32, yet the processor's mode flushes them.

    An implementation that looks at the rounded result alone keeps them.
    """
    edge_products = 0
    for beta1 in torch.linspace(0.5, 0.99, 60).tolist():
        hyper = AdamWHyper(lr=1e-3, betas=(beta1, 0.999))
        center = torch.tensor(2.0**-126 / beta1).view(torch.int32)
        exp_avg = (center + torch.arange(-32, 32, dtype=torch.int32)).view(torch.float32)
        product = exp_avg.double() * torch.tensor(beta1).double()
        edge_products += int(((product >= 2.0**-126 - 2.0**-150) & (product < 2.0**-126 - 2.0**-151)).sum())
        actual = unit(hyper, torch.randn(64), [exp_avg, torch.rand(64)], torch.zeros(64), "fp32")
        expected = actual.clone()
        native(workers, actual, hyper, isa=isa)
        reference(expected, hyper)
        assert_same_bits(actual, expected)
    assert edge_products > 5


def test_a_processor_mode_of_the_caller_changes_nothing() -> None:
    """torch.set_flush_denormal sets the mode that a thread hands on to the threads it starts."""
    actual = random_unit(ADAMW, 40000, "fp32", grad=torch.float32)
    expected = actual.clone()
    reference(expected, ADAMW)
    tiny, sums = torch.full((8,), 1e-40), torch.full((8,), 1e-40)
    bits = tiny.view(torch.int32) * 2
    torch.set_flush_denormal(True)
    try:
        workers = _native.Workers(1, [])
        native(workers, actual, ADAMW)
        _native.accumulate(workers, sums.data_ptr(), "fp32", tiny.data_ptr(), "fp32", 8)
    finally:
        torch.set_flush_denormal(False)
    assert_same_bits(actual, expected)
    assert bits[0] != 0 and torch.equal(sums.view(torch.int32), bits)
