"""The cores of the update threads, and of the threads and the memory of an engine."""

from __future__ import annotations

import os
import threading

import pytest

from ds_slide.runtime.updates.threads import running_on, update_cores


@pytest.mark.parametrize(
    ("asked", "share", "expected"),
    [
        (("auto", "auto"), range(4, 20), (14, [*range(6, 20)])),
        (("auto", "auto"), range(7), (6, [])),
        (("auto", "auto"), (5,), (1, [])),
        (("auto", "none"), range(16), (14, [])),
        ((3, "auto"), range(16), (3, [13, 14, 15])),
        ((3, [1, 9]), range(16), (3, [1, 9])),
    ],
)
def test_the_first_cores_of_a_share_are_left_to_the_threads_that_launch(
    asked: tuple[object, object], share: range, expected: tuple[int, list[int]]
) -> None:
    assert update_cores(*asked, [*share]) == expected  # type: ignore[arg-type]


def test_threads_that_begin_on_some_cores_stay_there() -> None:
    before = os.sched_getaffinity(0)
    core, others, end = frozenset([min(before)]), list[set[int]](), threading.Event()
    with running_on(core):
        thread = threading.Thread(target=lambda: (end.wait(), others.append(os.sched_getaffinity(0))))
        thread.start()
        assert os.sched_getaffinity(0) == core
    assert os.sched_getaffinity(0) == before
    end.set()
    thread.join()
    assert others == [set(core)]
    with pytest.raises(ZeroDivisionError), running_on(core):
        _ = 1 / 0
    assert os.sched_getaffinity(0) == before
