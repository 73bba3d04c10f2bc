"""What blocks cost the host: each direction from its begin to its end, and the engine's own part of it."""

from __future__ import annotations

import pytest

from ds_slide.report import host
from ds_slide.report.host import BlockCost, HostTrace, host_shares


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time of the host, which the tests set."""
    now = [0.0]
    monkeypatch.setattr(host.time, "perf_counter", lambda: now[0])
    return now


def test_a_hook_in_a_hook_counts_once(clock: list[float]) -> None:
    trace = HostTrace(["block 0"])
    with trace.own("backward", 0, begins=True):
        clock[0] = 1.0
        with trace.own("backward", 0, begins=True):  # announced again
            clock[0] = 3.0
    clock[0] = 10.0
    with trace.own("backward", 0, ends=True):
        clock[0] = 11.0
    with trace.own("backward", 0, ends=True):
        clock[0] = 15.0
    trace.cut()
    assert trace.steps == [[BlockCost("block 0", "backward", calls=1, seconds=11.0, own_s=8.0)]]


def test_a_forward_that_an_exception_has_ended_belongs_to_no_later_step(clock: list[float]) -> None:
    trace = HostTrace(["block 0"])
    with pytest.raises(ValueError), trace.own("forward", 0, begins=True):
        clock[0] = 1.0
        raise ValueError
    trace.cut()
    clock[0] = 5.0
    with trace.own("forward", 0, ends=True):
        pass
    trace.cut()
    assert [(cost.calls, cost.own_s) for (cost,) in trace.steps] == [(0, 1.0), (0, 0.0)]


def test_shares_are_means_of_one_call() -> None:
    costs = [
        BlockCost("block 0", "backward", calls=1, seconds=4.0, own_s=1.0),
        BlockCost("block 1", "backward", calls=3, seconds=8.0, own_s=1.0),
        BlockCost("block 1", "forward", calls=0, seconds=0.0, own_s=1.0),  # it has no end
    ]
    (share,) = host_shares(costs)
    assert (share.what, share.calls, share.seconds, share.own_s) == ("backward", 4, 3.0, 0.5)
    assert (share.longest, share.longest_s) == ("block 0", 1.0)
