"""Which calls are like the recorded one, and what the places of inputs hold."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from ds_slide.runtime.captured.graphs import InputMemory, Token
from ds_slide.runtime.captured.inputs import NotRecordable, Place, SharedPlaces, Signature

CPU = torch.device("cpu")
HIDDEN = torch.zeros(2, 3, requires_grad=True)
ONE, OTHER = torch.full((3,), 1.0), torch.full((3,), 2.0)


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


class Marked(torch.Tensor):
    pass


def signature(*args: Any, **kwargs: Any) -> Signature:
    return Signature((HIDDEN, *args), kwargs, CPU)


def test_a_call_alike_has_its_own_leaves() -> None:
    leaves = signature(ONE, [None, 0.5], name="x").fits((HIDDEN, OTHER, [None, 0.5]), {"name": "x"})
    assert leaves is not None and leaves[1] is OTHER and leaves[2:] == [None, 0.5, "x"]


def test_tensors_are_told_by_their_names() -> None:
    """Leaves are taken in the order of a dictionary, which is another one here."""
    assert signature(first=ONE, second=OTHER).fits((HIDDEN,), {"second": OTHER, "first": ONE}) is None
    assert signature({"a": ONE, "b": OTHER}).fits((HIDDEN, {"b": OTHER, "a": ONE}), {}) is None


@pytest.mark.parametrize(
    ("recorded", "called"),
    [
        (True, 1), (1, 1.0), (0, False), (None, False), ("x", "y"), ((ONE,), [ONE]), (ONE, ONE.double()),
        (ONE, ONE[None]), (torch.zeros(3, 3), torch.zeros(3, 3).t()[:, :2]), (ONE, ONE.clone().requires_grad_()),
        (ONE, ONE.as_subclass(Marked)), (ONE, nn.Parameter(ONE, requires_grad=False)), (ONE, ONE.to_sparse()),
        (ONE, None), (ONE, Pair(ONE, OTHER)), (torch.zeros(2, 2), torch.nested.nested_tensor([ONE, ONE])),
    ],
)  # fmt: skip
def test_other_calls_are_told_apart(recorded: Any, called: Any) -> None:
    assert signature(recorded).fits((HIDDEN, recorded), {}) is not None
    assert signature(recorded).fits((HIDDEN, called), {}) is None


def test_inference_tensors_are_no_inputs() -> None:
    with torch.inference_mode():
        made = torch.zeros(3)
    assert signature(ONE).fits((HIDDEN, made), {}) is None
    with pytest.raises(NotRecordable):
        signature(made)


@pytest.mark.parametrize("given", [Pair(ONE, OTHER), {1, 2}, ONE.as_subclass(Marked), ONE.to_sparse(), object()])
def test_what_cannot_be_recorded(given: Any) -> None:
    with pytest.raises(NotRecordable):
        signature(given)


def test_a_call_without_a_gradient_is_not_recorded() -> None:
    with pytest.raises(NotRecordable, match="no input needs a gradient"):
        Signature((ONE,), {}, CPU)


def test_a_place_has_the_newest_contents() -> None:
    source, place = torch.zeros(3), Place(torch.empty_like(ONE))
    for value in (1.0, 2.0):
        source.fill_(value)
        place.fill(source, Token(0, 0))
        assert place.tensor.tolist() == [value] * 3
    source.data.fill_(3.0)  # no new version
    place.forget()
    place.fill(source, Token(0, 0))
    assert place.tensor.tolist() == [3.0] * 3


def test_a_tensor_with_the_place_of_another_in_memory_is_not_taken_for_it() -> None:
    place, source = Place(torch.empty_like(ONE)), torch.full((3,), 1.0)
    place.fill(source, Token(0, 0))
    del source
    place.fill(torch.full((3,), 2.0), Token(0, 0))
    assert place.tensor.tolist() == [2.0] * 3


def test_a_place_that_a_recording_has_written_is_filled_again() -> None:
    place = Place(torch.empty_like(ONE))
    place.fill(ONE, Token(0, 0))
    place.tensor.zero_()
    place.fill(ONE, Token(0, 0))
    assert place.tensor.tolist() == [1.0] * 3


def test_a_place_is_kept_for_a_backward_that_waits() -> None:
    place, reader = Place(torch.empty_like(ONE)), Token(0, 0)
    place.fill(ONE, reader)
    assert place.may_take(ONE) and not place.may_take(OTHER)
    del reader
    assert place.may_take(OTHER)


def test_tensors_alike_share_a_place_while_they_have_one_content() -> None:
    places, reader = SharedPlaces(), Token(0, 0)
    first = places.of(1, ONE)
    first.fill(ONE, reader)
    assert places.of(1, ONE) is first
    assert places.of(1, OTHER) is not first
    assert places.of(2, ONE) is not first


def test_inputs_of_several_shapes_share_their_bytes() -> None:
    """The last shape that was filled has them; an input that a script gives again is copied again."""
    memory, source = InputMemory(), HIDDEN.detach().clone().requires_grad_()
    large, small, other = memory.like(0, source), memory.like(0, source[:1]), memory.like(1, source)
    assert large.data_ptr() == small.data_ptr() != other.data_ptr()
    assert (large.shape, large.dtype, small.stride()) == (source.shape, source.dtype, source[:1].stride())
    place = Place(large)
    for _ in range(2):
        with torch.no_grad():
            place.fill(source, Token(0, 0))
            assert torch.equal(large, source)
            Place(small).fill(torch.ones(1, 3), Token(0, 0))
            assert not torch.equal(large, source)


def test_a_larger_input_has_bytes_of_its_own() -> None:
    memory = InputMemory()
    small, large = memory.like(0, torch.empty(2, dtype=torch.bfloat16)), memory.like(0, torch.empty(4, 2).t())
    assert small.data_ptr() != large.data_ptr() and large.stride() == (1, 2)
    assert memory.like(0, torch.empty(3)).data_ptr() == large.data_ptr()


def test_filling_a_place_leaves_the_version_that_a_graph_has_saved() -> None:
    place = Place(torch.empty(3))
    place.tensor.requires_grad_()
    result = (place.tensor * place.tensor).sum()
    with torch.no_grad():
        place.fill(torch.full((3,), 2.0), Token(0, 0))
    result.backward()
    assert place.tensor.grad is not None and place.tensor.grad.tolist() == [4.0] * 3
