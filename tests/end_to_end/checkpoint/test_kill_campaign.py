"""kill -9 at random instants of training, saving, loading and of states on SSD, on one rank and on two.

Each life of a run resumes from the newest checkpoint, trains and saves until it is killed. No checkpoint is lost, the
losses after a resume are those of a run that was never killed, and nothing is left when the last life has ended.

DS_SLIDE_KILLS=200 python -m pytest -m slow tests/end_to_end/checkpoint/test_kill_campaign.py
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ssd_fault_runs import Launcher, Run, launched

pytestmark = pytest.mark.slow

KILLS = int(os.environ.get("DS_SLIDE_KILLS", "20"))
SEED = int(os.environ.get("DS_SLIDE_KILLS_SEED", "0"))
OUTPUT = os.environ.get("DS_SLIDE_KILLS_OUTPUT")
"""A file of JSON lines, one for each kill."""
STEPS, EVERY = 400, 2
"""Of a run, and between two of its checkpoints: more than fit into a life."""


@pytest.fixture(scope="module")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launcher]:
    yield from launched(tmp_path_factory.mktemp("runs"), "kill_worker.py")


class Campaign:
    """One run in many lives: `size` ranks, `tier` of their states."""

    def __init__(self, launcher: Launcher, folder: Path, size: int, tier: str) -> None:
        self.size, self.tier = size, tier
        self._launcher = launcher
        self._disk, self._saves = folder / "disk", folder / "saves"
        self._disk.mkdir(parents=True)
        self._saves.mkdir()
        self._random = random.Random(f"{SEED} {size} {tier}")
        self.losses: dict[str, float] = {}
        """By step; what a later life computes again must be the same."""
        self.step = 0
        """That the newest checkpoint must have at least."""

    def live(self, steps: int) -> list[Run]:
        actions = [["start", str(self._disk), self.tier], ["resume", str(self._saves)]]
        actions += [["go_on", str(self._saves), steps, EVERY]]
        if self.size == 1:
            return [self._launcher.begin(*actions)]
        return self._launcher.begin_ranks(*[actions] * self.size)

    def kill(self) -> dict[str, Any]:
        """One life, ended at a random instant."""
        runs = self.live(STEPS)
        while not any("phase" in run.result for run in runs):  # before that there is nothing of ours
            assert not runs[0].has_ended(0.01), runs[0].log[-3000:]
        began = time.monotonic()
        runs[0].has_ended(self._random.uniform(0.0, 3.0))
        phases = [run.result.get("phase", "") for run in runs]
        for run in runs:
            run.kill()
        assert [run.end() for run in runs] == [-9] * self.size, runs[0].log[-3000:]
        self.check(runs)
        return {"ranks": self.size, "tier": self.tier, "after_s": round(time.monotonic() - began, 3), "phases": phases}

    def check(self, runs: list[Run]) -> None:
        for rank, run in enumerate(runs):
            seen = run.result
            if "loaded_step" in seen:
                assert seen["loaded_step"] >= self.step, f"lost: {seen['loaded_step']} after {self.step}"
            for step, loss in seen.get("losses", {}).items():
                key = f"{rank} {step}"
                assert self.losses.setdefault(key, loss) == loss, f"wrong: {key}"
        saved = [run.result.get("saved_step", 0) for run in runs]
        self.step = max([self.step, *saved])

    def end(self) -> int:
        """A last life, which ends by itself. -> its step."""
        runs = self.live(2)
        for run in runs:
            assert run.end() == 0, run.log[-3000:]
        self.check(runs)
        assert list(self._disk.iterdir()) == []
        assert [path.name for path in self._saves.iterdir() if path.name.startswith(".")] == []
        return int(runs[0].result["saved_step"])

    def undisturbed(self, folder: Path, steps: int) -> dict[str, float]:
        whole = Campaign(self._launcher, folder, self.size, self.tier)
        runs = whole.live(steps)
        for run in runs:
            assert run.end() == 0, run.log[-3000:]
        whole.check(runs)
        return whole.losses


@pytest.mark.timeout(0)
@pytest.mark.parametrize(("size", "tier"), [(1, "ssd"), (1, "host"), (2, "ssd"), (2, "host")])
def test_nothing_is_lost_wrong_or_left(launcher: Launcher, tmp_path: Path, size: int, tier: str) -> None:
    before = ours_in_memory()
    campaign = Campaign(launcher, tmp_path / "killed", size, tier)
    for _ in range(max(1, KILLS // 4)):
        told = campaign.kill()
        if OUTPUT is not None:
            with open(OUTPUT, "a") as file:
                file.write(json.dumps(told) + "\n")
    last = campaign.end()
    expected = campaign.undisturbed(tmp_path / "whole", last)
    assert {key: expected[key] for key in campaign.losses} == campaign.losses
    assert ours_in_memory() <= before


def ours_in_memory() -> set[str]:
    """Other programs, and DeepSpeed's and torch's own buffers, come and go beside it."""
    return {name for name in os.listdir("/dev/shm") if "slide" in name}
