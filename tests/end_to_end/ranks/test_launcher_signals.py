"""Signals to the stock launcher while a run trains with states on SSD: no process and no file is left."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from forking import ONE_THREAD
from ports import free_port

TESTS = Path(__file__).resolve().parents[2]
PATIENCE_S = 240.0  # for what takes twenty seconds on an idle machine


def ended(process: int) -> bool:
    """Whether the process has ended within the patience of the test."""
    return bool(select.select([process], [], [], PATIENCE_S)[0])


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_leaves_nothing(disk, tmp_path, number):
    """To the whole group, as a terminal and a batch system send them."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    launch = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", "1", "--master_port", str(free_port())]
    with open(tmp_path / "log", "w") as log:
        launcher = subprocess.Popen(
            [*launch, str(TESTS / "support" / "signal_worker.py"), str(disk), str(fifo)],
            env=os.environ | ONE_THREAD | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
        assert select.select([reader], [], [], PATIENCE_S)[0], (tmp_path / "log").read_text()[-3000:]
        told = os.read(reader, 100).decode().split()
        assert len(told) == 2, (tmp_path / "log").read_text()[-3000:]
        pid, blocks = map(int, told)
        training = os.pidfd_open(pid)
        assert blocks > 0 and not list(disk.iterdir())
        os.killpg(launcher.pid, number)
        launcher.wait(PATIENCE_S)
        assert ended(training), (tmp_path / "log").read_text()[-3000:]
    finally:
        if launcher.poll() is None:
            os.killpg(launcher.pid, signal.SIGKILL)
            launcher.wait()
    assert not list(disk.iterdir())
