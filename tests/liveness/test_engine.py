"""The engine under many schedules: no hang, and the bits of the same training in memory."""

from __future__ import annotations

import pytest
import torch

from liveness.configurations import ALL, EXHAUSTIVE, LARGER, with_each_setting
from liveness.engine import Count
from liveness.explore import explore_all, explore_by_chance, explore_orders
from liveness.tiny import Configuration

# Of the long exploration, for one configuration.
SECONDS = 120.0
QUICK = with_each_setting(LARGER)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def check(*counts: Count) -> None:
    findings = [finding for count in counts for finding in count.findings]
    assert not findings, "\n".join(map(str, findings))


@pytest.mark.slow  # test_random_schedules_meet_only_states_that_were_explored explores the first of them
@pytest.mark.parametrize("configuration", EXHAUSTIVE[1:2], ids=lambda each: each.name)
def test_all_schedules(configuration: Configuration) -> None:
    count = explore_all(configuration, None)
    assert count.complete and count.states > 20
    check(count)


@pytest.mark.parametrize(
    "configuration",
    [pytest.param(each, marks=() if each in QUICK else pytest.mark.slow) for each in LARGER],
    ids=lambda each: each.name,
)
def test_lanes_of_any_speed(configuration: Configuration) -> None:
    """Each lane the slowest of all, and a few random orders."""
    small = configuration.blocks < 5
    check(explore_orders(configuration), explore_by_chance(configuration, 8 if small else 4))


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("configuration", ALL, ids=lambda each: each.name)
def test_many_schedules(configuration: Configuration) -> None:
    check(explore_all(configuration, 1, seconds=SECONDS))
    check(explore_all(configuration, 1, order="slow compute", seconds=SECONDS))
    check(explore_by_chance(configuration, 2000, first_seed=1000, seconds=SECONDS))
