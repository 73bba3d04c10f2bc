"""Decoders that number their tokens: the same bits as without the patch, and no question to the device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from harness import batches, ds_config, engine_for, llama
from torch.utils._python_dispatch import TorchDispatchMode

from ds_slide.patching import positions
from ds_slide.patching.positions import MOST, numbers_tokens, patch_positions

transformers = pytest.importorskip("transformers")
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
}
SOME = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


class Asked(TorchDispatchMode):
    """Counts the numbers that the host has read."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


def decoder(name: str) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES | (SOME if "Moe" in name or name == "Mixtral" else {}))
    return getattr(transformers, f"{name}ForCausalLM")(config)


@pytest.fixture
def patched(request: pytest.FixtureRequest) -> Iterator[Any]:
    model = decoder(request.param)
    made = list(patch_positions(model))
    assert len(made) == 1
    yield model
    for each in made:
        each.undo()


NAMES = ["Llama", "Qwen2", "Qwen3", "Mistral"]
IDS = torch.arange(24).view(2, 12) % 64
PACKED = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6]])
CALLS: dict[str, dict[str, Any]] = {
    "one sequence": {"input_ids": IDS[:1]},
    "two sequences": {"input_ids": IDS},
    "labels": {"input_ids": IDS, "labels": IDS},
    "no cache": {"input_ids": IDS, "use_cache": False},
    "mask": {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)},
    "mask with padding": {"input_ids": IDS, "attention_mask": (torch.arange(12) < 9).long().expand(2, -1)},
    "packed": {"input_ids": IDS[:1], "position_ids": PACKED},
    "own positions": {"input_ids": IDS[:1], "position_ids": torch.arange(12)[None] + 3},
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("patched", NAMES, indirect=True)
def test_outputs_have_the_same_bits(patched: Any, call: str, request: pytest.FixtureRequest) -> None:
    expected = decoder(request.node.callspec.params["patched"])(**CALLS[call])
    for _ in range(2):
        found = patched(**CALLS[call])
        assert torch.equal(found.logits, expected.logits)
        assert found.loss is None or torch.equal(found.loss, expected.loss)


@pytest.mark.parametrize("call", ["one sequence", "two sequences", "no cache"])
@pytest.mark.parametrize("patched", NAMES, indirect=True)
def test_training_asks_the_device_nothing(patched: Any, call: str) -> None:
    given = CALLS[call] | {"use_cache": False}
    with Asked() as before:
        decoder("Llama")(**given)
    assert before.count  # else transformers has changed, and the patch has nothing to do
    with Asked() as asked:
        patched(**given).logits.sum().backward()
    assert not asked.count


@pytest.mark.parametrize("patched", ["Llama"], indirect=True)
def test_packed_sequences_are_found(patched: Any) -> None:
    """Tokens of the second sequence see nothing of the first."""
    patched(input_ids=IDS[:1], use_cache=False)
    whole = patched(**CALLS["packed"], use_cache=False).logits[:, 5:]
    alone = patched(input_ids=IDS[:1, 5:], use_cache=False).logits
    torch.testing.assert_close(whole, alone, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("patched", ["Llama"], indirect=True)
def test_positions_that_a_script_writes_to_are_made_anew(patched: Any) -> None:
    expected = patched(input_ids=IDS[:1], use_cache=False).logits
    positions.positions(12, torch.device("cpu")).add_(5)
    assert torch.equal(patched(input_ids=IDS[:1], use_cache=False).logits, expected)


@pytest.mark.parametrize("patched", ["Llama"], indirect=True)
def test_generation_is_the_same(patched: Any) -> None:
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    assert patched.generate(IDS, **options).tolist() == decoder("Llama").generate(IDS, **options).tolist()


def test_few_lengths_are_kept() -> None:
    for length in range(1, 2 * MOST):
        assert positions.positions(length, torch.device("cpu")).tolist() == [list(range(length))]
    assert len(positions._known) == MOST


def test_other_modules_number_no_tokens() -> None:
    assert not numbers_tokens(torch.nn.Linear)
    assert not numbers_tokens(type(decoder("Llama")))


@pytest.mark.usefixtures("one_rank")
def test_the_engine_patches_decoders_unless_kernels_are_off() -> None:
    counts = []
    for kernels in ("auto", "off"):
        with engine_for(llama(), ds_config({"kernels": kernels})) as engine, Asked() as asked:
            engine(**batches(1)[0])
        counts.append(asked.count)
    assert counts[0] < counts[1]
