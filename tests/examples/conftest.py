"""Runs examples/finetune.py in processes of its own, on the CPU accelerator, on a few short sequences."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import warm
from ports import free_port

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
SMALL = ("--batch", "2", "--seq", "32")

# The example's modules import each other as scripts do, from their own directory.
sys.path.insert(0, str(EXAMPLES))


@dataclass(frozen=True)
class Finished:
    """A finished run: exit status, both output streams as one, and the lines of its log."""

    status: int
    output: str
    log: list[dict[str, Any]]

    def column(self, field: str) -> list[Any]:
        return [line[field] for line in self.log]


def run_forked(settings: list[str], folder: Path) -> tuple[int, str]:
    """Exit status and output of the script under plain python, in a process that has made its imports before."""
    (own := folder / f"run{len(list(folder.iterdir()))}").mkdir()
    run = warm.start(EXAMPLES / "finetune.py", *settings, folder=own)
    return run.end(), run.log


def run_launched(settings: list[str], ranks: int) -> tuple[int, str]:
    """Under the stock launcher. A test that runs out of time takes the launcher's children with it, too."""
    # The launcher's default port is one and the same for all runs, and names their shared memory as well.
    options = ["--num_accelerators", str(ranks), "--master_port", str(free_port())]
    with subprocess.Popen(
        [str(Path(sys.executable).with_name("deepspeed")), *options, str(EXAMPLES / "finetune.py"), *settings],
        env={name: value for name, value in os.environ.items() if name not in warm.OF_A_RANK} | warm.ON_CPU,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate()
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return process.returncode, output


class Finetune:
    """Starts the script as under plain python or, with `ranks`, under the stock launcher."""

    def __init__(self, directory: Path) -> None:
        self._log = directory / "log.jsonl"

    def __call__(self, config: str, *arguments: str | Path, ranks: int | None = None) -> Finished:
        if config.startswith("slide") and not entry_points(group="torch.backends", name="ds_slide"):
            pytest.fail("ds_slide is importable but not installed, so its hook is missing: pip install -e .")
        self._log.unlink(missing_ok=True)
        settings = ["--deepspeed_config", str(ROOT / "configs" / config), "--log", str(self._log), *SMALL]
        settings += map(str, arguments)
        status, output = run_forked(settings, self._log.parent) if ranks is None else run_launched(settings, ranks)
        lines = self._log.read_text().splitlines() if self._log.exists() else []
        return Finished(status, output, [json.loads(line) for line in lines])

    def run(self, config: str, *arguments: str | Path, ranks: int | None = None) -> Finished:
        """As a call, for a run that must succeed."""
        finished = self(config, *arguments, ranks=ranks)
        assert finished.status == 0, finished.output
        return finished


@pytest.fixture
def finetune(tmp_path: Path) -> Finetune:
    return Finetune(tmp_path)


@pytest.fixture(scope="session")
def four_steps(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Finished]:
    """Four plain steps with a config, what resumed and otherwise started runs are compared with; run once a config."""

    @functools.cache
    def run(config: str) -> Finished:
        return Finetune(tmp_path_factory.mktemp("four_steps")).run(config, "--steps", "4")

    return run
