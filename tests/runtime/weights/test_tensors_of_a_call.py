"""Tensors are found in the order of torch's pytree, in whatever holds them."""

from __future__ import annotations

from collections import OrderedDict, deque, namedtuple
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils import _pytree as pytree

from ds_slide.runtime.core.calls import add_tensors
from ds_slide.runtime.weights.passed import add_differentiable

Pair = namedtuple("Pair", "one other")
leaves = st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=1), st.builds(lambda: torch.zeros(1)))
trees = st.recursive(
    leaves,
    lambda inside: st.one_of(
        st.lists(inside, max_size=3),
        st.lists(inside, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=1), inside, max_size=3),
        st.dictionaries(st.text(max_size=1), inside, max_size=3).map(OrderedDict),
        st.builds(Pair, inside, inside),
    ),
    max_leaves=8,
)


@given(trees)
def test_it_finds_what_pytree_finds(tree: Any) -> None:
    found: list[torch.Tensor] = []
    add_tensors(found, tree)
    expected = [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
    assert list(map(id, found)) == list(map(id, expected))


def test_only_plain_containers_are_taken_apart() -> None:
    found: list[torch.Tensor] = []
    weight, inside = nn.Parameter(torch.ones(1)), torch.ones(1, requires_grad=True)
    nodes = (inside, None, True, torch.zeros(1), [Pair(weight, 3)], {"x": (inside,)}, deque([inside]))
    add_differentiable(found, nodes)
    assert list(map(id, found)) == list(map(id, (inside, weight, inside)))
