"""Programs that people fine-tune with, run unchanged beside stock. `make test-clients` has the packages that they need.

Everything here carries the marker `clients`; a folder of a package that is not installed is not collected.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
# The files of this folder import each other by these names.
sys.path.insert(0, str(HERE))

NEEDS = {
    "test_trl.py": ("trl", "peft", "datasets"),
    "test_peft.py": ("peft",),
    "test_accelerate.py": ("accelerate",),
    "test_sentence_transformers.py": ("sentence_transformers",),
    "test_llamafactory.py": ("llamafactory",),
    "test_axolotl.py": ("axolotl",),
    "test_lightning.py": ("lightning",),
}

collect_ignore = [file for file, packages in NEEDS.items() if not all(find_spec(package) for package in packages)]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.clients)


def _worker(script: str, folder: Path) -> Iterator[Any]:
    from workers import start_worker

    yield from start_worker(script, folder)


@pytest.fixture(scope="session")
def trl_worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    yield from _worker("trl_worker.py", tmp_path_factory.mktemp("trl"))


@pytest.fixture(scope="session")
def sentence_transformers_worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    yield from _worker("sentence_transformers_worker.py", tmp_path_factory.mktemp("sentences"))


@pytest.fixture(scope="session")
def llamafactory_worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    yield from _worker("llamafactory_worker.py", tmp_path_factory.mktemp("llamafactory"))


@pytest.fixture(scope="session")
def axolotl_worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    yield from _worker("axolotl_worker.py", tmp_path_factory.mktemp("axolotl"))


@pytest.fixture(scope="session")
def lightning_worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    yield from _worker("lightning_worker.py", tmp_path_factory.mktemp("lightning"))


@pytest.fixture(scope="session")
def peft_worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    yield from _worker("peft_worker.py", tmp_path_factory.mktemp("peft"))
