"""Two ranks over gloo: a model without an optimizer, alone and beside one that is trained."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import LAYERS, Result, batches, differences, llama, same_bits, to_bf16
from reference_worker import FORWARDS, PAIRS, SECOND_SEED, logits_of

WORKER = "reference_worker.py"
OURS = [name for name, slide in FORWARDS.items() if slide is not None]
# The average of two gradients in bf16, and single roundings after the first update (see test_ranks.py).
TOLERANCE = 2.0**-8


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("name", FORWARDS)
def test_outputs_are_those_of_the_plain_model(name: str, seen: list[dict[str, Any]]) -> None:
    plain = to_bf16(llama()).eval()
    for rank, results in enumerate(seen):
        found = results["forwards"][name]["logits"]
        for batch, logits in zip(batches(6)[rank::2], found, strict=True):
            assert same_bits(logits, logits_of(plain, batch))


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("name", OURS)
def test_what_is_written_from_outside_is_everyones(name: str, seen: list[dict[str, Any]]) -> None:
    plain = to_bf16(llama()).eval()
    for parameter in plain.parameters():
        parameter.data.mul_(0.5)
    for rank, results in enumerate(seen):
        assert same_bits(results["forwards"][name]["halved"], logits_of(plain, batches(6)[rank]))


@pytest.mark.parametrize("name", FORWARDS)
def test_the_first_rank_saves_all_weights(name: str, seen: list[dict[str, Any]]) -> None:
    plain = to_bf16(llama()).state_dict()
    saved = seen[0]["forwards"][name]["saved"]
    assert saved.keys() == plain.keys()
    assert all(same_bits(saved[key], tensor) for key, tensor in plain.items())
    assert not seen[1]["forwards"][name]["saved"]


@pytest.mark.parametrize("name", OURS)
def test_each_rank_holds_its_part_of_the_weights(name: str, seen: list[dict[str, Any]]) -> None:
    parameters = sum(parameter.numel() for parameter in llama().parameters())
    for results in seen:
        found = results["forwards"][name]
        assert parameters / 2 <= found["padded"] < 1.01 * parameters / 2
        # A block on SSD takes whole pages.
        assert 2 * found["padded"] <= found["bytes"] <= 2 * found["padded"] + (LAYERS * 4096 if name == "SSD" else 0)
        assert found["gathered"] == ({True, False} if name == "SSD" else {name.startswith("gathered")})


@pytest.mark.parametrize("name", [name for name in PAIRS if PAIRS[name][0] is not None])
def test_a_pair_has_the_losses_of_stocks_pair(name: str, seen: list[dict[str, Any]]) -> None:
    for results in seen:
        ours, stock = (results["pairs"][which]["losses"] for which in (name, "stock"))
        assert ours[0] == stock[0]
        assert ours == pytest.approx(stock, rel=TOLERANCE)


@pytest.mark.parametrize("name", ["gathered", "mixed"])
def test_the_ways_of_weights_change_no_bit(name: str, seen: list[dict[str, Any]]) -> None:
    for results in seen:
        one, other = (
            Result(losses=pair["losses"], states=pair["states"])
            for pair in (results["pairs"][name], results["pairs"]["shared"])
        )
        assert differences(one, other) == []


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("name", PAIRS)
def test_the_reference_outlives_the_engine_that_trained(name: str, seen: list[dict[str, Any]]) -> None:
    plain = to_bf16(llama(seed=SECOND_SEED)).eval()
    for rank, results in enumerate(seen):
        assert torch.equal(results["pairs"][name]["after"], logits_of(plain, batches(8)[rank]))


def test_no_file_is_left(seen: list[dict[str, Any]]) -> None:
    assert [results["left"] for results in seen] == [[], []]
