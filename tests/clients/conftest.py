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
    "test_swift.py": ("swift",),
}

collect_ignore = [file for file, packages in NEEDS.items() if not all(find_spec(package) for package in packages)]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.clients)


def _worker_of(client: str) -> Any:
    """The fixture CLIENT_worker: one process for all tests of a session."""

    @pytest.fixture(scope="session", name=f"{client}_worker")
    def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
        from workers import start_worker

        yield from start_worker(f"{client}_worker.py", tmp_path_factory.mktemp(client))

    return worker


trl_worker = _worker_of("trl")
peft_worker = _worker_of("peft")
sentence_transformers_worker = _worker_of("sentence_transformers")
llamafactory_worker = _worker_of("llamafactory")
axolotl_worker = _worker_of("axolotl")
lightning_worker = _worker_of("lightning")
swift_worker = _worker_of("swift")
