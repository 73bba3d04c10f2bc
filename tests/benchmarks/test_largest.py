"""The search for the largest value that fits, and what a run out of memory is."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import largest
import pytest
from hypothesis import given
from hypothesis import strategies as st


@given(st.lists(st.integers(1, 1000), min_size=1, unique=True).map(sorted), st.integers(0, 1001))
def test_it_finds_the_largest_that_fits_in_few_tries(values: list[int], limit: int) -> None:
    tried: list[int] = []

    def fits(value: int) -> bool:
        tried.append(value)
        return value <= limit

    assert largest.largest(values, fits) == max((value for value in values if value <= limit), default=None)
    assert len(tried) == len(set(tried)) <= len(values).bit_length()


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"status": "ok", "step_s": 1.0, "tokens_per_s": 2.0}, True),
        ({"status": "failed", "error": "OutOfMemoryError: CUDA out of memory."}, False),
        ({"status": "failed", "error": "ValueError: no such model"}, None),
        ({"status": "timed"}, None),
    ],
)
def test_only_memory_makes_a_value_too_large(
    record: dict[str, Any], expected: bool | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(command: tuple[str, ...], **_: Any) -> None:
        assert command[2:] == ("--system", "slide", "--batch", "4", "--out", str(tmp_path / "records"))
        with (tmp_path / "records").open("a") as file:
            file.write(json.dumps(record) + "\n")

    monkeypatch.setattr(subprocess, "run", run)
    if expected is None:
        with pytest.raises(SystemExit):
            largest.runs("batch", 4, ["--system", "slide"], tmp_path / "records")
    else:
        assert largest.runs("batch", 4, ["--system", "slide"], tmp_path / "records") is expected
