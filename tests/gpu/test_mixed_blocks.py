"""Blocks that keep what attention and products have made take less time than recomputed ones."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
LIMIT = 24 << 30
SEQUENCES = 6


def trained(activations: str) -> dict[str, Any]:
    command = [sys.executable, str(HERE / "moved_inputs_worker.py"), str(LIMIT), activations, str(SEQUENCES)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    answer = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert answer, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    result: dict[str, Any] = json.loads(answer[-1].removeprefix("RESULT "))
    return result


@pytest.mark.needs_cuda
@pytest.mark.timeout(450)
def test_mixed_blocks_save_time() -> None:
    """40 blocks of 6 x 4096 tokens, 2,048 wide, save some 35 GB, of which a part fits."""
    without, mixed = trained("as_written"), trained("auto")
    print(without, mixed)
    assert mixed["activations"]["mix"] > 0 and mixed["peak"] <= LIMIT
    assert mixed["losses"] == pytest.approx(without["losses"], rel=1e-2)
    assert min(mixed["seconds"]) < min(without["seconds"])
