"""Programs that people fine-tune with, run unchanged beside stock. `make test-clients` has the packages that they need.

Everything here carries the marker `clients`; a folder of a package that is not installed is not collected.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
NEEDS = {"test_trl.py": ("trl", "peft", "datasets"), "test_peft.py": ("peft",)}

collect_ignore = [file for file, packages in NEEDS.items() if not all(find_spec(package) for package in packages)]

# The workers are forked when they have imported everything: no library may have started threads by then.
ENVIRONMENT = {
    "DS_ACCELERATOR": "cpu",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.clients)


@dataclass
class Worker:
    """A process that has a client's packages imported and forks for every run (see trl_worker.py)."""

    process: subprocess.Popen[str]
    folder: Path

    def run(self, case: str, engine: str) -> dict[str, Any]:
        """What `case` has left when it ran on `engine`, "stock" or "slide"."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{case} {engine}\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline().strip()
        log = self.folder / f"{case}.{engine}.log"
        assert answer == "0", f"{engine}, exit status {answer or 'unknown'}:\n{_end_of(log)}"
        result: dict[str, Any] = torch.load(self.folder / f"{case}.{engine}.pt")
        return result


def _end_of(log: Path) -> str:
    return log.read_text()[-6000:] if log.exists() else "the worker has ended"


def start_worker(script: str, folder: Path) -> Iterator[Worker]:
    variables = {name: value for name, value in os.environ.items() if not name.startswith("ACCELERATE_")}
    search = [str(REPOSITORY), str(REPOSITORY / "tests" / "integration"), variables.get("PYTHONPATH", "")]
    variables |= {**ENVIRONMENT, "PYTHONPATH": os.pathsep.join(search)}
    command = [sys.executable, str(HERE / script), str(folder)]
    with subprocess.Popen(
        command, env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    ) as process:
        try:
            yield Worker(process, folder)
        finally:
            process.stdin.close()  # type: ignore[union-attr]
            process.terminate()


@pytest.fixture(scope="session")
def trl_worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    yield from start_worker("trl_worker.py", tmp_path_factory.mktemp("trl"))


@pytest.fixture(scope="session")
def peft_worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    yield from start_worker("peft_worker.py", tmp_path_factory.mktemp("peft"))
