"""Operators that find no memory run again; the mode that does so leaves no trace; what steps have shown."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from ds_slide.runtime.memory.shortage import CLEAN_STEPS, Proof, Retries


class Failing(TorchDispatchMode):
    """An allocator that has no memory for the next `times` operators: before they compute, or behind."""

    def __init__(self, times: int, *, behind: bool = False, text: str = "CUDA out of memory.") -> None:
        super().__init__()
        self.times, self.behind, self.text = times, behind, text

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.times:
            self.times -= 1
            if self.behind:
                function(*args, **(kwargs or {}))
            raise (torch.OutOfMemoryError if self.text.startswith("CUDA out") else RuntimeError)(self.text)
        return function(*args, **(kwargs or {}))


class Reserve:
    """Can make room so many times."""

    def __init__(self, left: int) -> None:
        self.left, self.released = left, 0

    def make_room(self) -> bool:
        self.left -= 1
        return self.left >= 0

    def release_cached(self) -> None:
        self.released += 1

    def explain_shortage(self) -> str:
        return " Nothing is left."


def retries(left: int) -> tuple[Retries, Reserve]:
    reserve = Reserve(left)
    return Retries(reserve), reserve


def test_an_operator_runs_again_until_there_is_room() -> None:
    mode, reserve = retries(5)
    with Failing(3), mode:
        assert torch.ones(2).tolist() == [1, 1]
    assert reserve.left == 2 and not reserve.released


def test_the_error_says_that_nothing_is_left() -> None:
    mode, _ = retries(1)
    with Failing(3), mode, pytest.raises(torch.OutOfMemoryError, match=r"CUDA out of memory\. Nothing is left\."):
        torch.ones(2)


@pytest.mark.parametrize("text", ["CUBLAS_STATUS_ALLOC_FAILED when calling", "Triton Error [CUDA]: out of memory"])
def test_what_takes_memory_past_torch_finds_it_at_the_driver(text: str) -> None:
    mode, reserve = retries(1)
    with Failing(1, text=text), mode:
        torch.ones(2)
    assert reserve.released == 1


def test_other_errors_are_the_scripts() -> None:
    mode, reserve = retries(1)
    with mode, pytest.raises(RuntimeError, match="size of tensor"):
        torch.ones(2) + torch.ones(3)
    assert reserve.left == 1


def test_random_numbers_are_those_of_the_first_run() -> None:
    torch.manual_seed(1)
    expected = torch.rand(4)
    torch.manual_seed(1)
    mode, _ = retries(2)
    with Failing(2, behind=True), mode:
        assert torch.equal(torch.rand(4), expected)


def test_an_operator_that_writes_into_several_tensors_is_not_run_again() -> None:
    """The first of them may have been written."""
    mode, reserve = retries(1)
    some = [torch.ones(2), torch.ones(2)]
    with Failing(1), mode, pytest.raises(torch.OutOfMemoryError):
        torch._foreach_add_(some, 1.0)
    assert reserve.left == 1


def test_modes_that_were_entered_since_stay() -> None:
    mode, _ = retries(0)
    with Failing(0) as other:
        mode.enter()
        mode.enter()
        with Failing(0) as above:
            mode.leave()
            mode.leave()
            assert _get_current_dispatch_mode_stack() == [other, above]
    assert _get_current_dispatch_mode_stack() == []


def test_another_thread_does_not_leave_for_the_one_that_entered() -> None:
    mode, _ = retries(0)
    mode.enter()
    thread = threading.Thread(target=mode.leave)
    thread.start()
    thread.join()
    assert mode.is_in_force
    mode.leave()
    assert not mode.is_in_force and _get_current_dispatch_mode_stack() == []


def test_it_is_in_force_in_a_backward_and_not_behind() -> None:
    mode, reserve = retries(9)
    weight = torch.ones(3, requires_grad=True)
    loss = (weight * weight).sum()
    with Failing(2), mode.around_backward():
        loss.backward()
    assert reserve.left == 7 and torch.equal(weight.grad, torch.full((3,), 2.0)) and not mode.is_in_force


def test_clean_steps_show_that_there_is_memory() -> None:
    proof = Proof()
    for _ in range(CLEAN_STEPS):
        assert not proof.covers(100) and proof.is_open
        proof.end_step(went_well=True)
    assert proof.covers(100) and proof.covers(50) and not proof.is_open
    assert not proof.covers(120)


def test_a_step_that_had_to_look_for_memory_shows_nothing() -> None:
    proof = Proof()
    for went_well in (True, False, True):
        assert not proof.covers(100)
        proof.end_step(went_well=went_well)
    assert not proof.covers(100)
    proof.end_step(went_well=True)
    assert proof.covers(100)
    proof.end_step(went_well=False)
    assert not proof.covers(100)


def test_what_was_shown_is_forgotten_with_a_decision() -> None:
    proof = Proof()
    for _ in range(CLEAN_STEPS):
        proof.covers(100)
        proof.end_step(went_well=True)
    proof.begin()
    assert not proof.covers(100)
