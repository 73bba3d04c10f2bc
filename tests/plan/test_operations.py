"""What an operator does, by its arguments."""

from __future__ import annotations

import torch

from ds_slide.plan.operations import operations_of


def test_attention_over_packed_sequences() -> None:
    """Its tensors are [tokens, heads, width], and each sequence has a length of its own."""
    query, key, value, made = (torch.empty(48, 2, 16, dtype=torch.bfloat16) for _ in range(4))
    begins = torch.tensor([0, 16, 48], dtype=torch.int32)
    function = torch.ops.aten._flash_attention_forward.default
    args = (query, key, value, begins, begins, 32, 32, 0.0, True, False)
    (found,) = operations_of(function._schema.name, function, args, {}, (made,), [query, key, value, begins], [made])
    assert found.flops == 2 * 2 * 2 * 16 * (16 * 16 + 32 * 32) and found.nbytes >= 4 * 2 * made.numel()
