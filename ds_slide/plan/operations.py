"""The work of a torch operator on a GPU: its arithmetic, and the bytes that it reads and writes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry


@dataclass(frozen=True)
class Operation:
    """One operation of the GPU. `nbytes`: read and written in its memory."""

    kind: str
    """ "product", "attention", "attention backward" or "other"."""
    flops: int
    nbytes: int
    shape: tuple[int, int, int] | None = None
    """Rows, columns and inner length of a product of matrices; queries, keys and the width of a head of attention."""


_SUM_ROWS = 512
"""The sum of the weight's gradient adds a part of the time of its reads and writes to a chunk's products: this number
divided by the rows of the chunk. That is a quarter with 2,048 rows, where 0.2 to 0.4 were measured. With 1,024 rows it
is a half, where 0.37 to 0.76 were measured (page kernels of H200, and profiles of 1.5 to 7 B on an H100,
benchmarks/results/2026-11-26_nvidia-h100_host-and-kernels.md)."""
_PRODUCTS = {"aten::mm": 0, "aten::addmm": 1, "aten::bmm": 0, "aten::baddbmm": 1}
"""Operators that are products of matrices, with the index of the argument that is the first matrix."""


def operations_of(
    name: str,
    function: Any,
    args: Any,
    kwargs: Any,
    made: Any,
    inputs: Sequence[torch.Tensor],
    outputs: Any,
    memory: int = 0,
) -> list[Operation]:
    """Return what the GPU does for one operator. `memory`: bytes of the GPU; more bytes make the loss's chunks
    larger."""
    nbytes = sum(map(_bytes, (*inputs, *outputs)))
    if name == "ds_slide::linear_cross_entropy":
        return _loss(args[0], args[1], need_hidden=args[-3], need_weight=args[-2], memory=memory)
    if name in _PRODUCTS:
        left, right = args[_PRODUCTS[name] : _PRODUCTS[name] + 2]
        shape = (left.shape[-2], right.shape[-1], left.shape[-1])
        return [Operation("product", 2 * math.prod(left.shape) * right.shape[-1], nbytes, shape)]
    count = flop_registry.get(function._overloadpacket)
    if count is None:
        return [Operation("other", 0, nbytes)]
    backward = "backward" in name
    heads = [each for each in inputs if each.dim() == 4][backward : backward + 3]
    if "attention" in name and len(heads) == 3:  # packed sequences, of many lengths, have three dimensions
        causal = any(each is True for each in args)  # their only flag that is set, beside one that asks for a number
        return [_attention(heads, nbytes, backward=backward, causal=causal)]
    return [Operation("product", int(count(*args, **kwargs, out_val=made)), nbytes)]


def _loss(
    hidden: torch.Tensor, weight: torch.Tensor, *, need_hidden: bool, need_weight: bool, memory: int
) -> list[Operation]:
    """Return the operations of all chunks: the products of the logits and the gradients, the reads and writes of the
    row kernels, and the cost of summing the weight's gradients beside its products."""
    from ds_slide.kernels.loss.linear_cross_entropy import rows_at_once

    (rows, width), words = hidden.shape, weight.shape[0]
    if not rows:
        return []
    step = rows_at_once(hidden, words, need_weight, memory)

    def of_chunk(size: int) -> list[Operation]:
        product = Operation("product", 2 * size * words * width, 0, (size, words, width))
        # Beside the products the logits are read for the losses, and read and written for the gradients.
        read = Operation("other", 0, 3 * size * words * hidden.element_size())
        summed = 2 * 4 * words * width * min(_SUM_ROWS, step) // step
        sums = [Operation("other", 0, summed)] * (need_weight and step < rows)
        return [*[product] * (1 + need_hidden + need_weight), read, *sums]

    whole, rest = divmod(rows, step)
    return of_chunk(step) * whole + (of_chunk(rest) if rest else [])


def _attention(given: Sequence[torch.Tensor], nbytes: int, *, backward: bool, causal: bool) -> Operation:
    """Return the operation for query, key and value, each [batch, heads, tokens, width]. Keys and values may have fewer
    heads, each for a group of queries; torch's own count refuses these in some versions (2.11)."""
    query, key, value = given
    (batch, heads, queries, width), keys = query.shape, key.shape[2]
    products = 3 * width + 2 * value.shape[3] if backward else width + value.shape[3]
    flops = 2 * batch * heads * queries * keys * products // (1 + causal)
    return Operation("attention backward" if backward else "attention", flops, nbytes, (queries, keys, width))


def _bytes(tensor: torch.Tensor) -> int:
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """Return the strided tensors in `tree`, which lie in memory as they are."""
    leaves = tree_leaves(tree)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided]


def new_bytes(args: Any, kwargs: Any, made: Any) -> int:
    """Bytes of the storages that a run has made; 0 where its result shares storage with an argument."""
    there = {each.untyped_storage()._cdata for each in tensors_of((args, kwargs))}
    storages = {storage._cdata: storage.nbytes() for storage in map(torch.Tensor.untyped_storage, tensors_of(made))}
    return 0 if there & storages.keys() else sum(storages.values())


def may_stay(function: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a run can be skipped without a change to later ones: it writes into none of its arguments and draws no
    random numbers. Later operators would otherwise draw others."""
    if torch.Tag.nondeterministic_seeded not in function.tags:
        return not function._schema.is_mutable
    for place, argument in enumerate(function._schema.arguments):
        if argument.name == "dropout_p":
            given = args[place] if place < len(args) else kwargs.get("dropout_p", argument.default_value)
            return bool(given == 0)
    return False
