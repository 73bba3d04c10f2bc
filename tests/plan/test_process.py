"""The process that `ds-slide doctor` measures, run as it is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ds_slide.errors import SlideError
from ds_slide.plan.ceilings.process import measure_process

TORCH_BYTES = 150 << 20
"""More than Python and a torch without CUDA leave out, and less than these have (229 MB of 467)."""


@pytest.fixture
def ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which the process finds modules before all others."""
    others = os.environ.get("PYTHONPATH")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, [others])]))
    return tmp_path


@pytest.fixture(scope="module")
def whole() -> int:
    return measure_process(on_gpu=False).resident_bytes


def test_transformers_are_a_part_of_it_and_no_requirement(ahead: Path, whole: int) -> None:
    # As if it were not installed.
    (ahead / "sitecustomize.py").write_text("import sys\nsys.modules['transformers'] = None\n")
    # The modelling code of Llama alone is 0.15 GB beyond torch and DeepSpeed.
    assert TORCH_BYTES < measure_process(on_gpu=False).resident_bytes < whole - (50 << 20)


def test_it_grows_with_what_a_library_takes(ahead: Path, whole: int) -> None:
    (ahead / "sitecustomize.py").write_text("taken = bytearray(b'1' * (128 << 20))\n")
    assert measure_process(on_gpu=False).resident_bytes - whole == pytest.approx(128 << 20, rel=0.1)


@pytest.mark.slow
def test_the_time_of_the_host_is_that_under_an_engine_which_is_no_part_of_the_memory(whole: int) -> None:
    found = measure_process(on_gpu=False, under_engine=True)
    # On a processor an operation is also computed in that time.
    assert found.why_none == "" and found.engine_operation_s and 1e-6 < found.engine_operation_s < 1e-2
    assert found.engine_visit_s is not None and 0 <= found.engine_visit_s < 1e-2
    assert found.resident_bytes == pytest.approx(whole, rel=0.03)


def test_an_engine_of_stock_is_no_answer(ahead: Path) -> None:
    # The process finds an `initialize` that leaves the block out: a real engine, and another one.
    (ahead / "sitecustomize.py").write_text(
        "import deepspeed\n"
        "written = deepspeed.initialize\n"
        "def without(*, config, **others):\n"
        "    kept = ('train_micro_batch_size_per_gpu', 'gradient_accumulation_steps')\n"
        "    adamw = {'type': 'AdamW', 'params': {'torch_adam': True}}\n"
        "    return written(config={**{key: config[key] for key in kept}, 'optimizer': adamw}, **others)\n"
        "deepspeed.initialize = without\n"
    )
    found = measure_process(on_gpu=False, under_engine=True)
    assert found.resident_bytes > TORCH_BYTES and found.engine_operation_s is None
    assert found.why_none == "SlideError: DeepSpeed has built an engine with AdamW, not DS-Slide's"


def test_a_process_that_an_engine_ends_has_answered_its_bytes(ahead: Path) -> None:
    (ahead / "sitecustomize.py").write_text(
        "import deepspeed, os\n"
        "def fatal(**_):\n"
        "    os.write(2, b'out of luck\\n')\n"
        "    os._exit(3)\n"
        "deepspeed.initialize = fatal\n"
    )
    found = measure_process(on_gpu=False, under_engine=True)
    assert found.resident_bytes > TORCH_BYTES
    assert (found.engine_operation_s, found.why_none) == (None, "out of luck")


@pytest.mark.slow
def test_a_process_that_takes_too_long_has_answered_its_bytes(ahead: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (ahead / "sitecustomize.py").write_text(
        "import deepspeed, threading\ndeepspeed.initialize = lambda **_: threading.Event().wait()\n"
    )
    monkeypatch.setattr("ds_slide.plan.ceilings.process._LONGEST_S", 30)
    found = measure_process(on_gpu=False, under_engine=True)
    assert found.resident_bytes > TORCH_BYTES
    assert (found.engine_operation_s, found.why_none) == (None, "it took more than 30 s")


def test_a_library_that_cannot_be_imported_is_named(ahead: Path) -> None:
    (ahead / "transformers.py").write_text("raise ImportError('broken since Monday')\n")
    with pytest.raises(SlideError, match=r"^ImportError: broken since Monday$"):
        measure_process(on_gpu=False)


def test_a_process_that_cannot_be_started_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sys.executable", str(tmp_path / "none"))
    with pytest.raises(SlideError, match="none cannot be started, No such file"):
        measure_process(on_gpu=False)
