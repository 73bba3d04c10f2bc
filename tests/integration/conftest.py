"""Engines in this process: one rank over gloo on the CPU accelerator, shared by all tests of a session.

Importing torch, transformers and DeepSpeed takes longer than most of these tests, so they do not run in processes of
their own; an engine that is destroyed must leave nothing behind, and two engines must not disturb each other.
"""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """A directory for states on SSD."""
    path = tmp_path / "disk"
    path.mkdir()
    return path
