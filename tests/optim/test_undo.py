"""A step with a log, and the way back from it: the old bits of any numbers, whatever the rule and the instruction
set."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ds_slide import _native
from ds_slide.optim.adamw import AdamWHyper
from ds_slide.optim.cpu import Beside, CpuUpdater
from ds_slide.optim.lion import LionHyper
from ds_slide.optim.rule import Hyper
from ds_slide.optim.sgd import SgdHyper
from ds_slide.store.way_back import SLICE, SLICE_BYTES

from .units import GRADIENTS, WEIGHT_FORMATS, Unit, assert_same_bits, native, random_unit, unit, written_elsewhere

NUMEL = 2 * SLICE + 77
ADAMW = AdamWHyper(lr=3e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, step=7)
RULES = [
    ADAMW,
    AdamWHyper(lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1, step=7, adam_w_mode=False),
    LionHyper(lr=3e-3, betas=(0.9, 0.99), weight_decay=0.1, step=4),
    SgdHyper(lr=0.1, weight_decay=0.1),
    SgdHyper(lr=0.1, momentum=0.9, weight_decay=0.1),
    SgdHyper(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
]


class Log:
    """Of a unit; `call` is a part of a step with it."""

    def __init__(self, own: Unit) -> None:
        numel = own.weight.numel()
        self.low = [torch.zeros(numel, dtype=torch.uint8) for _ in range(1 + len(own.states))]
        self.slices = torch.zeros(-(-numel // SLICE) * SLICE_BYTES // 4, dtype=torch.int32)

    @property
    def done(self) -> list[int]:
        """Elements of each slice."""
        return self.slices.view(-1, SLICE_BYTES // 4)[:, 0].tolist()

    @property
    def kept_whole(self) -> list[int]:
        """Elements of each slice."""
        return self.slices.view(-1, SLICE_BYTES // 4)[:, 1].tolist()

    def call(
        self, workers: _native.Workers, own: Unit, hyper: Hyper, part: Any, isa: str, new_weight: Any = None
    ) -> None:
        native(
            workers,
            own,
            hyper,
            0.37,
            isa,
            part=part,
            new_weight_ptr=0 if new_weight is None else new_weight.data_ptr(),
            low_ptrs=[each.data_ptr() for each in self.low],
            slices_ptr=self.slices.data_ptr(),
        )


def assert_all_bits(actual: Unit, expected: Unit) -> None:
    """Those of NaN, too."""
    for got, want in zip(actual.written(), expected.written(), strict=True):
        assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))


def test_the_sizes_are_those_of_the_kernels() -> None:
    assert (SLICE, SLICE_BYTES) == (_native.UPDATE_SLICE, _native.SLICE_LOG_BYTES)


@pytest.mark.parametrize("weight_format", ["bf16_split", "fp32"])
@pytest.mark.parametrize("hyper", RULES, ids=str)
def test_what_is_done_can_be_undone_or_ended(
    isa: str, workers: _native.Workers, hyper: Hyper, weight_format: str
) -> None:
    for grad in GRADIENTS:
        found = random_unit(hyper, NUMEL, weight_format, "fp32", grad)
        old, expected, log = found.clone(), found.clone(), Log(found)
        native(workers, expected, hyper, 0.37, isa)
        log.call(workers, found, hyper, "with_log", isa)
        ended = found.clone()
        log.call(workers, ended, hyper, "rest", isa)
        assert_same_bits(ended, expected)
        log.call(workers, found, hyper, "back", isa)
        assert_all_bits(found, old)
        assert log.done != [0, 0, 0]


@pytest.mark.parametrize("hyper", [ADAMW, RULES[2], SgdHyper(lr=0.1, momentum=0.9, weight_decay=1e-4)], ids=str)
def test_of_ordinary_numbers_nearly_all_are_computed(isa: str, workers: _native.Workers, hyper: Hyper) -> None:
    generator = torch.Generator().manual_seed(0)
    gradient = torch.randn(NUMEL, generator=generator) * 1e-4
    momentum = torch.randn(NUMEL, generator=generator) * 3e-5
    states = [momentum, torch.rand(NUMEL, generator=generator) * 1e-8][: len(hyper.rule.states)]
    found = unit(hyper, torch.randn(NUMEL, generator=generator) * 0.02, states, gradient.bfloat16())
    log = Log(found)
    log.call(workers, found, hyper, "with_log", isa)
    assert log.done == [SLICE, SLICE, 77]
    assert sum(log.kept_whole) < NUMEL / 200


def test_new_weights_wait_where_others_read_the_old_ones(isa: str, workers: _native.Workers) -> None:
    found = random_unit(ADAMW, NUMEL)
    old, expected, log, new = found.clone(), found.clone(), Log(found), torch.empty_like(found.weight)
    native(workers, expected, ADAMW, 0.37, isa)
    log.call(workers, found, ADAMW, "with_log", isa, new)
    assert torch.equal(found.weight.view(torch.int16), old.weight.view(torch.int16))
    ended, weight = found.clone(), new.clone()
    log.call(workers, ended, ADAMW, "rest", isa, weight)
    ended.weight = weight
    assert_same_bits(ended, expected)
    # They are read during the way back, too, which first gets those wrong that the log has as a whole.
    assert sum(log.kept_whole)
    found.weight.fill_(1.0)
    log.call(workers, found, ADAMW, "back", isa, new)
    assert found.weight.eq(1.0).all()
    found.weight = old.weight
    assert_all_bits(found, old)


PATTERNS = st.one_of(
    st.integers(0, 2**32 - 1),
    st.sampled_from([0, 1 << 31, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001, 1, 0x007FFFFF]),
)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(PATTERNS, PATTERNS, PATTERNS, PATTERNS), min_size=1, max_size=40),
    st.sampled_from(RULES),
    st.sampled_from(["bf16_split", "fp32"]),
)
@example([(0xFFFFFF81, 0x7F800001, 0, 0)] * 11, RULES[-1], "fp32")  # two NaN: which one comes back is the compiler's
def test_any_bits_come_back(bits: list[tuple[int, ...]], hyper: Hyper, weight_format: str) -> None:
    workers = _native.Workers(1, [])
    columns = [torch.tensor(column, dtype=torch.int64).to(torch.int32) for column in zip(*bits, strict=True)]
    weight, gradient, *states = [column.view(torch.float32) for column in columns]
    found = unit(hyper, weight, states[: len(hyper.rule.states)], gradient, weight_format)
    if weight_format == "bf16_split":  # pairs that no kernel has made
        found.weight.view(torch.int16).copy_(columns[0] >> 16)
        found.remainder.copy_(columns[0])
    old, expected, log = found.clone(), found.clone(), Log(found)
    native(workers, expected, hyper, 0.37)
    log.call(workers, found, hyper, "with_log", "auto")
    ended = found.clone()
    log.call(workers, ended, hyper, "rest", "auto")
    assert_same_bits(ended, expected)
    log.call(workers, found, hyper, "back", "auto")
    assert_all_bits(found, old)


@pytest.mark.parametrize("weight_format", WEIGHT_FORMATS)
@pytest.mark.parametrize(("hyper", "state"), [(ADAMW, "bf16"), (ADAMW, "8bit"), (ADAMW, "fp32"), (RULES[2], "fp32")])
def test_old_bytes_are_copied(hyper: Hyper, state: str, weight_format: str) -> None:
    found = random_unit(hyper, NUMEL, weight_format, state)
    expected, old = found.clone(), found.map(torch.zeros_like)
    updater, before = CpuUpdater(2), found.clone()
    updater.update_(expected.elements(), hyper)
    copies = [old.weight, old.remainder, *old.states, *old.scales]
    updater.update_(found.elements(), hyper, beside=Beside(old=copies))
    assert_same_bits(found, expected)
    assert_all_bits(old, before)


@pytest.mark.parametrize("weight_format", WEIGHT_FORMATS)
@pytest.mark.parametrize("hyper", RULES, ids=str)
def test_new_numbers_go_elsewhere(isa: str, workers: _native.Workers, hyper: Hyper, weight_format: str) -> None:
    for grad, numel in zip(GRADIENTS, (NUMEL, 64, 5), strict=True):
        found = random_unit(hyper, numel, weight_format, "fp32", grad)
        old, expected = found.clone(), found.clone()
        native(workers, expected, hyper, 0.37, isa)
        new = written_elsewhere(workers, found, hyper, 0.37, isa)
        assert_same_bits(new, expected)
        assert_all_bits(found, old)


def test_steps_out_of_place_are_for_states_in_fp32_and_whole_cache_lines() -> None:
    updater = CpuUpdater(1)
    for state, place, problem in (("bf16", 0, "no steps out of place"), ("fp32", 4, "64-byte")):
        found = random_unit(ADAMW, 256, state_format=state)
        new = found.map(torch.zeros_like)
        states = [torch.zeros(512)[place : place + 256] for _ in new.states]
        beside = Beside(new.weight, new.remainder, states)
        with pytest.raises(ValueError, match=problem):
            updater.update_(found.elements(), ADAMW, part="out_of_place", beside=beside)


def test_steps_without_a_way_back_are_refused(workers: _native.Workers) -> None:
    found = random_unit(ADAMW, 100, "fp16_master")
    with pytest.raises(ValueError, match="no way back"):
        Log(found).call(workers, found, ADAMW, "with_log", "auto")
