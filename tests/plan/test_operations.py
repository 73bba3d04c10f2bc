"""What an operator does, by its arguments."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import flop_registry

from ds_slide.kernels.loss.linear_cross_entropy import workspace_bytes
from ds_slide.plan.operations import operations_of


def test_attention_over_packed_sequences() -> None:
    """Its tensors are [tokens, heads, width], and each sequence has a length of its own."""
    query, key, value, made = (torch.empty(48, 2, 16, dtype=torch.bfloat16) for _ in range(4))
    begins = torch.tensor([0, 16, 48], dtype=torch.int32)
    function = torch.ops.aten._flash_attention_forward.default
    args = (query, key, value, begins, begins, 32, 32, 0.0, True, False)
    (found,) = operations_of(function._schema.name, function, args, {}, (made,), [query, key, value, begins], [made])
    assert found.flops == 2 * 2 * 2 * 16 * (16 * 16 + 32 * 32) and found.nbytes >= 4 * 2 * made.numel()


@pytest.mark.parametrize("groups", [1, 4])
def test_attention_of_groups_of_queries_counts_all_queries(groups: int) -> None:
    """A key of a group is there once; torch's own count, of heads that have each their own, is the reference."""
    query = torch.empty(2, 8, 48, 16, dtype=torch.bfloat16, device="meta")
    key = query.new_empty(2, 8 // groups, 64, 16)
    forward = torch.ops.aten._scaled_dot_product_flash_attention.default
    backward = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
    whole, made, sums = query.new_empty(2, 8, 64, 16), torch.empty_like(query), query.new_empty(2, 8, 48)
    for function, before, behind in ((forward, (), (0.0, False)), (backward, (made,), (made, sums))):
        args, inputs = (*before, query, key, key, *behind), [*before, query, key, key]
        (found,) = operations_of(function._schema.name, function, args, {}, (made,), inputs, [made])
        count = flop_registry[function._overloadpacket]
        assert found.flops == count(*before, query, whole, whole, *behind, out_val=(made,))
        assert found.shape == (48, 64, 16)
    (half,) = operations_of(forward._schema.name, forward, (query, key, key, 0.0, True), {}, made, inputs[1:], [made])
    assert half.flops == 2 * 2 * 8 * 48 * 64 * 16


@pytest.mark.parametrize(("gigabytes", "chunks"), [(24, 16), (80, 8)])
def test_a_loss_is_its_chunks_which_a_larger_gpu_has_fewer_of(gigabytes: int, chunks: int) -> None:
    """The products are the same, and the sum of the weight's gradient is read and written once for each."""
    rows, width, words, memory = 16384, 1536, 151936, gigabytes * 10**9
    hidden, weight = (torch.empty(size, width, dtype=torch.bfloat16, device="meta") for size in (rows, words))
    arguments = [hidden, weight, None, None, None, 1.0, 0, -100, 0.0, 0.0, None]
    found = operations_of(
        "ds_slide::linear_cross_entropy", None, [*arguments, True, True, False], {}, (), [], [], memory
    )
    evaluated = operations_of(
        "ds_slide::linear_cross_entropy", None, [*arguments, False, False, False], {}, (), [], [], memory
    )
    step = rows // chunks
    assert workspace_bytes(hidden, words, True, memory) == step * words * 2 + words * width * 2
    assert len(found) == 5 * chunks and sum(each.flops for each in found) == 3 * 2 * rows * words * width
    assert sum(each.flops for each in evaluated) == 2 * rows * words * width
    summed = sum(each.nbytes for each in found) - sum(each.nbytes for each in evaluated)
    assert summed == pytest.approx(chunks * 8 * words * width * 512 / step)


@pytest.mark.parametrize(("rows", "chunks"), [(0, 0), (1, 1), (2048, 1), (5000, 3), (12_000, 6)])
def test_the_last_chunk_of_a_loss_is_what_is_left(rows: int, chunks: int) -> None:
    width, words = 2048, 150_000
    hidden, weight = (torch.empty(size, width, dtype=torch.bfloat16, device="meta") for size in (rows, words))
    arguments = [hidden, weight, None, None, None, 1.0, 0, -100, 0.0, 0.0, None, True, True, False]
    found = operations_of("ds_slide::linear_cross_entropy", None, arguments, {}, (), [], [], 80 * 10**9)
    assert sum(each.flops for each in found) == 3 * 2 * rows * words * width
    assert sum(each.kind == "product" for each in found) == 3 * chunks
