"""Each of the mends of a hang is undone from outside: then it is found again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from ds_slide.runtime.core.update import Update
from ds_slide.runtime.weights.window import Window
from liveness.configurations import DIFFERENT, HANG_1, SEQUENCES, SHARED
from liveness.explore import explore_by_chance, explore_orders

FICKLE = next(each for each in DIFFERENT if each.fickle)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def waiting_presses_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Update, "press", lambda _update: None)


def current_block_is_left_out(patch: pytest.MonkeyPatch) -> None:
    tell: Any = Window._tell

    def left_out(window: Window, announce: Any, _ended: bool, current: Any, direction: Any) -> None:
        tell(window, announce, True, current, direction)  # as when the current block has ended its backward

    patch.setattr(Window, "_tell", left_out)


Undo = Callable[[pytest.MonkeyPatch], None]
needs_press = pytest.mark.skipif(not hasattr(Update, "press"), reason="a commit without the mends")
needs_shared = pytest.mark.skipif(not SHARED, reason="a commit whose ranks always gather")


@needs_press
def test_without_both_mends_the_first_hang_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting_presses_nothing(monkeypatch)
    current_block_is_left_out(monkeypatch)
    found = {finding.how: finding.outcome for finding in explore_orders(HANG_1).findings}
    assert list(found) == ["slow disk"]
    assert found["slow disk"].kind == "deadlock"
    waits = {wait.thread: wait for wait in found["slow disk"].waits}
    assert any("enter_forward" in line for line in waits["compute"].stack)
    assert any("Future.wait" in line for line in waits["ds_slide-h2d"].stack)
    assert "'asked': {'urgent': [], 'demand': [" in found["slow disk"].message


@needs_press
@pytest.mark.parametrize("undo", [waiting_presses_nothing, current_block_is_left_out])
def test_one_of_the_two_mends_is_enough_for_what_is_explored(undo: Undo, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each displaces what the hang needs: a demand that is pressed takes any clean buffer, and a plain one for the
    block that compute stands at takes those of the blocks after it. That is no proof that one could go."""
    undo(monkeypatch)
    assert not explore_orders(HANG_1).findings
    assert not explore_by_chance(HANG_1, 20).findings


@needs_shared
def test_a_version_that_nobody_publishes_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from liveness.weights import Generations

    publish = Generations.publish

    def forgets(counters: Generations, index: int, value: int) -> None:
        if (index, value) != (2, 2):
            publish(counters, index, value)

    monkeypatch.setattr(Generations, "publish", forgets)
    (finding, *_) = explore_orders(SHARED[0]).findings
    assert finding.outcome.kind == "deadlock"
    assert any("generation 2 of unit 2" in wait.kind + str(wait) for wait in finding.outcome.waits)


@needs_shared
def test_weights_that_are_read_before_they_are_published_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """By their bits."""
    from ds_slide.runtime.core.ranks.shared_weights import SharedWeights

    monkeypatch.setattr(SharedWeights, "await_others", lambda *_: None)
    (finding, *_) = explore_by_chance(SHARED[0], 100).findings
    assert finding.outcome.kind == "error"
    assert "other bits than in memory" in finding.outcome.message


@needs_shared
def test_a_unit_that_is_averaged_before_all_have_announced_it_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 enters what it has itself: the other rank gives zeros, and its own gradient one average too late."""
    from ds_slide.runtime.gradients.agreement import Agreement

    count = Agreement._count

    def announced(agreement: Agreement, rank: int, order: int) -> int:
        return max(1, count(agreement, rank, order))

    monkeypatch.setattr(Agreement, "_count", announced)
    assert explore_by_chance(DIFFERENT[0], 100).findings


@needs_shared
def test_ranks_that_do_not_wait_for_the_end_of_backward_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from ds_slide.runtime.core.ranks.conductor import Conductor

    monkeypatch.setattr(Conductor, "_takes_part", lambda *_: True)
    assert explore_by_chance(DIFFERENT[0], 100).findings


@needs_shared
def test_a_rank_that_leaves_what_others_expect_of_it_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from ds_slide.runtime.gradients.agreement import Agreement

    monkeypatch.setattr(Agreement, "finish_order", Agreement.follow_order)
    assert explore_by_chance(FICKLE, 20).findings


@needs_shared
def test_a_waiting_rank_that_follows_no_log_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each waits for the other: one in an average, one for the rank that is behind."""
    from ds_slide.runtime.core.ranks.conductor import PACE, Conductor

    def keep_pace(conductor: Conductor, waiting: int, failures: Any) -> None:
        own = conductor._pace(conductor._count)
        if waiting >= PACE and not conductor._is_in_entry:
            conductor.board.until(lambda: not conductor._is_ahead(own), failures, "ranks that are behind")

    monkeypatch.setattr(Conductor, "keep_pace", keep_pace)
    many = replace(DIFFERENT[0], name="six blocks", blocks=6, differ=False)
    (finding, *_) = explore_by_chance(many, 100).findings
    assert finding.outcome.kind == "deadlock"


@needs_shared
def test_a_rank_that_is_in_an_average_while_another_is_in_its_block_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 enters an average that the other one has announced, and the other one the collective of its next block."""
    from ds_slide.runtime.core.ranks.conductor import Conductor

    monkeypatch.setattr(Conductor, "_leave_order_to_program", lambda _: None)
    (finding, *_) = explore_by_chance(SEQUENCES[0], 100).findings
    assert finding.outcome.kind == "deadlock"
