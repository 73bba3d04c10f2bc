"""The trace of a step on the meta device beside the same step of a real model on the CPU."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ds_slide.errors import SlideError
from ds_slide.patching.apply import apply_kernels
from ds_slide.plan.keeping import Kept
from ds_slide.plan.mixtures import mixtures
from ds_slide.plan.trace import StepTrace, TracedUnit, kept_by_block, trace_step, with_kept
from ds_slide.runtime.activations.kept_calls import MixedCall

pytest.importorskip("transformers")

BATCH, SEQ, BLOCKS = 2, 64, 3
CHECKPOINT = functools.partial(checkpoint, use_reentrant=False, preserve_rng_state=False)


def llama(device: str, **options: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": BLOCKS}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "attn_implementation": "sdpa"}
    with torch.device(device):
        return LlamaForCausalLM(LlamaConfig(**(sizes | heads | options))).to(torch.bfloat16).train()


def traced(model: nn.Module, batch: int = BATCH, seq: int = SEQ) -> StepTrace:
    blocks: Any = model.model.layers
    inside = {parameter for block in blocks for parameter in block.parameters()}
    outer = TracedUnit([parameter for parameter in model.parameters() if parameter not in inside])
    units = [outer, *(TracedUnit(list(block.parameters()), block) for block in blocks)]
    return trace_step(model, units, batch, seq, 24 << 30)


def really_saved(model: nn.Module) -> int:
    """Bytes that a forward saves for its backward, weights left out."""
    known = {each.untyped_storage().data_ptr() for each in (*model.parameters(), *model.buffers())}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage
        return tensor

    tokens = torch.zeros(BATCH, SEQ, dtype=torch.long)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    total = sum(storage.nbytes() for storage in kept.values())
    loss.backward()
    return total


def test_it_saves_what_a_real_forward_saves() -> None:
    found, real = traced(llama("meta")), really_saved(llama("cpu"))
    # Beside what is saved live the loss, the labels and the tables of the positions, and sizes are rounded up.
    assert real <= found.saved_bytes <= 1.06 * real


def with_checkpointing(blocks: int, *, last: bool = False, **options: Any) -> Any:
    """Of the first so many blocks, or of the last."""
    model = llama("meta", **options)
    layers = model.model.layers
    for block in layers[BLOCKS - blocks :] if last else layers[:blocks]:
        block.gradient_checkpointing = True
        block._gradient_checkpointing_func = CHECKPOINT
    return model


@functools.cache
def traced_with_checkpointing(blocks: int, vocabulary: int) -> StepTrace:
    return traced(with_checkpointing(blocks, vocab_size=vocabulary))


@pytest.mark.thinned(3)
@pytest.mark.parametrize("vocabulary", [512, 16_384], ids=["blocks are the peak", "the loss is"])
@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("recomputed", range(BLOCKS + 1))
def test_a_step_that_keeps_some_blocks_is_made_of_those_that_keep_all_and_none(
    recomputed: int, last: bool, vocabulary: int
) -> None:
    none, every = (traced_with_checkpointing(count, vocabulary) for count in (BLOCKS, 0))
    blocks = list(range(1, BLOCKS + 1))
    found = with_kept(none, every, Kept(frozenset(blocks[: BLOCKS - recomputed] if last else blocks[recomputed:])))
    real = traced(with_checkpointing(recomputed, last=last, vocab_size=vocabulary))
    assert found.backward == real.backward
    boundary = BATCH * SEQ * 128 * 2 + 512  # the first block's input, which the model's forward holds until it returns
    assert found.saved_bytes == pytest.approx(real.saved_bytes, abs=boundary)
    assert found.peak_bytes == pytest.approx(real.peak_bytes, abs=boundary)


@pytest.mark.parametrize("vocabulary", [512, 65_536], ids=["blocks are the peak", "the loss is"])
@pytest.mark.parametrize("blocks", [1, 3])
def test_a_step_with_mixed_blocks_is_made_of_the_same_two(blocks: int, vocabulary: int) -> None:
    """Beside one whose checkpoints keep what the mixture says, by the engine's own modes."""
    wide = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": blocks, "vocab_size": vocabulary}
    every, none, mixing = (llama("meta", **wide) for _ in range(3))
    for layer in (*none.model.layers, *mixing.model.layers):
        vars(layer).update(gradient_checkpointing=True, _gradient_checkpointing_func=CHECKPOINT)
    whole, again = traced(every), traced(none)
    *_, mixture = mixtures([each.run for each in again.again[1]], kept_by_block(whole, again)[1])
    assert len(mixture.results) == 6  # all products but the last one
    for layer in mixing.model.layers:
        vars(layer)["_gradient_checkpointing_func"] = functools.partial(
            CHECKPOINT, context_fn=lambda: MixedCall(mixture).contexts()
        )
    kept = Kept(mixed=dict.fromkeys(range(1, blocks + 1), mixture))
    found, real = with_kept(again, whole, kept), traced(mixing)
    assert len(real.again[1]) == len(again.again[1]) - len(mixture.results)
    for mine, others in ((found.forward, real.forward), (found.backward, real.backward)):
        assert [each.operations for each in mine] == [each.operations for each in others]
    boundary = BATCH * SEQ * 1024 * 2 + 512 * 2 * len(mixture.results)
    assert found.saved_bytes == pytest.approx(real.saved_bytes, abs=boundary)
    if blocks == 1 or vocabulary == 512:
        assert found.peak_bytes == pytest.approx(real.peak_bytes, abs=boundary)
    else:  # the last block's backward has less at once than its recomputation beside what the others keep
        assert real.peak_bytes - boundary <= found.peak_bytes <= 1.025 * real.peak_bytes


def test_checkpointing_saves_the_boundaries_and_computes_the_blocks_again() -> None:
    plain, checkpointed = traced(llama("meta")), traced(with_checkpointing(BLOCKS))
    boundary = BATCH * SEQ * 128 * 2
    assert plain.saved_bytes - checkpointed.saved_bytes > 10 * BLOCKS * boundary
    assert checkpointed.peak_bytes < plain.peak_bytes
    of_blocks = [segment.operations for segment in plain.forward if segment.unit]
    again = sum(each.flops * count for found in of_blocks for each, count in found.items())
    last = 2 * BATCH * SEQ * 352 * 128  # of whose output nothing is saved, so that torch stops before it
    assert checkpointed.flops - plain.flops == again - BLOCKS * last


def test_flops_are_those_of_the_products_and_of_attention() -> None:
    found = traced(llama("meta", tie_word_embeddings=True))
    block = 128 * (128 + 2 * 64 + 128) + 3 * 128 * 352
    products = 2 * BATCH * SEQ * (BLOCKS * block + 128 * 512)
    attention = 2 * 2 * BATCH * SEQ * SEQ * 128 // 2  # causal: a half
    assert found.flops == 3 * products + BLOCKS * attention * (2 + 5) // 2


def test_gradients_are_let_go_of_with_their_unit() -> None:
    model = llama("meta")
    found = traced(model)
    assert [segment.unit for segment in found.backward] == [3, 2, 1, 0, None]
    assert [segment.unit for segment in found.forward if segment.unit is not None] == [1, 2, 3]
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_kernel_of_the_loss_makes_no_logits() -> None:
    model = llama("meta", vocab_size=32_000)
    plain = traced(llama("meta", vocab_size=32_000), seq=1024)
    assert "loss" in apply_kernels(model, "auto", "cuda").counts
    logits = BATCH * 1024 * 32_000 * 4
    found = traced(model, seq=1024)
    assert plain.peak_bytes > 2 * logits > 2 * found.peak_bytes


def test_it_grows_with_the_tokens() -> None:
    one, two = (traced(llama("meta"), batch).peak_bytes for batch in (8, 16))
    assert 1.8 < two / one < 2.01


def test_a_model_that_needs_values_is_refused() -> None:
    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(4, device="meta"))

        def forward(self, input_ids: torch.Tensor, **_: Any) -> Any:
            return self.weight[input_ids.tolist()[0]].sum()

    with pytest.raises(SlideError, match="cannot be traced without its values"):
        trace_step(Looks(), [], 1, 4, 0)
