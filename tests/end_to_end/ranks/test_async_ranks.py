"""Asynchronous saves in processes of their own: two ranks, ends of the interpreter, SIGKILL at random instants."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import two_ranks
from async_worker import KILLS, engine_of
from checkpoint_runs import leftovers
from harness import states_of, unequal
from world_two_worker import tokens_of, train

from ds_slide.checkpoint.manifest import Manifest

pytestmark = pytest.mark.slow


WORKER = "async_ranks_worker.py"


@pytest.mark.parametrize("slow", [0, 1])
def test_the_rank_that_ends_last_publishes(slow, seen, folder):
    for rank in range(2):
        run = seen[rank][f"slow{slow}"]
        assert run["before"] == ("" if slow == 0 else "slow0") and run["after"] == f"slow{slow}"
        assert unequal(run["loaded"], run["states"]) == []
    manifest = Manifest.read(folder / "saves" / f"slow{slow}")
    assert manifest is not None and len(manifest.files) == 4
    manifest.check(folder / "saves" / f"slow{slow}", manifest.files)


@pytest.mark.parametrize("failing", [0, 1])
def test_a_fault_of_one_rank_surfaces_on_both_at_the_next_save(failing, seen):
    for rank in range(2):
        prefix = "" if rank == failing else f"rank {failing}: "
        message = seen[rank][f"{failing} fails"]
        assert message.startswith(f"{prefix}the asynchronous save of ") and message.endswith("this rank is gone")
        assert seen[rank][f"{failing} fails: latest"] == "slow1"
    assert seen[0]["left"] == ["latest", "slow0", "slow1", "zero_to_fp32.py", "zero_to_torch.py"]


def test_what_no_rank_has_published_is_published_when_they_meet(seen, folder):
    for rank in range(2):
        assert (seen[rank]["late"], seen[rank]["destroyed"]) == ("slow1", "last")
        assert seen[rank]["not late"] in ("late", "last")
    assert leftovers(folder / "saves") == []


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return two_ranks.run("async_worker.py", tmp_path_factory.mktemp("async"), timeout_s=600)


@pytest.fixture(scope="module")
def states(one_rank) -> Any:  # noqa: ARG001
    """The states after so many steps, of a run that saves nothing."""

    @cache
    def after(steps: int) -> Any:
        engine = engine_of(asynchronous=False)
        train(engine, tokens_of(0, 200)[:steps])
        found = states_of(engine.module)
        engine.destroy()
        return found

    return after


def loaded(saves: Path) -> tuple[int, Any]:
    """The steps that the latest checkpoint was saved after, and its states. Removes what a killed save has left."""
    engine = engine_of()
    _, client_state = engine.load_checkpoint(saves)
    found = states_of(engine.module)
    engine.save_checkpoint(saves, "afterwards")
    engine.destroy()
    assert (saves / "latest").read_text() == "afterwards" and leftovers(saves) == []
    return client_state.get("step", 2), found


def test_the_interpreter_waits_for_the_write(ended, states):
    assert (ended / "exit" / "saves" / "latest").read_text() == "tag" and leftovers(ended / "exit" / "saves") == []
    steps, found = loaded(ended / "exit" / "saves")
    assert unequal(found, states(steps)) == []


def test_a_fault_is_told_at_the_interpreters_end(ended):
    log = (ended / "exit_fault" / "rank0.log").read_text()
    (line,) = (line for line in log.splitlines() if "asynchronous save of" in line)
    assert line.endswith("make the directory writable or choose another one") and "Input/output error" in line
    assert "Traceback" not in log and not (ended / "exit_fault" / "saves" / "latest").exists()


def test_a_kill_at_any_instant_leaves_the_last_complete_checkpoint(ended, states):
    interrupted = 0
    for number in range(KILLS):
        saves = ended / f"kill{number}" / "saves"
        interrupted += bool(leftovers(saves))
        if not (saves / "latest").exists():
            continue  # killed within the first save
        steps, found = loaded(saves)
        assert unequal(found, states(steps)) == [], number
    assert interrupted >= KILLS // 4
