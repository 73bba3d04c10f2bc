"""Who may use the memory of recordings: `Stack` and `Lent`."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ds_slide.runtime.captured.graphs import Lent, Stack, Token

EVENTS = st.lists(st.tuples(st.booleans(), st.integers(0, 1), st.integers(0, 5)), max_size=60)
"""Forwards of a recording of a shape (True), and ends of the waiting forward at a place in their list."""


@given(EVENTS)
def test_no_forward_overwrites_tensors_of_one_that_waits(events: list[tuple[bool, int, int]]) -> None:
    """A forward writes into memory that later recordings of its shape and all recordings of other shapes use for saved
    tensors, and into its own saved tensors. All other forwards are let through."""
    stack, waiting = Stack(), []
    for begins, shape, number in events:
        if begins:
            token: Token | None = stack.push(shape, number)
            assert (token is None) == any(each.shape != shape or each.index >= number for each in waiting)
            if token is not None:
                waiting.append(token)
            del token
        elif waiting:
            del waiting[number % len(waiting)]
        assert stack.is_empty == (not waiting)


def lent(parameter: nn.Parameter, value: float, *, copies: bool = False) -> tuple[Lent, torch.Tensor]:
    """A gradient that has been given, and its place."""
    found, place = Lent(), torch.full_like(parameter, value)
    found.give([(parameter, place)], copies=copies)
    return found, place


def test_a_gradient_that_is_still_held_becomes_a_copy_before_its_place_is_used_again() -> None:
    parameter = nn.Parameter(torch.zeros(3))
    given_back, place = lent(parameter, 2.0)
    assert parameter.grad is place
    given_back.take_back()
    place.fill_(9.0)
    assert parameter.grad is not None and parameter.grad.tolist() == [2.0] * 3


def test_a_gradient_that_was_taken_is_left_alone() -> None:
    parameter = nn.Parameter(torch.zeros(3))
    given_back, _ = lent(parameter, 2.0)
    parameter.grad = None
    given_back.take_back()
    assert parameter.grad is None


def test_receivers_that_keep_gradients_get_copies() -> None:
    parameter = nn.Parameter(torch.zeros(3))
    _, place = lent(parameter, 2.0, copies=True)
    place.fill_(9.0)
    assert parameter.grad is not None and parameter.grad.tolist() == [2.0] * 3


def test_gradients_are_added_to_those_before() -> None:
    parameter = nn.Parameter(torch.zeros(3))
    parameter.grad = torch.ones(3)
    _, place = lent(parameter, 2.0)
    place.fill_(9.0)
    assert parameter.grad.tolist() == [3.0] * 3
