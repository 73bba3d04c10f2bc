"""GPU tests: scenarios run in processes of their own (`worker.py`), the tests judge what they recorded.

    python3 -m pytest tests/gpu -m gpu

A process runs several scenarios, because starting one (torch, transformers, DeepSpeed, CUDA) takes longer than most
scenarios. SLIDE_GPU_TESTS_DEVICE=cpu runs those that do not need CUDA on the processor, to try the tests themselves.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
ON_CPU = os.environ.get("SLIDE_GPU_TESTS_DEVICE") == "cpu"
PROCESS_SECONDS = 200

Scenario = dict[str, Any]
Results = dict[str, dict[str, Any]]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    available = ON_CPU or torch.cuda.is_available()
    for item in items:
        if not item.path.is_relative_to(HERE):
            continue
        item.add_marker(pytest.mark.gpu)
        # The first test of a module waits for the processes of all.
        item.add_marker(pytest.mark.timeout(2 * PROCESS_SECONDS + 50))
        if not available:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
        elif ON_CPU and item.get_closest_marker("needs_cuda"):
            item.add_marker(pytest.mark.skip(reason="judges CUDA itself, runs on the processor here"))


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "needs_cuda: cannot be tried on the processor")


class Recorded:
    """What the scenarios of one process recorded, by name; asking for one that failed fails the asking test."""

    def __init__(self, results: Results, output: str) -> None:
        self._results = results
        self._output = output

    def __getitem__(self, name: str) -> dict[str, Any]:
        result = self._results.get(name)
        if result is None:
            pytest.fail(f"scenario {name!r} did not finish; the end of its process's output:\n{self._output[-6000:]}")
        if "error" in result:
            pytest.fail(f"scenario {name!r} failed:\n{result['error']}")
        return result


@pytest.fixture(scope="session")
def run_scenarios(tmp_path_factory: pytest.TempPathFactory) -> Callable[[list[Scenario]], Recorded]:
    """Run scenarios (fields of `worker.Scenario`) one after the other in a new process."""

    def run(scenarios: list[Scenario]) -> Recorded:
        folder = tmp_path_factory.mktemp("scenarios")
        (folder / "in.json").write_text(json.dumps(scenarios))
        environment = dict(os.environ)
        # Without this cuBLAS may choose a kernel whose result depends on timing, and bits could not be compared.
        environment["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        if ON_CPU:
            environment["DS_ACCELERATOR"] = "cpu"
        command = [sys.executable, str(HERE / "worker.py"), str(folder / "in.json"), str(folder / "out.json")]
        log = folder / "log.txt"
        with log.open("w") as file:
            try:
                subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, env=environment, timeout=PROCESS_SECONDS)
            except subprocess.TimeoutExpired:
                file.write(f"\nkilled after {PROCESS_SECONDS} s")
        out = folder / "out.json"
        return Recorded(json.loads(out.read_text()) if out.exists() else {}, log.read_text(errors="replace"))

    return run
