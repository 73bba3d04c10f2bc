"""An update leaves out what is off, counts what is on, and is in as few runs as that allows."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ds_slide.compression.codec import SegmentStep
from ds_slide.model.layout import ParameterInfo, Segment, build_layout
from ds_slide.optim.adamw import AdamWHyper
from ds_slide.runtime.core.update import Trained

GROUPS = (0, 0, 0, 1)
"""The optimizer groups of four parameters of 64 elements each."""


@pytest.fixture
def trained() -> Trained:
    layout = build_layout([ParameterInfo(str(n), (64,), 64, group) for n, group in enumerate(GROUPS)], 1)
    return Trained([nn.Parameter(torch.zeros(64)) for _ in GROUPS], layout.entries, layout.segments)


def hypers(step: int) -> list[AdamWHyper]:
    return [AdamWHyper(lr=1e-3, step=step), AdamWHyper(lr=2e-3, step=step)]


def found(steps: tuple[SegmentStep, ...]) -> list[tuple[int, int, int, int]]:
    """(group, start, stop, number of the update) of each."""
    return [(each.segment.group, each.segment.start, each.segment.stop, each.hyper.step) for each in steps]


def test_an_ordinary_update_has_the_segments_and_the_very_hypers(trained):
    given = hypers(1)
    steps = trained.begin(given)
    assert found(steps) == [(0, 0, 192, 1), (1, 192, 256, 1)]
    assert [each.hyper for each in steps] == given and steps[0].hyper is given[0]
    assert trained.covers(steps) and trained.latest == steps and trained.counts == [1, 1, 1, 1]


def test_what_is_off_is_left_out_and_does_not_count(trained):
    trained.parameters[1].requires_grad_(False)
    assert found(trained.begin(hypers(1))) == [(0, 0, 64, 1), (0, 128, 192, 1), (1, 192, 256, 1)]
    trained.parameters[1].requires_grad_(True)
    assert found(trained.begin(hypers(2))) == [(0, 0, 64, 2), (0, 64, 128, 1), (0, 128, 192, 2), (1, 192, 256, 2)]
    assert trained.counts == [2, 1, 2, 2]


def test_neighbours_of_one_count_share_a_step(trained):
    for parameter in trained.parameters[:2]:
        parameter.requires_grad_(False)
    trained.begin(hypers(1))
    trained.parameters[0].requires_grad_(True)
    trained.parameters[1].requires_grad_(True)
    steps = trained.coming(hypers(2))
    assert found(steps) == [(0, 0, 128, 1), (0, 128, 192, 2), (1, 192, 256, 2)]
    assert not trained.covers(steps)


def test_a_unit_that_was_off_as_a_whole_is_ordinary_again_with_its_own_count(trained):
    for parameter in trained.parameters:
        parameter.requires_grad_(False)
    assert trained.is_off and trained.begin(hypers(1)) == ()
    for parameter in trained.parameters:
        parameter.requires_grad_(True)
    steps = trained.begin(hypers(8))
    assert found(steps) == [(0, 0, 192, 1), (1, 192, 256, 1)] and trained.covers(steps)
    assert steps[0].segment == Segment(0, 0, 192)
