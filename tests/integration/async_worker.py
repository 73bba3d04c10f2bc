"""Asynchronous saves of processes that end, for test_async_ranks.py: at their interpreter's end, and by SIGKILL.

    python async_worker.py FOLDER

Leaves FOLDER/exit, FOLDER/exit_fault (what ended processes have saved; their output in rank0.log), and FOLDER/kill<N>,
of runs that save after every step and are killed at random instants.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import deepspeed
import two_ranks
from harness import ds_config
from world_two_worker import OddModel, tokens_of, train

from ds_slide.checkpoint import publish

KILLS = 16
STEPS = 200


def engine_of(*, asynchronous: bool = True) -> Any:
    model = OddModel()
    config = ds_config({"window": 2, "async_save": asynchronous}, checkpoint={"tag_validation": "Ignore"})
    engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=list(model.parameters()))
    return engine


def fail(phase: str) -> None:
    if phase.endswith("has finished"):
        raise OSError(5, "Input/output error", "disk")


def save_and_end(rank: int, folder: Path) -> None:
    """Without `destroy`: whatever the script forgets, the interpreter waits for the write."""
    with two_ranks.as_rank(rank, folder, 1):
        engine = engine_of()
        train(engine, tokens_of(rank, 2))
        engine.save_checkpoint(folder / "saves", "tag")


def fail_and_end(rank: int, folder: Path) -> None:
    publish.reached = fail
    save_and_end(rank, folder)


def save_for_ever(folder: Path, saving: int) -> None:
    """Two tags in turn, so that most saves replace one. `saving`: a pipe that is told of the first save."""
    with two_ranks.as_rank(0, folder, 1):
        engine = engine_of()
        for step, tokens in enumerate(tokens_of(0, STEPS)):
            train(engine, [tokens])
            engine.save_checkpoint(folder / "saves", f"tag{step % 2}", client_state={"step": step + 1})
            os.write(saving, b"x")


def kill_one(folder: Path, generator: random.Random) -> None:
    """Let it save a few times, and kill it some time within the next ones."""
    folder.mkdir()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        log = os.open(folder / "rank0.log", os.O_WRONLY | os.O_CREAT, 0o600)
        for stream in (1, 2):
            os.dup2(log, stream)
        save_for_ever(folder, writing)
        os._exit(3)
    os.close(writing)
    for _ in range(generator.randint(1, 4)):
        assert os.read(reading, 1)
    time.sleep(generator.uniform(0, 0.1))  # the random instant
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    os.close(reading)


def main() -> None:
    folder = Path(sys.argv[1])
    for name, ending in (("exit", save_and_end), ("exit_fault", fail_and_end)):
        (folder / name).mkdir()
        two_ranks.fork_world(1, ending, folder / name)
    generator = random.Random(5)
    for number in range(KILLS):
        kill_one(folder / f"kill{number}", generator)


if __name__ == "__main__":
    main()
