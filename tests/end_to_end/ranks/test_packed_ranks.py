"""Adapters on packed weights on two ranks over gloo: each rank holds a part of every packed tensor, as bytes."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import two_ranks
from harness import Result, differences
from packed import BITSANDBYTES, PLAIN
from packed_ranks_worker import STEPS, WAYS

needs_bitsandbytes = pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
PACKED = [pytest.param(kind, marks=[needs_bitsandbytes, pytest.mark.clients]) for kind in BITSANDBYTES]
KINDS = [*(pytest.param(kind, marks=pytest.mark.slow) if kind == "mixed" else kind for kind in PLAIN), *PACKED]

# gloo gathers no fp8, which stock would ask of it, and DeepSpeed cannot move subclasses.
NOT_UNDER_STOCK = ("fp8", "subclass")
BESIDE = (*BITSANDBYTES, "subclass")
"""With tensors beside packed parameters."""


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two ranks have left that have run the kinds of this session, once for all tests."""
    kinds = dict.fromkeys(row["kind"] for row in two_ranks.asked_for(request))
    runs = [(kind, way) for kind in kinds for way in WAYS if (kind in NOT_UNDER_STOCK, way) != (True, "stock")]
    # Elsewhere the ways of parameters are tested.
    runs = [(kind, way) for kind, way in runs if kind in BESIDE or way not in ("ssd", "gpu")]
    return two_ranks.run("packed_ranks_worker.py", tmp_path_factory.mktemp("ranks"), json.dumps(runs))


def result(seen: dict[str, Any], name: str) -> Result:
    return Result(losses=seen[name]["losses"], states=seen[name]["states"])


@pytest.mark.parametrize("kind", KINDS)
def test_the_ways_of_weights_change_no_bit(kind: str, seen: list[dict[str, Any]]) -> None:
    for rank in seen:
        assert len(rank[f"{kind} shared"]["losses"]) == STEPS
        for way in ("gathered", "ssd", "gpu") if kind in BESIDE else ("gathered",):
            assert differences(result(rank, f"{kind} {way}"), result(rank, f"{kind} shared")) == [], way
        again = rank[f"{kind} shared again"]
        assert again == rank[f"{kind} gathered again"]
        assert len(again["losses"]) == STEPS and again["resumed"] == again["losses"][1:]
    states = [Result(states=rank[f"{kind} shared"]["states"]) for rank in seen]
    assert differences(*states) == []


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in NOT_UNDER_STOCK])
def test_losses_and_packed_weights_are_stocks(kind: str, seen: list[dict[str, Any]]) -> None:
    for rank in seen:
        stock = rank[f"{kind} stock"]
        assert rank[f"{kind} shared"]["losses"] == pytest.approx(stock["losses"], abs=2.0**-9)
        for name, states in stock["states"].items():
            if "master" not in states:
                found = rank[f"{kind} shared"]["states"][name]["weight"]
                assert found.dtype == states["weight"].dtype
                assert torch.equal(found.view(torch.uint8), states["weight"].view(torch.uint8)), name


@pytest.mark.parametrize("kind", [kind for kind in KINDS if isinstance(kind, str) and kind != "fp8"] + PACKED)
def test_what_is_beside_packed_weights_is_divided(kind: str, seen: list[dict[str, Any]]) -> None:
    """Buffers move where one rank can read all parts: `state_dict` is no collective."""
    for rank in seen:
        buffers = kind == "buffers"
        for way in ("shared", "gathered") if buffers else ("shared", "gathered", "ssd"):
            found = rank[f"{kind} {way}"]
            if buffers and way != "shared":
                assert not found["moves"] and all(each.numel() for each in found["between"].values())
                continue
            assert found["moves"] and not any(each.numel() for each in found["between"].values())
            for name, whole in found["whole"].items():
                if name != "weight.CB":
                    assert torch.equal(found["saved" if buffers else "gathered"][name], whole), name
