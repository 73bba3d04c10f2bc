"""Checkpoints of ranks on several hosts: in a directory that they share, on disks of their own, into other worlds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from harness import unequal
from universal import convert

WORKER = "hosts_checkpoint_worker.py"
Seen = list[dict[str, Any]]


@pytest.mark.slow
@pytest.mark.parametrize(("count", "ranks"), [(2, 2), (2, 4)])
@pytest.mark.parametrize("where", ["shared", "local"])
def test_a_resumed_run_continues_to_the_bit(on_hosts: Callable[..., Seen], where: str, count: int, ranks: int) -> None:
    for rank, seen in enumerate(on_hosts(WORKER, count, ranks, where)):
        assert seen["resumed"]["losses"] == seen["unbroken"]["losses"]
        assert seen["resumed"]["steps"] == seen["unbroken"]["steps"]
        assert unequal(seen["resumed"]["states"], seen["unbroken"]["states"]) == []
        if where == "local":  # each host has the states of its own ranks
            of_ranks = {int(name.split("rank_")[1].split("_")[0]) for name in seen["files"] if "optim_states" in name}
            per_host = ranks // count
            assert of_ranks == set(range(ranks)[rank // per_host * per_host :][:per_host])


@pytest.mark.slow
def test_a_universal_checkpoint_goes_to_another_number_of_hosts(on_hosts: Callable[..., Seen]) -> None:
    saved = on_hosts(WORKER, 2, 2, "shared")
    converted = convert(saved[0]["folder"] / "saves", "tag")
    (converted.parent / "latest_universal").write_text(converted.name)
    for count, ranks in ((3, 3), (2, 4), (0, 2)):
        for seen in on_hosts(WORKER, count, ranks, f"load:{converted.parent}", folder=saved[0]["folder"]):
            assert unequal(seen["loaded"], saved[0]["saved"]) == []
