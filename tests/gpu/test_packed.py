"""Adapters on packed bases whose blocks stream through two slots, beside plain torch with the same kernels."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from typing import Any

import pytest
from conftest import HERE, ON_CPU

pytest.importorskip("peft")


def library_of(base: str) -> str:
    return "torch" if base == "fp8" else "torchao" if base.startswith("torchao") else "bitsandbytes"


def needs_library(base: str) -> pytest.MarkDecorator:
    library = library_of(base)
    return pytest.mark.skipif(find_spec(library) is None, reason=f"{library} is not installed")


# Bytes of one weight, with fp32 scales for 64 weights, uint8 ones, or hardly any.
BYTES = {"nf4": 0.5 + 4 / 64, "nf4-double": 0.5 + 1 / 64, "int8": 1.0, "fp8": 1.0}
BYTES |= {"torchao-int8": 1.0, "torchao-fp8": 1.0}
WEIGHTS = 512 * (512 * 3 + 1408 * 3)  # of the linear layers of a block; keys and values have half the heads
BLOCKS, SLOTS = 6, 2


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("packed")
    bases = [base for base in BYTES if find_spec(library_of(base))]
    environment = {**os.environ, **({"DS_ACCELERATOR": "cpu"} if ON_CPU else {})}
    command = [sys.executable, str(HERE / "packed_worker.py"), str(folder / "out.json"), *bases]
    with (folder / "log").open("w") as log:
        code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, env=environment, timeout=180).returncode
    assert code == 0, (folder / "log").read_text(errors="replace")[-6000:]
    found: dict[str, Any] = json.loads((folder / "out.json").read_text())
    return found


@pytest.mark.parametrize("base", [pytest.param(base, marks=needs_library(base)) for base in BYTES])
def test_losses_on_a_packed_base_follow_plain_torch(base: str, trained: dict[str, Any]) -> None:
    plain, slide = (trained[base][system]["losses"] for system in ("plain", "slide"))
    stats = trained[base]["slide"]["stats"]
    assert slide[0] == pytest.approx(plain[0], rel=1e-4)
    assert slide == pytest.approx(plain, rel=2e-3)
    assert plain[-1] < 0.9 * plain[0]
    assert stats["memory"]["slots"] == SLOTS and stats["memory"]["gpu_units"] <= 2
    # A step reads each block twice. Blocks that are still in a slot are not read again.
    packed = BYTES[base] * WEIGHTS
    assert 2 * (BLOCKS - SLOTS) * packed <= stats["lanes"]["h2d"]["bytes"] <= 2.4 * BLOCKS * packed


@pytest.mark.parametrize("base", [pytest.param(base, marks=needs_library(base)) for base in BYTES])
def test_losses_are_the_same_where_the_script_asks_for_no_checkpointing(base: str, trained: dict[str, Any]) -> None:
    asked, unasked = (trained[base][system]["losses"] for system in ("slide", "unasked"))
    assert unasked[0] == asked[0] and unasked == pytest.approx(asked, rel=2e-3)


@pytest.mark.needs_cuda
def test_both_have_kernels(trained: dict[str, Any]) -> None:
    for found in trained.values():
        assert found["plain"]["patched"]["replaced"] == found["slide"]["stats"]["kernels"]["replaced"] != {}
