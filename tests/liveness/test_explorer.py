"""The explorer finds what it must find."""

from __future__ import annotations

from liveness.explore import explore_all, replay
from liveness.training import Configuration


def test_a_lost_completion_is_found() -> None:
    configuration = Configuration("lost", blocks=2, steps=1)
    count = explore_all(configuration, 0, drop=["write weight of block 0"])
    (finding,) = count.findings
    assert finding.outcome.kind == "deadlock"
    assert replay(configuration, finding.outcome.choices, drop=["write weight of block 0"]).kind == "deadlock"
