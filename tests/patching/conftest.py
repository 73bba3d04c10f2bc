"""Models of transformers, patched with the kernels: on the GPU, or by Triton's interpreter on the CPU."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

# The test files of this folder import `models` by this name.
sys.path.insert(0, str(Path(__file__).resolve().parent))

pytest.importorskip("triton")
pytest.importorskip("transformers")


@pytest.fixture(scope="module", autouse=True)
def _quick(quick_interpreter: None) -> None:
    """For all tests of this folder."""
