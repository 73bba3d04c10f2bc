"""The weights and then the states, from the same gradient, leave the bits of a whole step."""

from __future__ import annotations

import pytest

from ds_slide import _native
from ds_slide.optim.adamw import AdamWHyper
from ds_slide.optim.cpu import CpuUpdater
from ds_slide.optim.lion import LionHyper
from ds_slide.optim.rule import Hyper
from ds_slide.optim.sgd import SgdHyper

from .units import GRADIENTS, WEIGHT_FORMATS, assert_same_bits, native, random_unit

NUMEL = 2 * 16384 + 77  # slices of several threads, and a last vector and a last group that are not full
ADAMW = AdamWHyper(lr=3e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, step=7)
LION = LionHyper(lr=3e-3, betas=(0.9, 0.99), weight_decay=0.1, step=4)


@pytest.mark.parametrize("weight_format", WEIGHT_FORMATS)
@pytest.mark.parametrize(
    ("hyper", "state"), [(ADAMW, "fp32"), (ADAMW, "bf16"), (ADAMW, "8bit"), (LION, "fp32")], ids=str
)
def test_two_passes_leave_the_bits_of_one(
    isa: str, workers: _native.Workers, hyper: Hyper, state: str, weight_format: str
) -> None:
    for grad in GRADIENTS:
        found = random_unit(hyper, NUMEL, weight_format, state, grad)
        old, expected = found.clone(), found.clone()
        native(workers, expected, hyper, 0.37, isa, first=640)
        native(workers, found, hyper, 0.37, isa, first=640, part="weights")
        old.weight, old.remainder = expected.weight, expected.remainder
        assert_same_bits(found, old)  # the new weights, the old states
        native(workers, found, hyper, 0.37, isa, first=640, part="states")
        assert_same_bits(found, expected)


@pytest.mark.parametrize(
    "hyper", [AdamWHyper(lr=1e-3, weight_decay=0.1, adam_w_mode=False), SgdHyper(lr=0.1, momentum=0.9)], ids=str
)
def test_rules_whose_states_need_the_old_weight_have_none(hyper: Hyper) -> None:
    assert not hyper.two_passes
    with pytest.raises(ValueError, match="has no two passes"):
        CpuUpdater(1).update_(random_unit(hyper, 100).elements(), hyper, part="weights")
