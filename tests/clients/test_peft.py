"""PEFT's adapters with Hugging Face's Trainer, in the documented order, beside stock ZeRO-3 (`peft_worker.py`)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("peft", reason="needs requirements-peft.txt")

HERE = Path(__file__).resolve().parent
CASES = ("lora", "dora", "ia3", "modules_to_save", "bf16_adapters", "checkpointing")
TIMEOUT_S = 900

pytestmark = [pytest.mark.slow, pytest.mark.timeout(TIMEOUT_S + 60)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the worker has left what each run saw."""
    path = tmp_path_factory.mktemp("peft")
    environment = {
        **os.environ,
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]),
    }
    done = subprocess.run(
        [sys.executable, str(HERE / "peft_worker.py"), str(path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return path


def seen(folder: Path, case: str, run: str) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(folder / f"{case}.{run}.pt")
    return found


def unequal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> list[str]:
    assert left.keys() == right.keys()
    return [name for name in left if left[name].dtype != right[name].dtype or not torch.equal(left[name], right[name])]


@pytest.mark.parametrize("case", CASES)
def test_losses_and_norms_are_stocks(case: str, folder: Path) -> None:
    stock, slide = seen(folder, case, "stock"), seen(folder, case, "slide")
    assert slide["engine"] == "SlideZeroOptimizer" and stock["engine"] == "DeepSpeedZeroOptimizer_Stage3"
    assert len(slide["losses"]) == 6
    assert slide["losses"][0] == stock["losses"][0]
    # The engines' updates differ by an ulp of fp32, which a bf16 activation may round the other way.
    assert slide["losses"] == pytest.approx(stock["losses"], abs=2.0**-9)
    assert slide["norms"] == pytest.approx(stock["norms"], rel=2e-2)


@pytest.mark.parametrize("case", [case for case in CASES if case != "modules_to_save"])
def test_adapters_end_where_stocks_do(case: str, folder: Path) -> None:
    stock, slide = seen(folder, case, "stock"), seen(folder, case, "slide")
    apart = come = 0.0
    for name, after in stock["after"].items():
        assert slide["after"][name].dtype == after.dtype
        apart += float((slide["after"][name].float() - after.float()).abs().sum())
        come += float((after.float() - stock["before"][name].float()).abs().sum())
    assert come > 0.0
    assert apart < 0.05 * come


def test_several_data_types_stay_what_they_are(folder: Path) -> None:
    """Stock brings all that trains to the data type of the first: here the adapters to that of the embedding."""
    for name, after in seen(folder, "modules_to_save", "slide")["after"].items():
        assert after.dtype == (torch.bfloat16 if "modules_to_save" in name else torch.float32), name
    assert {after.dtype for after in seen(folder, "modules_to_save", "stock")["after"].values()} == {torch.bfloat16}


def test_a_resumed_run_continues_to_the_bit(folder: Path) -> None:
    whole, resumed = seen(folder, "lora", "slide"), seen(folder, "lora", "resumed")
    assert resumed["losses"][-3:] == whole["losses"][-3:]
    assert unequal(resumed["after"], whole["after"]) == []


def test_merged_weights_are_those_of_the_saved_adapters(folder: Path) -> None:
    merged, offline = seen(folder, "lora", "slide")["merged"], seen(folder, "lora", "offline")["merged"]
    assert unequal(merged, offline) == []
    base = seen(folder, "ia3", "stock")["merged"]
    assert not torch.equal(merged["model.layers.0.mlp.down_proj.weight"], base["model.layers.0.mlp.down_proj.weight"])
