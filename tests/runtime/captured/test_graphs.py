"""Who may use the memory of recordings (`Stack`, `Lent`), and how much they hold (`Memory`)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ds_slide.runtime.captured.graphs import Lent, Memory, Pool, Stack, Token
from ds_slide.runtime.core.device import Device

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


def lent(parameter: nn.Parameter, value: float) -> tuple[Lent, torch.Tensor]:
    """A gradient that has been given, and its place."""
    found, place = Lent(), torch.full_like(parameter, value)
    found.give([(parameter, place)])
    return found, place


def test_a_gradient_that_is_still_held_becomes_a_copy_before_its_place_is_used_again() -> None:
    parameter = nn.Parameter(torch.zeros(3))
    given_back, place = lent(parameter, 2.0)
    assert parameter.grad is place
    given_back.take_back()
    place.fill_(9.0)
    assert parameter.grad is not None and parameter.grad.tolist() == [2.0] * 3


class NoMemory(TorchDispatchMode):
    """For copies and sums of tensors."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (torch.ops.aten.clone.default, torch.ops.aten.add.Tensor):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return function(*args, **(kwargs or {}))


def test_a_copy_that_finds_no_memory_leaves_weights_and_gradients_as_they_are() -> None:
    """The script may catch the error and go on."""
    parameter = nn.Parameter(torch.zeros(3))
    given_back, place = lent(parameter, 2.0)
    with NoMemory(), pytest.raises(torch.OutOfMemoryError):
        given_back.take_back()
    assert parameter.tolist() == [0.0] * 3 and parameter.grad is place
    given_back.take_back()
    place.fill_(9.0)
    assert parameter.grad.tolist() == [2.0] * 3


def test_a_sum_that_finds_no_memory_leaves_what_was_given_before() -> None:
    found, places = Lent(), [torch.full((3,), 2.0) for _ in range(2)]
    first, second = parameters = [nn.Parameter(torch.zeros(3)) for _ in range(2)]
    second.grad = torch.ones(3)
    with NoMemory(), pytest.raises(torch.OutOfMemoryError):
        found.give(zip(parameters, places, strict=True))
    found.take_back()
    places[0].fill_(9.0)
    assert first.grad is not None and first.grad.tolist() == [2.0] * 3


def test_a_gradient_that_was_taken_is_left_alone() -> None:
    parameter = nn.Parameter(torch.zeros(3))
    given_back, _ = lent(parameter, 2.0)
    parameter.grad = None
    given_back.take_back()
    assert parameter.grad is None


def test_gradients_are_added_to_those_before() -> None:
    parameter = nn.Parameter(torch.zeros(3))
    parameter.grad = torch.ones(3)
    _, place = lent(parameter, 2.0)
    place.fill_(9.0)
    assert parameter.grad.tolist() == [3.0] * 3


class FakeGpu(Device):
    """A GPU with what torch's allocator would say of it."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.is_cuda = True
        self.torch_allocated = self.torch_reserved = self.held = 0

    def allocated(self) -> int:
        return self.torch_allocated + self.held

    def reserved(self) -> int:
        return self.torch_reserved

    def hold(self, more: int) -> None:
        self.held += more


def test_the_pools_count_as_allocated_whatever_torch_counts() -> None:
    memory, gpu = Memory(Device(torch.device("cpu")), None), FakeGpu()
    memory.device = gpu
    gpu.torch_allocated, gpu.torch_reserved = 1000, 1500
    with memory.counted():  # 100 bytes of saved tensors, in 140 of the pool
        gpu.torch_allocated, gpu.torch_reserved = 1100, 1640
    assert (memory.nbytes, gpu.allocated()) == (140, 1140)
    gpu.torch_allocated += 50  # of anything else
    with memory.counted():  # the graph is dropped
        gpu.torch_allocated -= 100
    assert (memory.nbytes, gpu.allocated()) == (140, 1190)
    with memory.counted():  # another shape finds 90 bytes there, and takes 60 more
        gpu.torch_allocated, gpu.torch_reserved = gpu.torch_allocated + 150, gpu.torch_reserved + 60
    assert (memory.nbytes, gpu.allocated()) == (200, 1250)
    gpu.torch_allocated -= 150  # all recordings are freed
    memory.close()
    assert (memory.nbytes, gpu.allocated()) == (0, 1050)


def test_another_pool_takes_the_place_of_one_without_recordings(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch refuses to record into a pool whose last recording has gone."""
    handles = iter(range(9))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(handles))

    class Recording:
        pass

    pool = Pool(is_cuda=True)
    assert pool.to_record() == 0  # and this recording fails
    assert pool.to_record() == 1
    first, second = Recording(), Recording()
    pool.add(first)
    assert pool.to_record() == 1
    pool.add(second)
    del first
    assert pool.to_record() == 1
    del second
    assert pool.to_record() == 2
