"""The comparison of two trees sees what differs, and takes the built extension for sources that it was built from only.

That whole runs agree is `identity.py`'s own business; a change of one constant was seen by it (see the history).
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import pytest


def _script() -> Any:
    path = Path(__file__).with_name("identity.py")
    spec = importlib.util.spec_from_file_location("identity", path)
    assert spec is not None and spec.loader is not None
    module = sys.modules["identity"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


identity = _script()
RECORD = {"trained": {"losses": ["0x1p+2", "0x1p+1"], "steps": [["inf", 4.0, 1, [0.1]]]}, "saved": {"a master": "f0"}}


@pytest.mark.parametrize(
    ("new", "differing"),
    [
        (RECORD, []),
        ({**RECORD, "saved": {"a master": "f1"}}, ["saved/a master"]),
        ({**RECORD, "saved": {}}, ["saved/a master"]),
        ({**RECORD, "saved": {"a master": "f0", "b": "f0"}}, ["saved/b"]),
        ({**RECORD, "trained": {**RECORD["trained"], "losses": ["0x1p+2"]}}, ["trained/losses/1"]),
        ({**RECORD, "trained": {**RECORD["trained"], "steps": [["inf", 4.0, 0, [0.1]]]}}, ["trained/steps/0/2"]),
    ],
)
def test_what_differs_is_named_and_counted(new: Any, differing: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert identity.differences(RECORD, new) == differing
    assert identity.table({"same": (RECORD, RECORD), "run": (RECORD, new)}) == bool(differing)
    assert all(path in capsys.readouterr().out for path in differing)


def test_an_extension_older_than_a_source_is_not_taken(tmp_path: Path) -> None:
    built, source = tmp_path / "built.so", tmp_path / "csrc" / "update" / "step.hpp"
    source.parent.mkdir(parents=True)
    for path in (built, source, tmp_path / "setup.py"):
        path.write_text("")
        os.utime(path, (1_000, 1_000))
    assert identity.is_newer(built, tmp_path)
    os.utime(source, (1_001, 1_001))
    assert not identity.is_newer(built, tmp_path)
