"""Ranks on emulated hosts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import hosts
import pytest
import two_ranks

Seen = list[dict[str, Any]]


@pytest.fixture(scope="module")
def on_hosts(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Seen]:
    """What each rank of a worker script has left, and where, on `count` hosts. 0 hosts: all ranks on this machine.
    `folder`: that of an earlier run, for what it has left. `megabits`: the rate of each host's link, if it is slow."""

    def start(
        worker: str, count: int, ranks: int, *arguments: str, folder: Path | None = None, megabits: int = 0
    ) -> Seen:
        folder = folder or tmp_path_factory.mktemp("hosts")
        (folder / hosts.DESCRIPTION).unlink(missing_ok=True)
        with hosts.described(count, folder, megabits) if count else nullcontext():
            seen = two_ranks.seen_by(two_ranks.run(worker, folder, str(ranks), *arguments), ranks)
        return [{**each, "folder": folder} for each in seen]

    return start
