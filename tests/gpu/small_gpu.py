"""Trainings with torch limited to a part of the GPU, each in a process of its own. Not a test module."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

WORKER = Path(__file__).resolve().with_name("small_gpu_worker.py")
BLOCKS = 40
"""Of the worker's model."""


def trained(**options: Any) -> dict[str, Any]:
    """What the worker says; `options`: of its `main`."""
    command = [sys.executable, str(WORKER), json.dumps(options)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    answer = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert answer, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    result: dict[str, Any] = json.loads(answer[-1].removeprefix("RESULT "))
    return result
