"""The process that `ds-slide doctor` measures, run as it is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ds_slide.cli.doctor.process import measure_process
from ds_slide.errors import SlideError

TORCH_BYTES = 150 << 20
"""More than Python and a torch without CUDA leave out, and less than these have (229 MB of 467)."""


@pytest.fixture
def ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which the process finds modules before all others."""
    others = os.environ.get("PYTHONPATH")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, [others])]))
    return tmp_path


def test_all_libraries_are_a_part_of_it_and_transformers_no_requirement(ahead: Path) -> None:
    whole = measure_process(on_gpu=False)
    # As if it were not installed.
    without = "import sys\nsys.modules['transformers'] = None\n"
    (ahead / "sitecustomize.py").write_text(without)
    # The modelling code of Llama alone is 0.15 GB beyond torch and DeepSpeed.
    assert TORCH_BYTES < (rest := measure_process(on_gpu=False)) < whole - (50 << 20)
    (ahead / "sitecustomize.py").write_text(without + "taken = bytearray(b'1' * (128 << 20))\n")
    assert measure_process(on_gpu=False) - rest == pytest.approx(128 << 20, rel=0.1)


def test_a_process_that_takes_too_long_is_told(ahead: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (ahead / "sitecustomize.py").write_text("import threading\nthreading.Event().wait()\n")
    monkeypatch.setattr("ds_slide.cli.doctor.process._LONGEST_S", 1)
    with pytest.raises(SlideError, match="it took more than 1 s"):
        measure_process(on_gpu=False)


def test_a_library_that_cannot_be_imported_is_named(ahead: Path) -> None:
    (ahead / "transformers.py").write_text("raise ImportError('broken since Monday')\n")
    with pytest.raises(SlideError, match=r"^ImportError: broken since Monday$"):
        measure_process(on_gpu=False)


def test_a_process_that_cannot_be_started_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sys.executable", str(tmp_path / "none"))
    with pytest.raises(SlideError, match="none cannot be started, No such file"):
        measure_process(on_gpu=False)
