"""Whether a batch has several sequences in a row is asked once, where the model counts its tokens itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import ds_config, engine_for, llama, to_bf16
from transformers import LlamaForCausalLM, masking_utils

from ds_slide.patching.positions import QUESTION, Positions

LENGTH = 12
ROW = torch.arange(LENGTH)
PACKED = torch.cat([torch.arange(5), torch.arange(LENGTH - 5)])


class Packing(LlamaForCausalLM):  # type: ignore[misc]
    """A script's own class: each second forward has two sequences in a row."""

    count = 0

    def forward(self, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        self.count += 1
        positions = (PACKED if self.count % 2 == 0 else ROW).unsqueeze(0)
        return super().forward(input_ids, position_ids=positions, **kwargs)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The positions that transformers was asked about."""
    ask, positions = getattr(masking_utils, QUESTION), list[list[int]]()
    ask = getattr(ask, "_slide_asks", ask)

    def counting(position_ids: torch.Tensor) -> Any:
        positions.append(position_ids.tolist())
        return ask(position_ids)

    monkeypatch.setattr(masking_utils, QUESTION, counting)
    return positions


def model_of(kind: type[LlamaForCausalLM] = LlamaForCausalLM) -> Any:
    found = to_bf16(llama(num_hidden_layers=2, use_cache=False))
    found.__class__ = kind
    return found


def losses(model: Any, given: list[dict[str, torch.Tensor]], call: Callable[..., Any]) -> list[float]:
    torch.manual_seed(1)
    ids = torch.randint(0, model.config.vocab_size, (2, LENGTH))
    return [call(input_ids=ids, labels=ids, **each).loss.item() for each in given]


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("kind", "given", "questions"),
    [
        (LlamaForCausalLM, [{}, {}, {}], 1),
        (LlamaForCausalLM, [{}, {"position_ids": PACKED.unsqueeze(0)}, {}], 2),
        (LlamaForCausalLM, [{"position_ids": PACKED.unsqueeze(0)}, {}, {}], 2),
        (Packing, [{}, {}, {}, {}], 4),
    ],
    ids=["counted by the model", "given later", "given first", "made by a class of the script"],
)
def test_losses_are_those_of_the_model(
    kind: type[LlamaForCausalLM], given: list[dict[str, torch.Tensor]], questions: int, asked: list[list[int]]
) -> None:
    expected = losses(model := model_of(kind), given, model)
    assert len(asked) == len(given)
    asked.clear()
    with engine_for(model_of(kind), ds_config({})) as engine:
        found = losses(engine.module, given, engine)
        assert losses(model, given, model) == expected  # another model, which is not under way
    assert len(asked) == questions + len(given)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    if any(given) or kind is Packing:
        assert len(set(expected)) > 1  # packing makes another loss


@pytest.mark.parametrize(
    ("positions", "may_know"),
    [
        (ROW.unsqueeze(0), True),
        (ROW.unsqueeze(0).expand(3, -1), True),
        (ROW + torch.zeros(1, LENGTH, dtype=torch.long), False),
        (torch.stack([ROW, PACKED])[1:], False),
        (ROW.unsqueeze(0)[:, 1:], False),
    ],
    ids=["a row", "of all sequences", "no view", "a row of several", "a part"],
)
def test_positions_that_may_depend_on_tokens_are_asked_about(
    positions: torch.Tensor, may_know: bool, asked: list[list[int]]
) -> None:
    known = Positions(model_of())
    known.begin((), {})
    try:
        for _ in range(2):
            found = getattr(masking_utils, QUESTION)(positions)
            assert found is None or not may_know
    finally:
        known.end()
    assert len(asked) == (1 if may_know else 2)


def test_a_model_that_packs_is_asked_each_time(asked: list[list[int]]) -> None:
    known = Positions(model_of())
    for _ in range(2):
        known.begin((), {})
        assert getattr(masking_utils, QUESTION)(PACKED.unsqueeze(0)) is not None
        known.end()
    assert len(asked) == 2
