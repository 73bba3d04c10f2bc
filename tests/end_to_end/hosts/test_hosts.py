"""Ranks on two emulated hosts: their weights are gathered over the network, and they have no board. Their clocks are an
hour apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hosts
import pytest
from harness import Result, differences, unequal

WORKER = "hosts_worker.py"
# The average of two gradients in bf16 is not the gradient of the mean in bf16.
LOSS_TOLERANCE = 2.0**-8
NAMES = ("clipping", "immediate", "ssd", "stock")
Seen = list[dict[str, Any]]


@pytest.fixture(scope="module")
def apart(on_hosts: Callable[..., Seen]) -> Seen:
    """Two hosts with one rank each."""
    return on_hosts(WORKER, 2, 2, *NAMES)


@pytest.fixture(scope="module")
def together(on_hosts: Callable[..., Seen]) -> Seen:
    """The same two ranks on one machine."""
    return on_hosts(WORKER, 0, 2, *(name for name in NAMES if "stock" not in name))


def result_of(seen: dict[str, Any]) -> Result:
    return Result(*(seen[key] for key in ("losses", "norms", "states")))


@pytest.mark.parametrize("name", [name for name in NAMES if "stock" not in name])
def test_two_hosts_have_the_bits_of_one(apart: Seen, together: Seen, name: str) -> None:
    for far, near in zip(apart, together, strict=True):
        assert (far[name]["is_shared"], near[name]["is_shared"]) == (False, True)
        assert differences(result_of(far[name]), result_of(near[name])) == []
    assert unequal(apart[0][name]["states"], apart[1][name]["states"]) == []


def test_the_clocks_of_these_hosts_differ(apart: Seen) -> None:
    if not hosts.have_clocks():
        pytest.skip("the kernel has no time namespaces")
    for earlier, later in zip(*(seen["clipping"]["clocks"] for seen in apart), strict=True):
        assert later - earlier == pytest.approx(hosts.CLOCK_APART_S, abs=hosts.CLOCK_APART_S / 2)


def test_the_losses_are_stocks(apart: Seen) -> None:
    for seen in apart:
        assert seen["clipping"]["losses"] == pytest.approx(seen["stock"]["losses"], abs=LOSS_TOLERANCE)


@pytest.mark.slow
def test_the_losses_of_adapters_are_stocks(on_hosts: Callable[..., Seen]) -> None:
    for seen in on_hosts(WORKER, 2, 2, "lora", "stock-lora"):
        assert seen["lora"]["losses"] == pytest.approx(seen["stock-lora"]["losses"], abs=LOSS_TOLERANCE)


def test_a_step_sends_what_zero_3_needs(apart: Seen) -> None:
    """Two gathers of the bf16 weights and one reduce-scatter of the gradients, of which a rank sends the half that is
    another's. Gloo makes a reduce-scatter of an all-reduce, which sends as much once more. Headers and
    acknowledgements are a tenth at most."""
    for seen in apart:
        numel = sum(each["weight"].numel() for each in seen["clipping"]["states"].values())
        half = numel * 2 / 2
        assert all(sent <= 1.1 * 4 * half for sent in seen["clipping"]["sent"])


@pytest.mark.slow
@pytest.mark.parametrize(("count", "ranks"), [(2, 4), (3, 3)])
def test_more_ranks_and_hosts(on_hosts: Callable[..., Seen], count: int, ranks: int) -> None:
    names = ("clipping", "immediate", "accumulation", "fp16", "gpu-states", "ssd", "delays", "lora")
    for far, near in zip(on_hosts(WORKER, count, ranks, *names), on_hosts(WORKER, 0, ranks, *names), strict=True):
        for name in names:
            assert far[name]["is_shared"] is False
            assert differences(result_of(far[name]), result_of(near[name])) == [], name


@pytest.mark.slow
def test_a_weight_goes_once_to_a_host_of_two_ranks(on_hosts: Callable[..., Seen]) -> None:
    """A gather sends half of the bf16 weights, where one among all four ranks sends three quarters. Gloo's averages
    send one and a half times the gradients. Headers and acknowledgements are less than a tenth."""
    for seen in on_hosts(WORKER, 2, 4, "clipping"):
        numel = sum(each["weight"].numel() for each in seen["clipping"]["states"].values())
        assert all(sent <= 1.1 * (2 * 0.5 + 1.5) * 2 * numel for sent in seen["clipping"]["sent"])


@pytest.mark.slow
def test_a_slow_link_changes_no_bit(on_hosts: Callable[..., Seen]) -> None:
    names = ("clipping", "immediate")
    for slow, near in zip(on_hosts(WORKER, 2, 2, *names, megabits=20), on_hosts(WORKER, 0, 2, *names), strict=True):
        for name in names:
            assert differences(result_of(slow[name]), result_of(near[name])) == [], name
