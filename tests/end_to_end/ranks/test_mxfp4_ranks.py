"""Adapters on gpt-oss in MXFP4 on two ranks over gloo: each rank holds a part of the raw experts, and has batches of
its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import two_ranks
from fused_experts import LAYERS
from harness import PlainAdamW, Result, batches, differences
from mxfp4 import made, write_checkpoint
from mxfp4_ranks_worker import STEPS, WAYS
from packed import forward_between

pytest.importorskip("peft")
# And what plain torch trains in its place: PEFT fails on packed experts there.
CASES = {"widened": "widened", "packed": "packed", "packed, adapted": "widened, one adapted"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("mxfp4"))


@pytest.fixture(scope="module")
def seen(checkpoint: Path, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    rows = two_ranks.asked_for(request)
    runs = [*((row["case"], "shared") for row in rows), *((row["case"], row["way"]) for row in rows if "way" in row)]
    folder, asked = tmp_path_factory.mktemp("ranks"), json.dumps(list(dict.fromkeys(runs)))
    return two_ranks.seen_by(two_ranks.run("mxfp4_ranks_worker.py", folder, str(checkpoint), asked))


def plain(model: Any) -> list[Result]:
    """Plain torch with both ranks' batches: gradients in bf16, their mean in bf16. Losses are those of each rank."""
    optimizer, results = PlainAdamW(model, 1.0), [Result(), Result()]
    data = batches(2 * STEPS)
    for both in zip(data[::2], data[1::2], strict=True):
        gradients: list[dict[str, torch.Tensor]] = []
        for batch, result in zip(both, results, strict=True):
            model.zero_grad()
            loss = forward_between(model, batch)
            loss.backward()
            result.losses.append(loss.item())
            gradients.append({name: parameter.grad for name, parameter in optimizer.parameters.items()})
        optimizer.step(gradients={name: (one + gradients[1][name]) / 2 for name, one in gradients[0].items()})
    for result in results:
        result.states = optimizer.states()
    return results


def result_of(found: dict[str, Any]) -> Result:
    return Result(losses=found["losses"], states=found["states"])


def only_trained(result: Result) -> Result:
    return Result(losses=result.losses, states={name: each for name, each in result.states.items() if "master" in each})


@pytest.mark.parametrize("case", CASES)
def test_losses_and_adapters_are_plain_torchs(case: str, checkpoint: Path, seen: list[dict[str, Any]]) -> None:
    for rank, expected in zip(seen, plain(made(checkpoint, CASES[case])), strict=True):
        found = result_of(rank[f"{case} shared"])
        assert len(found.losses) == STEPS
        integers = [states for states in found.states.values() if states["weight"].dtype == torch.uint8]
        assert len(integers) == (4 * LAYERS if "packed" in case else 0)
        assert differences(only_trained(found), only_trained(expected)) == []
    assert seen[0][f"{case} shared"]["losses"] != seen[1][f"{case} shared"]["losses"]


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("way", WAYS)
def test_the_ways_of_weights_and_a_resumed_run_change_no_bit(case: str, way: str, seen: list[dict[str, Any]]) -> None:
    for rank in seen:
        found, shared = rank[f"{case} {way}"], rank[f"{case} shared"]
        assert differences(result_of(found), result_of(shared)) == []
        assert found["resumed"]["losses"] == shared["losses"][1:]
        assert differences(Result(states=found["resumed"]["states"]), Result(states=shared["states"])) == []
