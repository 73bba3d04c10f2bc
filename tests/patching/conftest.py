"""Models of transformers, patched with the kernels: on the GPU, or by Triton's interpreter on the CPU."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

# The test files of this folder import `models` by this name, and `harness` from the one beside it.
HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "integration")]

pytest.importorskip("triton")
pytest.importorskip("transformers")


@pytest.fixture(scope="module", autouse=True)
def _quick(quick_interpreter: None) -> None:
    """For all tests of this folder."""
