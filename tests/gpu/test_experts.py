"""Mixtures whose experts move in parts, beside whole blocks and beside plain torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
from conftest import HERE, ON_CPU

EXPERT_BYTES, EXPERTS, BLOCKS = 3 * 512 * 512 * 2, 32, 4
ONE_RANK = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29533"}
SHAPES = ("qwen3", "gpt-oss", "qwen3 adapters")
CASES = [(shape, implementation) for shape in SHAPES for implementation in ("grouped_mm", "eager")]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("experts")
    paths = os.pathsep.join([str(HERE.parent / "support"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, **ONE_RANK, "PYTHONPATH": paths, **({"DS_ACCELERATOR": "cpu"} if ON_CPU else {})}
    command = [sys.executable, str(HERE / "experts_worker.py"), str(folder / "out.json")]
    with (folder / "log").open("w") as log:
        code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, env=environment, timeout=240).returncode
    assert code == 0, (folder / "log").read_text(errors="replace")[-6000:]
    found: dict[str, Any] = json.loads((folder / "out.json").read_text())
    return found


@pytest.mark.parametrize(("shape", "implementation"), CASES)
def test_losses_and_tokens_are_those_of_whole_blocks(shape: str, implementation: str, trained: dict[str, Any]) -> None:
    """With a loop over the experts the first loss is equal to the bit. Kernels for groups may choose another tile for
    fewer groups, and the backward of attention adds in any order on a GPU."""
    plain, parts, whole, few = (
        trained[f"{shape} {implementation} {way}"] for way in ("plain", "parts", "whole", "few")
    )
    assert whole["losses"][0] == few["losses"][0] == pytest.approx(plain["losses"][0], rel=1e-4)
    assert parts["losses"][0] == pytest.approx(whole["losses"][0], rel=0 if implementation == "eager" else 1e-5)
    for found in (parts, few, plain):
        assert found["losses"] == pytest.approx(whole["losses"], rel=2e-3)
    assert parts["tokens"] == whole["tokens"] == few["tokens"]


@pytest.mark.parametrize(("shape", "implementation"), CASES)
def test_experts_pass_through_small_buffers_twice_a_step(
    shape: str, implementation: str, trained: dict[str, Any]
) -> None:
    parts, whole = (trained[f"{shape} {implementation} {way}"] for way in ("parts", "whole"))
    experts = BLOCKS * EXPERTS * EXPERT_BYTES
    # 64 tokens with 4 experts each use most. The rest of a block is small.
    assert 1.2 * experts <= parts["up"] <= 2.1 * experts
    assert whole["window"] - parts["window"] >= 2 * EXPERTS * EXPERT_BYTES


def test_adapters_on_packed_experts_follow_plain_torch(trained: dict[str, Any]) -> None:
    """A slot has a byte for each weight."""
    plain, whole = (trained[f"qwen3 packed {way}"] for way in ("plain", "whole"))
    assert whole["losses"][0] == pytest.approx(plain["losses"][0], rel=1e-4)
    assert whole["losses"] == pytest.approx(plain["losses"], rel=2e-3)
    assert whole["window"] < 0.7 * trained["qwen3 grouped_mm whole"]["window"]
