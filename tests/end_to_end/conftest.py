"""Engines in this process: one rank over gloo on the CPU accelerator, shared by all tests of a session.

Importing torch, transformers and DeepSpeed takes longer than most of these tests, so they do not run in processes of
their own; an engine that is destroyed must leave nothing behind, and two engines must not disturb each other.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import two_ranks


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """A directory for states on SSD."""
    path = tmp_path / "disk"
    path.mkdir()
    return path


@pytest.fixture
def quick_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Projectors are fitted in one step."""
    monkeypatch.setattr("ds_slide.runtime.gradients.learning.FIT_STEPS", 1)


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two ranks have left that have run the script `WORKER` of the module, once for all its tests."""
    return two_ranks.run(request.module.WORKER, tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def seen(folder: Path) -> list[dict[str, Any]]:
    """What each of these ranks saw."""
    return two_ranks.seen_by(folder)
