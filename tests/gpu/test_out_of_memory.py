"""Memory is taken at one place of a step: kept activations and states make room, and no bit changes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from shortage_worker import CASES

WORKER = Path(__file__).resolve().with_name("shortage_worker.py")
SECONDS = 200


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    target = tmp_path_factory.mktemp("shortage") / "results.json"
    environment = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    command = [sys.executable, str(WORKER), str(target)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS)
    assert target.exists(), done.stderr[-3000:]
    found: dict[str, dict[str, Any]] = json.loads(target.read_text())
    return found


@pytest.mark.needs_cuda
@pytest.mark.parametrize("states", ["0", "auto"])
@pytest.mark.parametrize(("place", "step", "name"), CASES)
def test_a_step_survives_that_memory_is_taken(
    results: dict[str, dict[str, Any]], states: str, place: str, step: int, name: str
) -> None:
    without, found = results[states], results[f"{states}: {place} {step} {name}"]
    assert "error" not in found, found["error"]
    assert found["taken"] > 0 and max(without["kept"]) > 0
    assert found["losses"] == without["losses"] and found["digest"] == without["digest"]
